"""The losses behind `learner.loss=`, ours and users', each for any method; how they are found, configured and checked.

A loss is one function, `loss(logp, old_logp, advantages, mask, *, ARRAYS, OPTIONS) -> (loss, stats)`, of arrays and with
results as in `losses.py`. Keyword arguments without a default are further arrays (`ARRAYS`). Those with a default are options:
the fields clip_low, clip_high and aggregate, and others from `learner.loss_options`. `advantages` are f32[N], or f32[N, R]
where tokens have their own; `losses.by_token` makes them one kind. A loss without the option `aggregate` counts every response
once.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.config import LearnerConfig
from hgpo_jax.envs import user_code
from hgpo_jax.learner import losses
from hgpo_jax.learner.fiber import fiber_loss
from hgpo_jax.learner.gbpo import gbpo_loss
from hgpo_jax.learner.hapo import hapo_loss
from hgpo_jax.learner.hicra_egpo import egpo_loss, hicra_loss
from hgpo_jax.learner.methods import Method
from hgpo_jax.utils.errors import ConfigError, one_line
from hgpo_jax.utils.untraceable import untraceable

PolicyLoss = Callable[..., tuple[jax.Array, losses.Stats]]

LOSSES: dict[str, PolicyLoss] = {
    "clip": losses.policy_loss,
    "egpo": egpo_loss,
    "fiber": fiber_loss,
    "gbpo": gbpo_loss,
    "gspo": losses.gspo_loss,
    "hapo": hapo_loss,
    "hicra": hicra_loss,
    "kpo": losses.kpo_loss,
}
# Losses for which a response has one advantage and one importance weight.
WHOLE_RESPONSES = ("gspo",)
# The policy's entropy at each token, f32[N, R]; tokens in the parts of an answer before its action, bool[N, R]; the margins of
# an `Estimate`, or else the advantages, in their shape.
ARRAYS = ("entropy", "planning", "margins")
FIELDS = ("clip_low", "clip_high", "aggregate")  # options that are fields of `LearnerConfig`
FORM = "write it as loss(logp, old_logp, advantages, mask, *, options) -> (loss, stats)"
_NOT_NEGATIVE = (lambda x: 0 <= x < math.inf, "a number of 0 or more")
# Options of our losses: which numbers are accepted, and which to give instead. A dual_clip of at most 1 would silently stop
# learning from bad actions.
OPTIONS: dict[str, tuple[Callable[[float], bool], str]] = {
    "advantage_slope": _NOT_NEGATIVE,
    "bonus": _NOT_NEGATIVE,
    "budget_down": _NOT_NEGATIVE,
    "budget_up": _NOT_NEGATIVE,
    "clip_slope": _NOT_NEGATIVE,
    "dual_clip": (lambda x: x > 1, "a number above 1, or none"),
    "process_noise": _NOT_NEGATIVE,
    "softness": (lambda x: 1e-30 <= x < math.inf, "a number of 1e-30 or more"),
    "strength": _NOT_NEGATIVE,
    "token_clip": _NOT_NEGATIVE,
}
# The responses that a user's loss is checked with: their tokens, of which the first plans, and entropies.
_LENGTHS = np.array([3, 1, 2, 0])
_PLANNING = (np.arange(3) < 1) & (_LENGTHS > 0)[:, None]
_ENTROPY = np.ones((4, 3), np.float32)


def name_of(config: LearnerConfig, method: Method) -> str:
    """Returns the name of the configured loss, or else of the method's own."""
    return config.loss or method.loss


def loss_named(name: str) -> PolicyLoss:
    """Returns the loss that `learner.loss=name` stands for. Raises ConfigError if there is none."""
    if name in LOSSES:
        return LOSSES[name]
    try:
        loss: PolicyLoss = user_code.load(user_code.locate(name, user_code.LOSSES))[1]
    except ValueError as error:
        raise ConfigError(f"learner.loss={name}: {error}") from None
    return loss


