"""The methods behind `method=`: an advantage estimator, the loss that it feeds, and the selection of episodes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.advantages import ESTIMATORS, NO_ROLES_TO_TELL_APART, Estimate, checks, estimate, parameters
from hgpo_jax.config import Config
from hgpo_jax.envs import user_code
from hgpo_jax.rollout.backend import role_names
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.rewards import signal_names
from hgpo_jax.utils.errors import ConfigError, one_line
from hgpo_jax.utils.untraceable import untraceable


@dataclasses.dataclass(frozen=True)
class Method:
    """A training method.

    estimator: a name of `hgpo_jax.advantages.ESTIMATORS`.
    loss: a name of `hgpo_jax.learner.loss_table.LOSSES`, for a configuration without `learner.loss`.
    normalize: `mean` or `mean_std`, the estimator's normalization of a group's returns; None: its own default.
    clip_low, clip_high: where that loss clips the ratio; None: its own defaults.
    dynamic_sampling: drop prompt groups whose episode rewards are all equal and sample further tasks in their place.
    critic: train a critic beside the policy and pass its values to the estimator.
    alternate: iterations for which one role of a team learns before the next one does; 0: all learn in each.
    parts: the switch, subgoal and action parts of an answer have a value head and an advantage each (`envs.protocol.Plans`).

    A configuration may override normalize, loss, clip_low and clip_high.
    """

    estimator: str
    normalize: str | None = "mean"
    loss: str = "clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dynamic_sampling: bool = False
    critic: bool = False
    alternate: int = 0
    parts: bool = False


# Arrays for estimators that need more than a Batch -> the attribute of Episodes; `gae` and `hiper` also need a critic.
AVAILABLE_ARRAYS = {
    "actions": "actions",  # equal exactly if the actions are
    "agents": "agents",
    "lengths": "response_lengths",
    "next_states": "next_states",
    "signals": "signals",  # None unless the environment or the reward function declares some
    "success": "success",
    "task": "task",  # the task's type
}

TEAM_REWARD = "reward"  # its name in `roles.NAME.reward`, beside those of signals
SIGNALS_ARE_REWARDS = ("gdpo", "dvao")
FIRST_SIGNAL = {"beacon": "milestones", "hbpo": "budget"}  # what an estimator takes the first signal for, by its name

STANDARDIZED = ("adora", "crbc", "dr_mas", "ecpo", "g2po", "graphgpo", "milegpo", "pgpo")  # by their papers

METHODS = {name: Method(name) for name in ESTIMATORS if AVAILABLE_ARRAYS.keys() >= set(parameters(name)[0])} | {
    "dapo": Method("grpo", clip_high=0.28, dynamic_sampling=True),  # Yu et al., 2025, arXiv 2503.14476
    **{name: Method(name, normalize="mean_std") for name in STANDARDIZED},
    # One length-normalised ratio for each action, clipped like PPO's.
    "gagpo": Method("gagpo", normalize="mean_std", loss="gspo", clip_low=0.2, clip_high=0.2),
    "gbpo": Method("gbpo", loss="gbpo"),
    "gspo": Method("grpo", loss="gspo"),  # Zheng et al., 2025, arXiv 2507.18071
    "hapo": Method("hapo", loss="hapo", dynamic_sampling=True),
    "himac": Method("himac", alternate=1),  # planner and executor learn in turns
    "hiper": Method("hiper", critic=True, parts=True),
    "kpo": Method("grpo", loss="kpo"),  # He et al., 2026, arXiv 2602.10609
    "ppo": Method("gae", critic=True),  # Schulman et al., 2017, arXiv 1707.06347
}


def method_named(name: str) -> Method:
    """Returns the method that `method=name` stands for; a user's estimator is loaded and listed in ESTIMATORS under this name.

    Raises ConfigError if there is none, or if it needs arrays that an iteration does not have.
    """
    if name in METHODS:
        return METHODS[name]
    try:
        _, estimator = user_code.load(user_code.locate(name, user_code.ESTIMATORS))
    except ValueError as error:
        raise ConfigError(f"method={name}: {error}") from None
    keywords = user_code.parameters(estimator)
    if not keywords or keywords[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise ConfigError(f"method={name}: is not an estimator; write it as estimator(batch, *, options) -> Estimate")
    if star := user_code.star(keywords):
        raise ConfigError(f"method={name}: takes {star}; name each of its arrays and options instead")
    if ESTIMATORS.get(name) is not estimator:
        ESTIMATORS[name] = estimator
        try:
            _check_estimator(name)
        except ConfigError:
            del ESTIMATORS[name]
            raise
    return Method(name, normalize=None)


def episode_arrays(config: Config, e: Episodes, estimator: str) -> dict[str, Any]:
    """Returns the arrays of Episodes that an estimator needs besides the batch, and with `advantage.by_role` the roles if it
    takes them: those of a team's run are compared with others that do not."""
    needed, _ = parameters(estimator)
    arrays = {array: getattr(e, AVAILABLE_ARRAYS[array]) for array in needed if array in AVAILABLE_ARRAYS}
    if config.advantage.by_role and estimator not in NO_ROLES_TO_TELL_APART:
        arrays["by_role"] = e.agents
    return {array: value for array, value in arrays.items() if value is not None}


