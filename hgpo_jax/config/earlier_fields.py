"""Fields of earlier releases: those that were renamed, and those that were removed, with what holds in their place."""

from __future__ import annotations

import re
from typing import Any

from hgpo_jax.envs.command_line import nearest
from hgpo_jax.utils.errors import ConfigError, excerpt, one_line

RENAMED = {"rollout.chunk": "rollout.decode_batch_size", "rollout.ready_share": "rollout.ready_fraction"}  # old name -> new
# Fields that there were until 0.2.0, those of a role as roles.NAME.FIELD -> the value that holds now.
REMOVED: dict[str, Any] = {
    "env.things": 4,
    "env.boxes": 1,
    "env.reward": "success",
    "env.reachable_only": False,
    "env.num_tasks": 0,
    "policy.dtype": "float32",
    "policy.sample_dtype": "compute_dtype",
    "policy.tie_word_embeddings": True,
    "policy.initializer_range": 0.1,
    "rollout.max_tries": 4,
    "rollout.date": None,
    "reward.mode": "add",
    "reward.overlong_penalty": 1.0,
    "cloning.noise": 0.3,
    "cloning.thought": "",
    "advantage.weight_offset": 2.0,
    "advantage.base_group": False,
    "advantage.step_weight": 1.0,
    "advantage.prior_count": 2.0,
    "advantage.gate_count": 4.0,
    "learner.beta1": 0.9,
    "learner.beta2": 0.999,
    "learner.dual_clip": 3.0,
    "learner.process_noise": 1e-6,
    "learner.kl_kind": "k3",
    "learner.rollout_correction_cap": 2.0,
    "learner.alternate": None,
    "learner.max_nonfinite": 3,
    "critic.weight_decay": 0.01,
    "critic.beta1": 0.9,
    "critic.beta2": 0.999,
    "log.keep_every": 0,
    "log.sample_every": 0,
    "log.wandb_project": "hgpo_jax",
    "log.max_ratio": 1.2,
    "log.max_approx_kl": 0.1,
    "log.max_logp_difference": None,
    "evaluation.top_k": 0,
    "evaluation.top_p": 1.0,
    "evaluation.min_response": 0,
    "roles.NAME.template": "",
    "roles.NAME.response_limit": None,
    "roles.NAME.warmup_steps": None,
    "roles.NAME.weight_decay": None,
    "roles.NAME.beta1": None,
    "roles.NAME.beta2": None,
    "roles.NAME.grad_clip": None,
}
INSTEAD = {  # removed fields of which a constant does not say all
    "rollout.date": "is the day that policy.source was trained with, or else 2024-07-26",
    "cloning.thought": "is empty: answers are cloned without a thought",
    "learner.alternate": "is the method's own: 1 for himac, else 0",
    **{f"learner.{name}": f"is now learner.loss_options.{name}" for name in ("dual_clip", "process_noise")},
    "log.wandb_project": "is WANDB_PROJECT, a variable of the environment",
    "log.max_logp_difference": "is fixed at 0.001, for policy.compute_dtype=bfloat16 at 0.5",
    "roles.NAME.template": "is env.template for every role",
    "roles.NAME.response_limit": "is rollout.response_limit for every role",
    **{f"roles.NAME.{name}": f"is learner.{name} for every role" for name in ("warmup_steps", "weight_decay", "grad_clip")},
    "roles.NAME.beta1": "is fixed at 0.9",
    "roles.NAME.beta2": "is fixed at 0.999",
}


def drop_removed(recorded: dict) -> dict:
    """Returns the fields that an older run recorded without those that were removed, and nulls, which stand for defaults.

    Raises ConfigError for a removed field whose value was another than what holds now.
    """
    fields: dict = {}

    def copy(node: dict, into: dict, *heads: str) -> None:
        for name, value in node.items():
            field = ".".join((*heads, str(name)))
            removed_name = _removed_name(field)
            if isinstance(value, dict) and len(heads) < 2:  # a role is a section of a section
                copy(value, into.setdefault(name, {}), *heads, str(name))
            elif removed_name in REMOVED:
                if value not in (None, REMOVED[removed_name]):
                    message = f"{field}={excerpt(value)}: {_now(removed_name)}"
                    raise ConfigError(one_line(f"{message}; hgpo_jax 0.2.0 reads and continues this run"))
            elif value is not None:
                into[name] = value

    copy(recorded, fields)
    return fields


def _removed_name(name: str) -> str:
    """Returns the name that a field has in REMOVED."""
    return re.sub(r"^roles\.\w+\.", "roles.NAME.", name)


def _now(name: str) -> str:
    """Says what holds now in place of a field in REMOVED."""
    value = REMOVED[name]
    return INSTEAD.get(name, f"is fixed at {str(value).lower() if isinstance(value, bool) else value}")


def unknown_field(name: str, names: list[str]) -> str:
    """Explains that there is no field of this name, and says what holds in its place or suggests another one."""
    if name in RENAMED:
        return f"is now called {RENAMED[name]}"
    if (removed := _removed_name(name)) in REMOVED:
        return _now(removed)
    return f"no such field; {nearest(name, names, '--help-all lists them all')}"
