"""Maps roles to policies: one that all roles share, or several, each with its own training configuration.

Parameters are dicts {name of a policy: tree} everywhere, also where there is one policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from hgpo_jax.config import Config, Section

SHARED = ""  # the policy that all roles share: its files stand in the run's own folders


def roles_by_policy(config: Config, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Groups the roles of an environment by policy: name of the policy -> its roles.

    Where roles have policies of their own, a policy is named by its roles, as in `searcher` or `carrier+cook`.
    """
    separate = {role for role, settings in config.roles.items() if settings.has_weights}
    if not separate:
        return {SHARED: tuple(roles)}
    shared = tuple(role for role in roles if role not in separate)
    groups = [(role,) if role in separate else shared for role in roles]
    return {"+".join(group): group for group in groups}


def policy_of_each(config: Config, roles: Sequence[str]) -> tuple[str, ...]:
    """Returns the name of each role's policy."""
    groups = roles_by_policy(config, roles)
    return tuple(name for role in roles for name, group in groups.items() if role in group)


def members(name: str, roles: Sequence[str]) -> list[bool]:
    """Returns, for each role, whether it uses the policy of this name."""
    return [name == SHARED or role in name.split("+") for role in roles]


def config_of(config: Config, name: str) -> Config:
    """Returns the configuration that initializes and trains the policy of this name."""
    if name not in config.roles:
        return config
    settings = config.roles[name]
    sections: dict[str, Section] = {}
    if settings.lr is not None:
        sections["learner"] = config.learner.model_copy(update={"lr": settings.lr})
    if settings.policy not in ("shared", "own"):
        sections["policy"] = config.policy.model_copy(update={"source": settings.policy, "tokenizer": ""})
    if settings.lora_rank is not None:
        sections["lora"] = config.lora.model_copy(update={"rank": settings.lora_rank})
    return config.model_copy(update=sections)
