"""The settings that one role of a team may override."""

from __future__ import annotations

from collections.abc import Sequence

import pydantic

from hgpo_jax.config.section import Section, field
from hgpo_jax.envs.command_line import nearest


class RoleConfig(Section):
    """Settings of one role of a team. With a policy or a lora_rank it has weights of its own, which learn from its turns alone
    and have an optimizer of their own; all other roles share theirs."""

    policy: str = field(
        "shared",
        "shared: the weights of policy=; own: what they begin as, trained apart; or whatever policy.source takes, trained "
        "apart, which in text environments on the host may have another size and tokenizer",
    )
    lora_rank: int | None = field(
        None,
        "rank of adapters of its own beside pretrained weights; 0: trains the weights themselves; default: lora.rank",
        ge=0,
    )
    reward: tuple[str, ...] = field(
        (),
        "what it learns from instead of the team's reward: the sum of these signals, among which `reward` is the team's, as in "
        "reward,verdict",
    )
    lr: float | None = field(None, "learning rate, for a role with weights of its own; default: learner.lr", gt=0)

    @pydantic.field_validator("policy")
    @classmethod
    def _is_some(cls, value):
        if not value:
            raise ValueError("must be shared, own, or what policy.source takes")
        return value

    @property
    def has_weights(self) -> bool:
        """Whether the role has weights of its own."""
        return self.policy != "shared" or self.lora_rank is not None


def unknown_role(env: str, role: str, settings: RoleConfig, roles: Sequence[str]) -> str:
    """Explains that the environment of this name, with these roles, has no such role, and suggests a remedy."""
    name, value = next(iter(settings.model_dump(exclude_unset=True).items()), ("policy", "shared"))
    why = (
        f"has no such role; {nearest(role, list(roles), 'its roles are ' + ', '.join(roles))}"
        if len(roles) > 1
        else "has no roles; leave it out"
    )
    return f"roles.{role}.{name}={value}: env.name={env} {why}"
