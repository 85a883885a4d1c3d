"""Sampling: one prefill, then a compiled decode loop that goes on with fewer rows as others end.

Each row has its own random key, folded with the position of the token, so that what a row samples depends neither on its
batch mates nor on the mesh. Log-probabilities are those of the distribution that was sampled from.
"""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp

from hgpo_jax.mesh import constrain, free_axes, largest_count, layout
from hgpo_jax.policy.qwen2 import CACHE_AXES


@chex.dataclass(frozen=True)
class Responses:
    """tokens i32[B, R] (0 after the end), logp f32[B, R] (0 after the end), lengths i32[B] (the end token included)."""

    tokens: chex.Array
    logp: chex.Array
    lengths: chex.Array


def buckets(largest: int, *, factor: int, smallest: int) -> list[int]:
    """`largest` and its parts by powers of `factor` down to `smallest`, four at most, ascending."""
    sizes = {largest}
    for power in range(1, 4):
        size = -(-largest // factor**power)
        if size >= smallest:
            sizes.add(size)
    return sorted(sizes)


@chex.dataclass(frozen=True)
class Decoding:
    """The distribution that tokens are drawn from. All are scalars: other values compile nothing anew.

    temperature: 0 takes the most likely token.
    top_k: only the k most likely tokens; 0: all.
    top_p: of these, only the most likely ones that together reach this probability (Holtzman et al., arXiv 1904.09751).
    min_new: no response ends before this many tokens.
    """

    temperature: chex.Numeric = 1.0
    top_k: chex.Numeric = 0
    top_p: chex.Numeric = 1.0
    min_new: chex.Numeric = 0


def sample_token(logits, keys, decoding: Decoding):
    """One token per row.

    Args:
      logits: f32[B, V].
      keys: a random key per row.

    Returns: (tokens i32[B], their log-probabilities f32[B] in the distribution drawn from; at temperature 0 in the whole
    softmax at temperature 1).
    """
    temperature = jnp.asarray(decoding.temperature)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    restricted = (temperature > 0) & ((jnp.asarray(decoding.top_k) > 0) | (jnp.asarray(decoding.top_p) < 1))
    # Sorting a vocabulary costs more than the rest of this: only where it is asked for.
    scaled = jax.lax.cond(restricted, lambda x: most_likely(x, decoding.top_k, decoding.top_p), lambda x: x, scaled)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype))(keys)
    token = first_largest(jnp.where(temperature > 0, scaled + noise, logits))
    return token, pick(jax.nn.log_softmax(scaled), token)


def first_largest(values):
    """`argmax` of f32[B, V] over the last axis, i32[B].

    In two steps, because XLA's CPU compiler draws what argmax reads into its loop over single values: of a small policy's token
    the noise took the longest.
    """
    last = values.shape[-1] - 1  # where no value is the largest: for one that is not a number
    return jnp.where(values == values.max(-1, keepdims=True), jnp.arange(last + 1), last).min(-1)


