"""WebShop without Java, server or HTML: the same pages, search, goals and rewards as the original's text mode.

shop = load_shop("items_shuffle_1000.json.gz", "items_ins_v2_1000.json.gz", seed=0)
session = shop.session(0)
observation, actions = session.reset()
observation, reward, done, actions = session.step("search[blue cotton shirt]")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hgpo_jax.envs.webshop.session import Session
    from hgpo_jax.envs.webshop.shop import Shop, load_shop

__all__ = ["Session", "Shop", "load_shop"]


def __getattr__(name: str) -> Any:
    """Imports a name on first use, because `python -m hgpo_jax.envs.webshop.catalogue` runs a module that these need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hgpo_jax.envs.webshop import session, shop

    return getattr(session if name == "Session" else shop, name)