def parameters(name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the further arrays that a loss needs, and its options with their defaults. Raises ConfigError."""
    keywords = user_code.parameters(loss_named(name))
    if [p.kind for p in keywords[:4]] != [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 4:
        raise ConfigError(f"learner.loss={name}: is not a loss; {FORM}")
    if star := user_code.star(keywords):
        raise ConfigError(f"learner.loss={name}: takes {star}; name each of its arrays and options instead")
    arrays = tuple(p.name for p in keywords[4:] if p.default is p.empty)
    if lacking := set(arrays).difference(ARRAYS):
        raise ConfigError(
            f"learner.loss={name}: needs {', '.join(sorted(lacking))}; an update has {', '.join(ARRAYS)} besides the four "
            "arrays, and options need a default"
        )
    return arrays, {p.name: p.default for p in keywords[4:] if p.default is not p.empty}


def options(config: LearnerConfig, method: Method) -> dict[str, Any]:
    """Returns all options of the configured loss; a method's clips are for its own loss. Raises ConfigError."""
    name = name_of(config, method)
    arrays, values = parameters(name)
    own = {"clip_low": method.clip_low, "clip_high": method.clip_high} if name == method.loss else {}
    given = {field: getattr(config, field) for field in FIELDS}
    values |= {field: value for field, value in [*own.items(), *given.items()] if field in values and value is not None}
    settable = {option: value for option, value in values.items() if option not in FIELDS}
    for option, value in config.loss_options.items():
        if option not in settable:
            known = ", ".join(settable) or "none"
            raise ConfigError(f"learner.loss_options.{option}={value}: loss {name} has no such option; it has {known}")
    loss = functools.partial(loss_named(name), None, None, None, None, **dict.fromkeys(arrays))
    try:
        chosen = user_code.options(loss, config.loss_options)
    except ValueError as error:
        raise ConfigError(f"learner.loss_options.{error}") from None
    for option, value in chosen.items() if name in LOSSES else ():
        accepts, mend = OPTIONS.get(option, (None, ""))
        if accepts and value is not None and not accepts(value):
            raise ConfigError(f"learner.loss_options.{option}={value}: loss {name} cannot learn with it; give {mend}")
    return values | chosen


def aggregation(config: LearnerConfig, method: Method) -> str:
    """Returns how token losses become one number; a loss that does not let one choose counts every response once."""
    return config.aggregate if "aggregate" in parameters(name_of(config, method))[1] else "seq-mean-token-mean"


def configured(config: LearnerConfig, method: Method) -> PolicyLoss:
    """Returns `loss(logp, old_logp, advantages, mask, **all_arrays)`, with its options, for one or all of `ARRAYS`."""
    name = name_of(config, method)
    arrays, _ = parameters(name)
    loss = functools.partial(loss_named(name), **options(config, method))
    return lambda *four, **further: loss(*four, **{array: further[array] for array in arrays})


def check_loss(config: LearnerConfig, method: Method) -> None:
    """Raises ConfigError if a loss cannot be used; a user's is traced with both kinds of advantages."""
    loss, name = configured(config, method), name_of(config, method)
    if name in LOSSES:
        return
    for by_token in (False, True):
        try:
            batch = _small_batch(by_token)
            result = jax.eval_shape(loss, *batch, entropy=_ENTROPY, planning=_PLANNING, margins=batch[2])
        except Exception as error:  # any error of the user's code
            shape = "[4, 3]" if by_token else "[4]"
            why = untraceable(loss_named(name), error)
            raise ConfigError(one_line(f"learner.loss={name}: with advantages of shape {shape}, {why}")) from None
        pairs = result[1] if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict) else {}
        if "loss" not in pairs or [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(pairs)] != [()] * (2 * len(pairs)):
            raise ConfigError(
                f"learner.loss={name}: does not return (loss, stats) with pairs of scalars in stats, one of them `loss`; "
                "return with_loss(reduce_tokens(values, mask, aggregate), stats)"
            )


def check_loss_numbers(config: LearnerConfig, method: Method) -> None:
    """Raises ConfigError if a user's loss cannot be learned from, by its numbers for four short responses, one of them empty.

    This computes, which opens jax's devices.
    """
    name = name_of(config, method)
    if name in LOSSES:
        return
    loss, (logp, *others) = configured(config, method), _small_batch(by_token=False)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def numerator(logp: jax.Array, entropy: jax.Array) -> tuple[jax.Array, losses.Stats]:
        _, stats = loss(logp, *others, entropy=entropy, planning=_PLANNING, margins=others[1])
        return stats["loss"][0], stats

    mask = others[-1]
    (value, stats), gradient = numerator(logp, _ENTROPY)
    beyond, _ = numerator(np.where(mask, logp, -7), np.where(mask, _ENTROPY, 7))
    counted = mask.sum() if aggregation(config, method) == "token-mean" else (_LENGTHS > 0).sum()
    fault = ""
    if not np.isfinite(jnp.stack(jax.tree.leaves(stats))).all():
        fault = f"returns {', '.join(f'{name}={pair[0]}/{pair[1]}' for name, pair in stats.items())}; does it divide by 0?"
    elif not np.isfinite(gradient).all():
        fault = "has a gradient that is not finite; mask arguments before a division or a logarithm, not only the result"
    elif not np.asarray(gradient)[mask].any():
        fault = "has a gradient of 0 by every token's logp; nothing would be learned"
    elif beyond[0] != value:
        fault = "depends on what stands outside the mask; use reduce_tokens, or jnp.where(mask, ..., 0)"
    elif stats["loss"][1] != counted:
        fault = (
            f"counts {stats['loss'][1]:g} where the update counts {counted:g}; give it the option aggregate and return "
            "reduce_tokens(values, mask, aggregate), or without that option count every response once"
        )
    if fault:
        raise ConfigError(one_line(f"learner.loss={name}: {fault}"))


def _small_batch(by_token: bool) -> tuple[np.ndarray, ...]:
    """Makes (logp, old_logp, advantages, mask) of four responses; the first was sampled by the policy itself."""
    mask = np.arange(3) < _LENGTHS[:, None]
    old_logp = np.where(mask, np.float32(-1), np.float32(0))
    moved = np.array([[0], [0.1], [-0.1], [0]], np.float32)
    advantages = np.array([1, -1, 0.5, 0], np.float32)
    spread = np.repeat(advantages[:, None], 3, axis=1) if by_token else advantages
    return np.where(mask, old_logp + moved, np.float32(0)), old_logp, spread, mask
