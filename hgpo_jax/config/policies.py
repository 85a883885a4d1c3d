"""Maps roles to policies: one set of weights for all roles, or several, each with its own training configuration.

With several, every tree of parameters elsewhere is a dict {name of the set: tree}.
"""

from __future__ import annotations

from collections.abc import Sequence

from hgpo_jax.config import Config, Section


def weight_sets(config: Config, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Groups the roles of a team by policy: name of the set of weights -> its roles. Empty if all roles share one set.

    A set is named by its roles, as in `searcher` or `carrier+cook`.
    """
    own = {role for role, settings in config.roles.items() if settings.has_weights}
    if not own:
        return {}
    shared = tuple(role for role in roles if role not in own)
    sets = [(role,) if role in own else shared for role in roles]
    return {"+".join(some): some for some in sets}


def set_of_each(config: Config, roles: Sequence[str]) -> tuple[str, ...]:
    """Returns the name of each role's set of weights; empty if all roles share one."""
    sets = weight_sets(config, roles)
    return tuple(name for role in roles for name, some in sets.items() if role in some)


def members(name: str, roles: Sequence[str]) -> list[bool]:
    """Returns, for each role, whether it uses the set of weights of this name."""
    return [role in name.split("+") for role in roles]


def config_of(config: Config, roles: Sequence[str]) -> Config:
    """Returns the configuration that initializes and trains the policy which these roles share."""
    if len(roles) > 1 or roles[0] not in config.roles:
        return config
    settings = config.roles[roles[0]]
    sections: dict[str, Section] = {}
    if settings.lr is not None:
        sections["learner"] = config.learner.model_copy(update={"lr": settings.lr})
    if settings.policy not in ("shared", "own"):
        sections["policy"] = config.policy.model_copy(update={"source": settings.policy})
    if settings.lora_rank is not None:
        sections["lora"] = config.lora.model_copy(update={"rank": settings.lora_rank})
    return config.model_copy(update=sections)
