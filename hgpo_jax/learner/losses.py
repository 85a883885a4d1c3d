"""Token losses: PPO's clipped surrogate and its relatives, KL, value loss. Pure functions of arrays.

Rows are steps (one response each) and columns its tokens: N rows of R tokens. Every loss returns `(loss, stats)`.
`stats` maps a name to `(numerator, denominator)`, and `stats["loss"]` is the loss itself in that form: sums over
micro-batches of both parts, divided once, give the statistic of the whole batch exactly. A learner that accumulates
gradients therefore differentiates `stats["loss"][0]`.

Policy losses report the following, with A the advantage and r the importance ratio: of a token, smoothed in KPO, or of a
response in GSPO:
    ratio, approx_kl      means of r and of r - 1 - log r, an estimate of KL(old || new)
    clip_fraction_low     share with A < 0 and r < 1 - clip_low
    clip_fraction_high    share with A > 0 and r > 1 + clip_high
    clip_fraction_dual    share with A < 0 and r > dual_clip
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Stats = dict[str, tuple[jax.Array, jax.Array]]

AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "k2", "k3", "abs")

# exp() of a larger log-ratio carries no information for a clipped loss and overflows float32 past 88.
MAX_LOG_RATIO = 20.0
# Upper bound of a token's low-variance KL, as in the released code.
MAX_KL = 10.0


def reduce_tokens(values: jax.Array, mask: jax.Array, aggregate: str) -> tuple[jax.Array, jax.Array]:
    """Reduces token values f32[N, R] to the numerator and denominator of their aggregate, two scalars.

    aggregate: `token-mean`: sum over tokens / tokens. `seq-mean-token-sum`: mean over rows of the row's sum.
        `seq-mean-token-mean`: mean over rows of the row's mean. `seq-mean-token-sum-norm`: mean over rows of the row's
        sum / R (Dr.GRPO), a constant: the longest response allowed.
    Rows without a token are padding and do not count.
    """
    mask = mask.astype(bool)
    row_sums = jnp.sum(jnp.where(mask, values, 0.0), axis=-1)
    lengths = jnp.sum(mask, axis=-1).astype(values.dtype)
    rows = jnp.sum(lengths > 0).astype(values.dtype)
    if aggregate == "token-mean":
        return jnp.sum(row_sums), jnp.sum(lengths)
    if aggregate == "seq-mean-token-sum":
        return jnp.sum(row_sums), rows
    if aggregate == "seq-mean-token-mean":
        return jnp.sum(row_sums / jnp.maximum(lengths, 1)), rows
    if aggregate == "seq-mean-token-sum-norm":
        return jnp.sum(row_sums) / values.shape[-1], rows
    raise ValueError(f"aggregate={aggregate!r}: give one of {', '.join(AGGREGATES)}")


def divide(part: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Divides numerator by denominator; 0 if nothing was counted."""
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
) -> tuple[jax.Array, Stats]:
    """Computes PPO's clipped surrogate, negated (Schulman et al., 2017, eq. 7); DAPO's clip-higher is `clip_high=0.28`.

    new_logp, old_logp: f32[N, R], log-probabilities of the sampled tokens.
    advantages: f32[N], shared by the tokens of a response, or f32[N, R].
    mask: [N, R], true on response tokens; values elsewhere are ignored.
    dual_clip: where A < 0 the loss is at most `-dual_clip * A` (Ye et al., 2020, arXiv 1912.09729); None for no bound.
    aggregate: see `reduce_tokens`.
    """
    mask = mask.astype(bool)
    log_ratio = log_ratios(new_logp, old_logp, mask)
    loss, stats = clipped_surrogate(log_ratio, advantages, mask, clip_low, clip_high, dual_clip)
    return with_loss(reduce_tokens(loss, mask, aggregate), stats)