def estimate_episodes(config: Config, e: Episodes, estimator: str, **others: Any) -> Estimate:
    """Estimates the advantages of episodes as configured, those of a role's turns from its own reward if it has one.

    others: arrays that episodes do not hold, and options in place of the configured ones.

    `Estimate.stats` are of the team's reward. Raises ValueError as `advantages.estimate` does.
    """
    arrays = {array: getattr(e, array) for array in ("rewards", "mask", "states", "groups", "invalid")}
    arrays |= episode_arrays(config, e, estimator) | estimator_options(config, estimator) | others
    record = estimate(estimator, **arrays)
    own = {role: settings.reward for role, settings in config.roles.items() if settings.reward}
    if not own:
        return record
    roles, streams = role_names(config), e.signals_by_name(signal_names(config)) | {TEAM_REWARD: e.rewards}
    for role, names in own.items():
        theirs = estimate(estimator, **arrays | {"rewards": sum(streams[name] for name in names)})
        merged = jax.tree.map(functools.partial(_take, e.agents == roles.index(role)), theirs, record)
        record = dataclasses.replace(merged, stats=record.stats)
    return record


def _take(steps: jax.Array, own: jax.Array, others: jax.Array) -> jax.Array:
    """Returns own [B, T, ...] in these steps, bool[B, T], and others elsewhere; others alone if they are not of steps."""
    if own.shape[:2] != steps.shape:
        return others
    return jnp.where(steps.reshape(*steps.shape, *(1,) * (own.ndim - 2)), own, others)


def estimator_options(config: Config, estimator: str) -> dict[str, Any]:
    """Returns an estimator's configured options and filter; options that are not configured, except for a method's
    normalization, have the estimator's defaults."""
    values = config.advantage.model_dump()
    if values["history_length"] is None:
        values["history_length"] = config.rollout.history_length
    if values["normalize"] is None:
        values["normalize"] = method_named(config.method).normalize
    _, options = parameters(estimator)
    return {name: values[name] for name in (*options, "keep") if values.get(name) is not None}


def _check_estimator(name: str) -> None:
    """Raises ConfigError if a user's estimator cannot be used; it is traced once with two trajectories of three steps."""
    needed = set(parameters(name)[0])
    if lacking := needed - AVAILABLE_ARRAYS.keys():
        raise ConfigError(
            f"method={name}: needs {', '.join(sorted(lacking))}; an iteration has {', '.join(sorted(AVAILABLE_ARRAYS))} "
            "besides the batch, and options need a default"
        )
    arrays = {
        array: jax.ShapeDtypeStruct((2, 3, 1)[:axes], dtype)
        for array, (dtype, axes) in checks.ARRAYS.items()
        if array in needed | {"rewards", "mask", "states", "groups"}
    }
    try:
        result = jax.eval_shape(lambda arguments: estimate(name, **arguments), arrays)
    except Exception as error:  # any error of the user's code
        raise ConfigError(one_line(f"method={name}: {untraceable(ESTIMATORS[name], error)}")) from None
    shape = getattr(getattr(result, "advantages", None), "shape", None)
    if not isinstance(result, Estimate) or shape != (2, 3):
        kind = "an array" if isinstance(result, jax.ShapeDtypeStruct) else f"a {type(result).__name__}"
        value = f"advantages of shape {shape}" if isinstance(result, Estimate) else kind
        mend = "return an Estimate with an advantage for each step"
        raise ConfigError(f"method={name}: returns {value} for 2 trajectories of 3 steps; {mend}")


def check_numbers(name: str) -> None:
    """Raises ConfigError if a user's estimator returns unusable numbers for four short trajectories, one of which wins.

    This runs the estimator, which opens jax's devices.
    """
    if name in METHODS:
        return
    mask = np.arange(3) < np.array([3, 2, 3, 1])[:, None]
    arrays = {array: np.zeros((*mask.shape, 1)[:axes], dtype) for array, (dtype, axes) in checks.ARRAYS.items()}
    arrays["rewards"][2, 2], arrays["success"][2], arrays["groups"][2:] = 10, True, 1
    arrays["lengths"][mask] = 1
    for array in ("states", "next_states", "actions"):
        arrays[array][:] = np.array([[0, 1, 2], [0, 1, 0], [0, 2, 1], [0, 0, 0]]) + (array == "next_states")
    arguments = {array: arrays[array] for array in {"rewards", "states", "groups", *parameters(name)[0]}}
    if fault := unusable(estimate(name, mask=mask, **arguments).advantages, mask):
        raise ConfigError(
            f"method={name}: returns {fault} of a small batch, in which a group's rewards are all 0; does it divide by 0?"
        )


def unusable(advantages: jax.typing.ArrayLike, mask: jax.typing.ArrayLike) -> str:
    """Describes bad advantages f32[B, T] where mask bool[B, T] is set, as in `NaN for 2 of 9 steps`; "" if there are none."""
    advantages, mask = np.asarray(advantages), np.asarray(mask)
    for what, wrong in (
        ("NaN", np.isnan(advantages)),
        (f"numbers beyond {checks.LARGEST:.0e}, whose squares leave float32,", np.abs(advantages) > checks.LARGEST),
    ):
        if (wrong & mask).any():
            where = "turn {1} of episode {0}".format(*np.argwhere(wrong & mask)[0])
            return f"{what} for {(wrong & mask).sum()} of {mask.sum()} steps ({where} first, counted from 0)"
    return ""
