"""Token losses: PPO's clipped surrogate and its relatives, KL, entropy, value loss. Pure functions of arrays.

Rows are steps (one response each) and columns its tokens: N rows of R tokens. Every loss returns `(loss, stats)`.
`stats` maps a name to `(numerator, denominator)`, and `stats["loss"]` is the loss itself in that form: sums over
micro-batches of both parts, divided once, give the statistic of the whole batch exactly. A learner that accumulates
gradients therefore differentiates `stats["loss"][0]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Stats = dict[str, tuple[jax.Array, jax.Array]]

AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "k2", "k3", "abs")

# exp() of a larger log-ratio carries no information for a clipped loss and overflows float32 past 88.
MAX_LOG_RATIO = 20.0
# Bound of a token's low-variance KL, as in the released code.
MAX_KL = 10.0


def reduce_tokens(
    values: jax.Array, mask: jax.Array, aggregate: str, norm_length: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Token values f32[N, R] to the numerator and denominator of their aggregate, two scalars.

    aggregate: `token-mean`: sum over tokens / tokens. `seq-mean-token-sum`: mean over rows of the row's sum.
        `seq-mean-token-mean`: mean over rows of the row's mean. `seq-mean-token-sum-norm`: mean over rows of the row's
        sum / norm_length (Dr.GRPO), a constant such as the longest response allowed (default R).
    Rows without a token are padding and count nowhere.
    """
    mask = mask.astype(values.dtype)
    row_sums, lengths = jnp.sum(values * mask, axis=-1), jnp.sum(mask, axis=-1)
    rows = jnp.sum(lengths > 0).astype(values.dtype)
    if aggregate == "token-mean":
        return jnp.sum(row_sums), jnp.sum(lengths)
    if aggregate == "seq-mean-token-sum":
        return jnp.sum(row_sums), rows
    if aggregate == "seq-mean-token-mean":
        return jnp.sum(row_sums / jnp.maximum(lengths, 1)), rows
    if aggregate == "seq-mean-token-sum-norm":
        return jnp.sum(row_sums) / (values.shape[-1] if norm_length is None else norm_length), rows
    raise ValueError(f"aggregate={aggregate!r}: give one of {', '.join(AGGREGATES)}")


def divide(part: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Numerator over denominator; 0 when nothing was counted."""
    numerator, denominator = part
    return numerator / jnp.where(denominator > 0, denominator, 1)


def policy_loss(
    new_logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregate: str = "token-mean",
    norm_length: float | None = None,
) -> tuple[jax.Array, Stats]:
    """PPO's clipped surrogate, negated (Schulman et al., 2017, eq. 7); DAPO's clip-higher is `clip_high=0.28`.

    new_logp, old_logp: f32[N, R], log-probabilities of the sampled tokens.
    advantages: f32[N], shared by the tokens of a response, or f32[N, R].
    mask: [N, R], true on response tokens; what the others hold is ignored.
    dual_clip: where A < 0 the loss is at most `-dual_clip * A` (Ye et al., 2020, eq. 5); None for no bound.
    aggregate, norm_length: see `reduce_tokens`.
    """
    mask = mask.astype(bool)
    log_ratio = jnp.where(mask, new_logp - old_logp, 0.0)
    token_loss, stats = _surrogate(log_ratio, advantages, mask, clip_low, clip_high, dual_clip)
    return _with_loss(reduce_tokens(token_loss, mask, aggregate, norm_length), stats)


def kl(new_logp: jax.Array, ref_logp: jax.Array, kind: str = "k3") -> jax.Array:
    """Estimates of KL(new || ref) on tokens sampled from the new policy, elementwise f32 (Schulman, 2020).

    With d = ref - new: `k1` -d, `k2` d^2 / 2, `k3` exp(d) - d - 1 (at most 10, as in the released code), `abs` |d|.
    """
    d = ref_logp - new_logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    if kind == "k3":
        d = jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return jnp.minimum(jnp.expm1(d) - d, MAX_KL)
    if kind == "abs":
        return jnp.abs(d)
    raise ValueError(f"kind={kind!r}: give one of {', '.join(KL_KINDS)}")


def kl_loss(
    new_logp: jax.Array,
    ref_logp: jax.Array,
    mask: jax.Array,
    *,
    kind: str = "k3",
    aggregate: str = "token-mean",
    norm_length: float | None = None,
) -> tuple[jax.Array, Stats]:
    """`kl` aggregated over tokens; f32[N, R] each."""
    mask = mask.astype(bool)
    # Padding is made harmless before `kl`, because a gradient through inf times 0 is nan.
    values = kl(jnp.where(mask, new_logp, 0.0), jnp.where(mask, ref_logp, 0.0), kind)
    stats = {"kl": reduce_tokens(values, mask, "token-mean")}
    return _with_loss(reduce_tokens(values, mask, aggregate, norm_length), stats)


def _surrogate(
    log_ratio: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[jax.Array, Stats]:
    """The clipped loss f32[N, R] of each token and its statistics; `log_ratio` is 0 outside the mask."""
    if advantages.ndim == log_ratio.ndim - 1:
        advantages = advantages[:, None]
    advantages = jnp.where(mask, advantages, 0.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    negative = advantages < 0
    flags = {
        "clip_fraction_low": negative & (ratio < 1 - clip_low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1 + clip_high),
    }
    if dual_clip is not None:
        loss = jnp.where(negative, jnp.minimum(loss, -dual_clip * advantages), loss)
        flags["clip_fraction_dual"] = negative & (ratio > dual_clip)
    values = {name: flag.astype(jnp.float32) for name, flag in flags.items()}
    values["ratio"] = ratio
    values["approx_kl"] = jnp.expm1(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_ratio
    return loss, {name: reduce_tokens(value, mask, "token-mean") for name, value in values.items()}


def _with_loss(part: tuple[jax.Array, jax.Array], stats: Stats) -> tuple[jax.Array, Stats]:
    return divide(part), {"loss": part, **stats}