def gspo_loss(
    new_logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[jax.Array, Stats]:
    """Computes the GSPO loss (Zheng et al., 2025, arXiv 2507.18071): whole responses are clipped, and each counts once.

    The ratio of a response is the geometric mean of its tokens' ratios. advantages: f32[N]; the rest as in
    `policy_loss`. The statistics count responses.
    """
    mask = mask.astype(bool)
    lengths = jnp.sum(mask, axis=-1, keepdims=True)
    log_ratio = jnp.sum(log_ratios(new_logp, old_logp, mask), axis=-1, keepdims=True) / jnp.maximum(lengths, 1)
    loss, stats = clipped_surrogate(log_ratio, advantages, lengths > 0, clip_low, clip_high, dual_clip=None)
    return with_loss(reduce_tokens(loss, lengths > 0, "token-mean"), stats)


def kpo_loss(
    new_logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    process_noise: float = 1e-6,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[jax.Array, Stats]:
    """Computes the KPO loss (He et al., 2026, arXiv 2602.10609): token ratios smoothed along each response, which counts once.

    A causal Kalman filter treats the log-ratios z_t as observations, with noise of variance V, of a random walk with steps of
    variance Q from a known start: rho_0 = 0, P_0 = 0. With q = Q / V, which is `process_noise`, a gain is P_t / V, too:
        gain_t = (gain_{t-1} + q) / (gain_{t-1} + q + 1),  rho_t = rho_{t-1} + gain_t (z_t - rho_{t-1}),  gain_0 = 0.
    Gains depend on the token's place alone: about t q at first, towards sqrt(q) over some 1 / sqrt(q) tokens.
    exp(rho_t) is clipped like a ratio in place of exp(z_t) and weighs only the gradient of its own token's log-probability:
    no gradient flows through the filter. That, P_0 and the mean over responses are those of the authors' code
    (github.com/shuohe1995/verl-kpo).

    Arguments as in `policy_loss`; the tokens of a response are a prefix. The statistics count tokens; `approx_kl` is that of
    the ratios before smoothing.
    """
    mask = mask.astype(bool)
    log_ratio = log_ratios(new_logp, old_logp, mask)
    observed = jax.lax.stop_gradient(log_ratio)

    gains = jnp.broadcast_to(_kalman_gains(observed.shape[-1], process_noise).astype(observed.dtype), observed.shape)

    def after(first: list[jax.Array], then: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Composes two affine maps of rho: factors and summands.
        return first[0] * then[0], then[0] * first[1] + then[1]

    _, filtered = jax.lax.associative_scan(after, (1 - gains, gains * observed), axis=-1)  # R tokens in log R steps
    smoothed = jnp.where(mask, log_ratio - observed + filtered, 0.0)  # its value is the filter's, its gradient 1
    loss, stats = clipped_surrogate(smoothed, advantages, mask, clip_low, clip_high, dual_clip=None)
    stats["approx_kl"] = reduce_tokens(_approx_kl(observed), mask, "token-mean")
    return with_loss(reduce_tokens(loss, mask, "seq-mean-token-mean"), stats)


def _kalman_gains(tokens: int, process_noise: float) -> np.ndarray:
    """Computes the gains of `kpo_loss`, f64[R]."""
    gains, gain = np.empty(tokens), 0.0
    for t in range(tokens):
        gain = (gain + process_noise) / (gain + process_noise + 1)
        gains[t] = gain
    return gains


def kl(new_logp: jax.Array, ref_logp: jax.Array, kind: str = "k3") -> jax.Array:
    """Estimates KL(new || ref) on tokens sampled from the new policy, elementwise f32 (Schulman, 2020).

    With d = ref - new: `k1` -d, `k2` d^2 / 2, `k3` exp(d) - d - 1 (at most 10, as in the released code), `abs` |d|.

    The gradient of a loss is another matter, because the tokens are fixed and only their probabilities have gradients. In
    expectation `k2`'s gradient is that of KL(new || ref), `abs`'s that of twice the total variation, and `k3`'s that of
    KL(ref || new), but 0 for tokens with d above 2.61 or below -10.99, where it is cut. `k1`'s own would be 0 (it teaches
    nothing), so it takes that of `k2`.
    """
    d = ref_logp - new_logp
    if kind == "k1":
        return d**2 / 2 + jax.lax.stop_gradient(-d - d**2 / 2)
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
) -> tuple[jax.Array, Stats]:
    """Aggregates `kl` over tokens; f32[N, R] each."""
    mask = mask.astype(bool)
    values = kl(jnp.where(mask, new_logp, 0.0), jnp.where(mask, ref_logp, 0.0), kind)
    stats = {"kl": reduce_tokens(values, mask, "token-mean")}
    return with_loss(reduce_tokens(values, mask, aggregate), stats)


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, mask: jax.Array, *, clip: float = 0.5
) -> tuple[jax.Array, Stats]:
    """Computes PPO's clipped value loss: the mean of `max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2`.

    All arrays have one shape, f32[N, R] for values by token or f32[N] for values by step.
    """
    mask = mask.astype(bool)
    values, old_values, returns = (jnp.where(mask, x, 0.0) for x in (values, old_values, returns))
    near = jnp.clip(values, old_values - clip, old_values + clip)
    plain, bounded = (values - returns) ** 2, (near - returns) ** 2
    count = jnp.sum(mask).astype(values.dtype)
    stats = {"value_clip_fraction": (jnp.sum(jnp.where(mask, bounded > plain, False)).astype(values.dtype), count)}
    return with_loss((jnp.sum(jnp.maximum(plain, bounded)) / 2, count), stats)


def rollout_correction(
    logp: jax.Array, sampled_logp: jax.Array, mask: jax.Array, *, level: str, cap: float = 2.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes truncated importance weights for tokens drawn by another policy than the learning one, such as a bfloat16 copy.

    The weight is min(p / q, cap) with p the policy's probability before the update and q the sampler's, of a token or of its
    whole response. A policy loss with p's log-probabilities as the old ones, and with advantages multiplied by the weights, is
    the proposal of Yao et al. ("Your efficient RL framework secretly brings you off-policy RL training", 2025); verl calls it
    rollout correction. Truncation goes back to Ionides ("Truncated importance sampling", 2008). The weight does not correct the
    frequency of the tokens before a token (`token`), or of the turns before a response (`sequence`).

    Args:
      logp, sampled_logp: f32[N, R], log p and log q of the tokens.
      mask: [N, R], true on response tokens.
      level: `token` or `sequence`.
      cap: at least 1.

    Returns: (weights f32[N, R], with `sequence` the same for all tokens of a response; statistics f32[], over tokens or
    responses: `weight`, the mean, `truncated`, the share that the cap bounds, `effective`, (mean w)^2 / mean(w^2), the
    effective share of the samples; over tokens `kl`, the mean of p / q - 1 - log(p / q), an estimate of KL(q || p)).
    """
    mask = mask.astype(bool)
    by_token = log_ratio = log_ratios(logp, sampled_logp, mask)
    counted = mask
    if level == "sequence":
        log_ratio, counted = jnp.sum(by_token, axis=-1, keepdims=True), jnp.any(mask, axis=-1, keepdims=True)
    elif level != "token":
        raise ValueError(f"level={level!r}: give token or sequence")
    ratio = ratios(log_ratio)
    weights = jnp.minimum(ratio, cap)
    mean = lambda values, counted: jnp.sum(jnp.where(counted, values, 0.0)) / jnp.maximum(counted.sum(), 1)  # noqa: E731
    weight = mean(weights, counted)
    stats = {
        "weight": weight,
        "truncated": mean(ratio > cap, counted),
        "effective": weight**2 / jnp.maximum(mean(weights**2, counted), 1e-12),
        "kl": mean(_approx_kl(by_token), mask),
    }
    return jnp.broadcast_to(weights, mask.shape), stats


def mismatch_mask(
    logp: jax.Array, sampled_logp: jax.Array, mask: jax.Array, *, response_limit: float, token_limit: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes HisPO's weights of 0 and 1 for tokens drawn by another policy (arXiv 2603.21065, eq. 8 and 9).

    With p, q, logp and sampled_logp as in `rollout_correction`, a token counts if its p / q is less than `token_limit` from
    1, and the geometric mean of p / q over its response less than `response_limit`. The ratio of the loss stays that to the
    sampler, and the tokens that do not count stay in its denominator. The paper does not give its limits.

    Returns: (weights f32[N, R], statistics f32[]: `weight`, the mean weight, which is the share that counts, and `kl`).
    """
    mask = mask.astype(bool)
    log_ratio = log_ratios(logp, sampled_logp, mask)
    mean = jnp.sum(log_ratio, axis=-1, keepdims=True) / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    off_by = lambda log_ratio: jnp.abs(jnp.expm1(jnp.minimum(log_ratio, MAX_LOG_RATIO)))  # noqa: E731
    weights = ((off_by(mean) < response_limit) & (off_by(log_ratio) < token_limit)).astype(jnp.float32)
    values = {"weight": weights, "kl": _approx_kl(log_ratio)}
    return weights, {name: divide(reduce_tokens(value, mask, "token-mean")) for name, value in values.items()}


def log_ratios(new_logp: jax.Array, old_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes new - old, 0 outside the mask; masks before subtracting, because a gradient through inf times 0 is nan."""
    return jnp.where(mask, new_logp, 0.0) - jnp.where(mask, old_logp, 0.0)


def ratios(log_ratio: jax.Array) -> jax.Array:
    """Returns exp(log_ratio), of log-ratios clipped to MAX_LOG_RATIO on either side."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(
    log_ratio: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    clip_low: jax.Array | float,
    clip_high: jax.Array | float,
    dual_clip: float | None,
) -> tuple[jax.Array, Stats]:
    """Computes the clipped loss f32[N, R] of each token and its statistics; `log_ratio` is 0 outside the mask.

    clip_low, clip_high: for all tokens, or f32[N, R].
    """
    if advantages.ndim == log_ratio.ndim - 1:
        advantages = advantages[:, None]
    advantages = jnp.where(mask, advantages, 0.0)
    ratio = ratios(log_ratio)
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
    values["approx_kl"] = _approx_kl(log_ratio)
    return loss, {name: reduce_tokens(value, mask, "token-mean") for name, value in values.items()}


def _approx_kl(log_ratio: jax.Array) -> jax.Array:
    """Computes r - 1 - log r of each token, without losing digits near 0."""
    return jnp.expm1(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_ratio


def ratio_stats(log_ratio: jax.Array, mask: jax.Array) -> Stats:
    """Computes the statistics `ratio` and `approx_kl` of a loss that does not clip; `log_ratio` is 0 outside the mask."""
    values = {"ratio": ratios(log_ratio), "approx_kl": _approx_kl(log_ratio)}
    return {name: reduce_tokens(value, mask, "token-mean") for name, value in values.items()}


def by_token(advantages: jax.Array) -> jax.Array:
    """Returns advantages f32[N] as a column, and f32[N, R] as they are."""
    return advantages[:, None] if advantages.ndim == 1 else advantages


def with_loss(part: tuple[jax.Array, jax.Array], stats: Stats) -> tuple[jax.Array, Stats]:
    """Returns what a loss returns, from its numerator and denominator and its other statistics."""
    return divide(part), {"loss": part, **stats}