def most_likely(logits, top_k, top_p):
    """f32[B, V] with -inf outside the top k, and of those outside the fewest that reach probability top_p; ties stay."""
    ordered = -jnp.sort(-logits, axis=-1)
    inside = (jnp.arange(ordered.shape[-1]) < top_k) | (top_k == 0)
    probability = jax.nn.softmax(jnp.where(inside, ordered, -jnp.inf))
    inside &= jnp.cumsum(probability, axis=-1) - probability < top_p
    least = jnp.where(inside, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def pick(logps, tokens):
    """The entries of f32[..., V] at tokens i32[...], f32[...].

    A sum under a mask, because XLA's partitioner aborts on a gather from an array whose rows and vocabulary are both
    split inside a shard_map over a third mesh axis.
    """
    return jnp.where(jnp.arange(logps.shape[-1]) == tokens[..., None], logps, 0.0).sum(-1)


@chex.dataclass(frozen=True)
class Live:
    """Rows that are being sampled: number in the batch, random key, length of the prompt, last token, whether it has ended."""

    row: chex.Array
    key: chex.PRNGKey
    start: chex.Array
    token: chex.Array
    ended: chex.Array
    cache: list[tuple[chex.Array, chex.Array]]


def parts() -> int:
    """Over how many devices of the mesh in context the compiler splits rows."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in free_axes("batch"))


def rows_needed(ended):
    """The smallest batch that rows, ended bool[B], can go on in, if each device keeps its own."""
    return largest_count((~ended).reshape(parts(), -1).sum(1).max() * parts())


def unended(live: Live, size: int) -> Live:
    """`size` rows, all that have not ended among them: the same number on each device that has a part of them."""

    share = size // parts()

    def part(live: Live) -> Live:
        first = jnp.argsort(live.ended, stable=True)[:share]
        return jax.tree.map(lambda a: a[first], live)

    if share == size:
        return part(live)
    # By hand: the compiler aborts on moving rows of an array whose heads are split too.
    axes = {1: ("batch",), 4: CACHE_AXES}
    spec = jax.tree.map(lambda a: layout(axes[a.ndim], a.shape), live)
    manual = {*free_axes("batch"), *free_axes("kv_heads")}
    return jax.shard_map(part, in_specs=(spec,), out_specs=spec, axis_names=manual, check_vma=False)(live)


SHRINK_FROM = 64  # new tokens: shorter responses end too soon for fewer rows to pay for moving them


def generate(
    model, blocks, prompts, lengths, keys, *, max_new: int, ends: tuple[int, ...], decoding: Decoding
) -> Responses:
    """Samples a response to each prompt.

    Args:
      model: a bound `Qwen2`.
      blocks: its `unstacked()`, to be made outside of every loop.
      prompts: i32[B, P], right-padded.
      lengths: i32[B], tokens of each prompt, at least 1.
      keys: a random key per row.
      max_new: R, the longest response.
      ends: the tokens that end a response.
    """
    rows, width = prompts.shape
    hidden, cache = model.prefill(prompts, lengths - 1, width + max_new - 1)

    def draw(hidden, keys, i):
        logits = constrain(model.logits(hidden), "batch", "vocab_of_rows")
        too_early = is_end(jnp.arange(logits.shape[-1])) & (i < decoding.min_new)
        logits = jnp.where(too_early, -jnp.inf, logits)
        return sample_token(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, i), decoding)

    def is_end(tokens):
        return (tokens[..., None] == jnp.asarray(ends)).any(-1)

    token, logp = draw(hidden, keys, 0)
    tokens = jnp.zeros((rows, max_new), jnp.int32).at[:, 0].set(token)
    logps = jnp.zeros((rows, max_new), jnp.float32).at[:, 0].set(logp)
    count = jnp.ones(rows, jnp.int32)
    live = Live(row=jnp.arange(rows), key=keys, start=lengths, token=token, ended=is_end(token), cache=cache)
    i = jnp.int32(1)
    # Two sizes: each is one more copy of all layers to compile.
    sizes = [rows, rows // 4] if rows % (4 * parts()) == 0 and max_new >= SHRINK_FROM else [rows]
    for size, next_size in zip(sizes, [*sizes[1:], 0], strict=True):
        if size < rows:
            live = unended(live, size)

        def step(carry):
            i, live, tokens, logps, count, _ = carry
            hidden, cache = model.decode(live.token, live.start + i - 1, live.cache, blocks)
            token, logp = draw(hidden, live.key, i)
            token, logp = jnp.where(live.ended, 0, token), jnp.where(live.ended, 0.0, logp)
            tokens, logps = tokens.at[live.row, i].set(token), logps.at[live.row, i].set(logp)
            count = count.at[live.row].add(~live.ended)
            live = live.replace(token=token, cache=cache, ended=live.ended | is_end(token))
            return i + 1, live, tokens, logps, count, rows_needed(live.ended)

        unfinished = lambda carry, n=next_size: (carry[0] < max_new) & (carry[-1] > n)  # noqa: E731
        carry = (i, live, tokens, logps, count, rows_needed(live.ended))
        i, live, tokens, logps, count, _ = jax.lax.while_loop(unfinished, step, carry)
    return Responses(tokens=tokens, logp=logps, lengths=count)
