"""WebShop without Java, server or HTML: same pages, search, goals and rewards as the original's text mode.

    shop = load_shop("items_shuffle_1000.json.gz", "items_ins_v2_1000.json.gz", seed=0)
    session = shop.session(0)
    observation, actions = session.reset()
    observation, reward, done, actions = session.step("search[blue cotton shirt]")
"""

from hgpo_jax.envs.webshop.session import Session
from hgpo_jax.envs.webshop.shop import Shop, load_shop

__all__ = ["Session", "Shop", "load_shop"]
