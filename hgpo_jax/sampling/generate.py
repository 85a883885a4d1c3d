"""Sampling: one prefill, then a compiled decode loop that continues with fewer rows once most have ended.

Each row has its own random key, folded with the position of the token, so the samples of a row depend neither on its batch
mates nor on the mesh. Log-probabilities are those of the sampling distribution.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hgpo_jax.policy.kv_cache import KVCache, manual_axes
from hgpo_jax.policy.mesh import auto_axes, constrain, max_across_devices, partition_in_context
from hgpo_jax.policy.pictures import Pictures
from hgpo_jax.policy.vocabulary import gather_logprobs
from hgpo_jax.sampling.constraint import Sequences, restrict

log = logging.getLogger(__name__)

# Fields of generation_config.json that would change a distribution and that no sampler here knows, with the values that do not.
PENALTIES = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}


class Responses(struct.PyTreeNode):
    """Sampled responses to B prompts."""

    tokens: jax.Array  # i32[B, R], 0 after the end
    logp: jax.Array  # f32[B, R], 0 after the end
    lengths: jax.Array  # i32[B], including the end token
    allowed: jax.Array | None = None  # u32[B, R, W], what each could be (`constraint.py`), 0 after the end; None: any token


def buckets(largest: int, *, factor: int, smallest: int) -> list[int]:
    """Returns `largest` divided by powers of `factor` down to `smallest`: four sizes at most, ascending."""
    sizes = {largest}
    for power in range(1, 4):
        size = -(-largest // factor**power)
        if size >= smallest:
            sizes.add(size)
    return sorted(sizes)


def well_filled(sizes: Sequence[int], count: int) -> int:
    """Returns the smallest of ascending sizes that holds `count`; the largest that it fills, if that would be half empty."""
    above = next((size for size in sizes if size >= count), sizes[-1])
    return above if above < 2 * count else max((size for size in sizes if size <= count), default=above)


class Decoding(struct.PyTreeNode):
    """The distribution that tokens are drawn from: scalars, so that changing them compiles nothing, or [B], one for each row.

    temperature: 0 takes the most likely token.
    top_k: only the k most likely tokens; 0: all.
    top_p: among these, only the most likely ones that together reach this probability (Holtzman et al., arXiv 1904.09751).
    min_new: no response ends before this many tokens.
    answers: what the responses may be; None: anything.
    allowed: u32[B, W], what the next token alone may be (`constraint.py`); None: anything.
    """

    temperature: jax.typing.ArrayLike = 1.0
    top_k: jax.typing.ArrayLike = 0
    top_p: jax.typing.ArrayLike = 1.0
    min_new: jax.typing.ArrayLike = 0
    answers: Sequences | None = None
    allowed: jax.typing.ArrayLike | None = None


def published_decoding(
    generation: Mapping[str, Any], usual: float = 1.0, *, min_new: int = 0, **arguments: float | None
) -> Decoding:
    """Returns the decoding that a model's publisher recommends in generation_config.json, except for the arguments set here.

    Of what the file names it has the temperature, top_k and top_p; a warning names the `PENALTIES` that it leaves out.

    usual: the temperature if the file has none. arguments: `temperature`, `top_k` and `top_p`, None: as published. Raises
    ValueError for invalid numbers.
    """
    samples = generation.get("do_sample", True)
    defaults = {"temperature": usual if samples else 0.0, "top_k": 0, "top_p": 1.0}
    defaults |= {name: generation[name] for name in defaults if samples and generation.get(name) is not None}
    defaults["top_k"] = 0 if defaults["top_k"] == -1 else defaults["top_k"]  # vLLM's value for all
    overrides = {name: value for name, value in arguments.items() if value is not None}
    for name, low, high in (("temperature", 0, 10), ("top_k", 0, 10**9), ("top_p", 1e-9, 1)):
        for place, numbers in (("generation_config.json: ", defaults), ("", overrides)):
            value = numbers.get(name, low)
            if not (isinstance(value, int | float) and low <= value <= high):
                raise ValueError(f"{place}{name}={value!r:.50}: must be from {low} to {high}")
    left_out = [
        f"{name}={generation[name]}" for name, plain in PENALTIES.items() if generation.get(name, plain) not in (plain, None)
    ]
    if left_out:
        _warn_once(f"generation_config.json asks for {', '.join(left_out)}, which is not done here")
    return Decoding(min_new=min_new).replace(**defaults | overrides)


@functools.lru_cache(100)  # every answer of a chat has its decoding
def _warn_once(message: str) -> None:
    log.warning(message)


def sample_token(logits, keys, decoding: Decoding):
    """Samples one token per row.

    Args:
      logits: f32[B, V].
      keys: a random key per row.

    Returns: (tokens i32[B], their log-probabilities f32[B] in the distribution drawn from, or, at temperature 0, in the whole
    softmax at temperature 1).
    """
    temperature, top_k, top_p = (jnp.asarray(a)[..., None] for a in (decoding.temperature, decoding.top_k, decoding.top_p))
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    # The most likely token is never left out; its probability is among all.
    top_k, top_p = jnp.where(temperature > 0, top_k, 0), jnp.where(temperature > 0, top_p, 1.0)
    restricted = ((top_k > 0) | (top_p < 1)).any()
    # Finding these tokens costs more than everything else here, so it happens only on demand.
    scaled = jax.lax.cond(restricted, lambda x: top_k_top_p(x, top_k, top_p), lambda x: x, scaled)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype))(keys)
    token = argmax(jnp.where(temperature > 0, scaled + noise, logits))
    return token, gather_logprobs(jax.nn.log_softmax(scaled), token)


def argmax(values):
    """Computes `jnp.argmax` of f32[B, V] over the last axis, i32[B].

    It takes two steps: XLA's CPU compiler fuses the input of argmax into its loop over single values, which made the noise the
    slowest part of decoding with a small policy.
    """
    last = values.shape[-1] - 1  # for a row with NaN, where no value equals the maximum
    return jnp.where(values == values.max(-1, keepdims=True), jnp.arange(last + 1), last).min(-1)


def top_k_top_p(logits, top_k, top_p):
    """Masks logits f32[B, V] to -inf outside the top k, and outside the fewest of these that reach top_p; ties stay.

    top_k, top_p: of a shape that broadcasts to [B, V]. The smallest logit that stays is found bit by bit: 32 passes for each of
    the two took a seventh of the time in which a CPU sorts a vocabulary of 49,152, which doubled that of decoding.
    """
    order = _ascending(logits)
    some = jnp.where(top_k == 0, logits.shape[-1], jnp.minimum(top_k, logits.shape[-1]))
    bound = _largest_bound(order, lambda inside: inside.sum(-1, keepdims=True) >= some)
    probability = jax.nn.softmax(jnp.where(order >= bound, logits, -jnp.inf))
    mass = lambda inside: jnp.where(inside, probability, 0.0).sum(-1, keepdims=True)  # noqa: E731
    reached = _largest_bound(order, lambda inside: mass(inside) >= top_p)
    bound = jnp.where(top_p < 1, reached, bound)  # all of them may add up to a little less or more than 1
    return jnp.where(order >= bound, logits, -jnp.inf)


def _ascending(values):
    """Maps f32[...] without NaN to u32[...] of the same order; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest_bound(order, enough):
    """Returns the largest u32[B, 1] for which `enough(order >= bound)`, bool[B, V] -> bool[B, 1], holds; 0 if none does.

    A loop compiles four times as fast on a CPU; inside the loop of a sharded decode program it kept the TPU compiler busy for
    more than 20 minutes, and its 32 passes one after the other for 12 seconds.
    """

    def try_bit(i, bound):
        higher = bound | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        return jnp.where(enough(order >= higher), higher, bound)

    def search(order, unroll):
        return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros((*order.shape[:-1], 1), jnp.uint32), unroll=unroll)

    loop, passes = (functools.partial(search, unroll=unroll) for unroll in (False, True))
    return jax.lax.platform_dependent(order, cpu=loop, default=passes)


def is_end(tokens: jax.Array, end_tokens: tuple[int, ...]) -> jax.Array:
    """Marks the tokens i32[...] that end a response, bool[...]."""
    return (tokens[..., None] == jnp.asarray(end_tokens)).any(-1)


def turn_keys(keys, turns):
    """Returns the random key of one turn of each of M episodes, at turns i32[] or i32[M]. keys: [M], or [M, 2], the first of
    which serves an episode's first turn and the second all others."""
    turns = jnp.broadcast_to(turns, keys.shape[:1])
    if keys.ndim == 2:
        keys = keys[jnp.arange(keys.shape[0]), jnp.minimum(turns, 1)]
    return jax.vmap(jax.random.fold_in)(keys, turns)


def sample_next(model, hidden, keys, i, allowed=None, *, end_tokens: tuple[int, ...], decoding: Decoding):
    """Samples token number `i`, i32[] or i32[B], of each response from hidden [B, D]: (i32[B], log-probabilities f32[B]).

    allowed: u32[B, W], the tokens to choose from (`constraint.py`); None: all that the model may write.
    """
    logits = restrict(constrain(model.logits(hidden), "batch", "vocab_of_rows"), allowed, model.c.unwritten)
    i = jnp.broadcast_to(i, keys.shape)
    too_early = is_end(jnp.arange(logits.shape[-1]), end_tokens) & (i < decoding.min_new)[:, None]
    logits = jnp.where(too_early, -jnp.inf, logits)
    return sample_token(logits, jax.vmap(jax.random.fold_in)(keys, i), decoding)


class DecodeState(struct.PyTreeNode):
    """B rows that are being decoded; fewer than the whole batch once some have ended."""

    index: jax.Array  # i32[B], the row in the whole batch
    key: jax.Array  # [B]
    prompt_length: jax.Array  # i32[B]
    token: jax.Array  # i32[B], the last one sampled
    ended: jax.Array  # bool[B]
    cache: list[KVCache]  # one for each layer
    offset: jax.Array | None = None  # i32[B], from slots to rotary positions (`Pictures.offset`); None: there are no pictures

    def partition(self) -> DecodeState:
        """Returns the PartitionSpec of every array on the mesh in context."""
        rows: Any = partition_in_context(("batch",), self.token.shape)
        cache = [layer.partition() for layer in self.cache]
        offset = None if self.offset is None else rows
        return DecodeState(index=rows, key=rows, prompt_length=rows, token=rows, ended=rows, cache=cache, offset=offset)

    def take(self, rows) -> DecodeState:
        """Selects rows i32[n] among those that a device has."""
        selection = jax.tree.map(lambda a: a[rows], self.replace(cache=[]))
        return selection.replace(cache=[layer.take(rows) for layer in self.cache])


def row_shards() -> int:
    """Returns the number of devices of the mesh in context over which the compiler splits rows."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in auto_axes("batch"))


def smallest_batch(ended):
    """Returns the smallest batch, i32[], in which the unfinished rows, ended bool[B], fit if each device keeps its own."""
    return max_across_devices((~ended).reshape(row_shards(), -1).sum(1).max() * row_shards())


def compact_unfinished(state: DecodeState, size: int) -> DecodeState:
    """Selects `size` rows, including all unfinished ones, with the same number on each device that has a part of them."""
    rows_per_shard = size // row_shards()

    def compact_shard(state: DecodeState) -> DecodeState:
        return state.take(jnp.argsort(state.ended, stable=True)[:rows_per_shard])

    if rows_per_shard == size:
        return compact_shard(state)
    specs = state.partition()
    compact = jax.shard_map(compact_shard, in_specs=(specs,), out_specs=specs, axis_names=manual_axes(), check_vma=False)
    return compact(state)


COMPACT_FROM = 64  # new tokens: shorter responses end too soon for fewer rows to repay the cost of moving them


def generate(
    model,
    blocks,
    prompts,
    lengths,
    keys,
    *,
    max_new: int,
    end_tokens: tuple[int, ...],
    decoding: Decoding,
    pictures: Pictures | None = None,
) -> Responses:
    """Samples a response to each prompt.

    Args:
      model: a bound `Qwen2`. blocks: its `decode_blocks()`, computed outside of every loop.
      prompts: i32[B, P], right-padded. lengths: i32[B], tokens of each prompt, at least 1.
      keys: a random key per row.
      max_new: R, the longest response. end_tokens: the tokens that end one.
      pictures: those of the prompts.
    """
    B, answers = len(prompts), decoding.answers
    sample = functools.partial(sample_next, model, end_tokens=end_tokens, decoding=decoding)
    read = functools.partial(model.prefill, prompts, lengths - 1, prompts.shape[1] + max_new - 1, pictures)
    state, out = _first_tokens(read, sample, lengths, keys, max_new, end_tokens, answers)
    if pictures is not None:
        state = state.replace(offset=pictures.offset())

    def step(carry):
        i, state, out, _ = carry
        position, offset = state.prompt_length + i - 1, 0 if state.offset is None else state.offset
        hidden, cache = model.decode(state.token, position, state.cache, blocks, ~state.ended, offset)
        allowed, record = None, None
        if answers is not None:
            allowed = answers.next_tokens(out.tokens, i)
            record = out.allowed.at[state.index, i].set(jnp.where(state.ended[:, None], 0, allowed))
        token, logp = sample(hidden, state.key, i, allowed)
        token, logp = jnp.where(state.ended, 0, token), jnp.where(state.ended, 0.0, logp)
        out = Responses(
            tokens=out.tokens.at[state.index, i].set(token),
            logp=out.logp.at[state.index, i].set(logp),
            lengths=out.lengths.at[state.index].add(~state.ended),
            allowed=record,
        )
        state = state.replace(token=token, cache=cache, ended=state.ended | is_end(token, end_tokens))
        return i + 1, state, out, smallest_batch(state.ended)

    def decode(i, state, out, fewest: int):
        """Decodes until the unfinished rows fit in a batch of `fewest`, or answers are as long as they may be."""
        carry = (i, state, out, smallest_batch(state.ended))
        return jax.lax.while_loop(lambda carry: (carry[0] < max_new) & (carry[-1] > fewest), step, carry)[:3]

    # The whole batch until a quarter of it can hold all unfinished rows, then that quarter. There are no further sizes, because
    # each would compile another copy of all layers.
    compacts = B % (4 * row_shards()) == 0 and max_new >= COMPACT_FROM and answers is None
    i, state, out = decode(jnp.int32(1), state, out, B // 4 if compacts else 0)
    if compacts:
        i, state, out = decode(i, compact_unfinished(state, B // 4), out, 0)
    return out


def _first_tokens(
    read, sample, lengths, keys, max_new: int, end_tokens: tuple[int, ...], answers
) -> tuple[DecodeState, Responses]:
    """Reads the prompts, by `read()`, and samples the first token of each response. Other arguments as in `generate`."""
    B = len(lengths)
    hidden, cache = read()
    nothing = jnp.zeros((B, max_new), jnp.int32)
    allowed, record = None, None
    if answers is not None:
        allowed = answers.next_tokens(nothing, jnp.int32(0))
        record = jnp.zeros((B, max_new, answers.words), jnp.uint32).at[:, 0].set(allowed)
    token, logp = sample(hidden, keys, 0, allowed)
    out = Responses(
        tokens=nothing.at[:, 0].set(token),
        logp=jnp.zeros((B, max_new), jnp.float32).at[:, 0].set(logp),
        lengths=jnp.ones(B, jnp.int32),
        allowed=record,
    )
    state = DecodeState(
        index=jnp.arange(B),
        key=keys,
        prompt_length=lengths,
        token=token,
        ended=is_end(token, end_tokens),
        cache=[layer.in_parts() for layer in cache],
    )
    return state, out


def make_decode_blocks(graphdef):
    """Builds jitted `decode_blocks(params) -> blocks`: the copy of the weights for decoding, one set of arrays per layer."""
    return jax.jit(lambda params: nnx.merge(graphdef, params).decode_blocks())


def make_sampler(graphdef, mesh: Mesh | AbstractMesh, max_new: int, end_tokens: tuple[int, ...]):
    """Builds jitted `sample(params, blocks, prompts, lengths, keys, episodes, turns, decoding) -> Responses`.

    blocks come from `make_decode_blocks` for the params. prompts i32[M, P] and lengths i32[M] belong to the episodes i32[M],
    whose random keys are keys[episodes] (`turn_keys`), at their turns, i32[M] or one for all. M is split over the mesh's `data`
    axis, and each shard ends when its own rows have ended.
    """

    def sample_shard(params, blocks, prompts, lengths, keys, decoding):
        model = nnx.merge(graphdef, params)
        return generate(model, blocks, prompts, lengths, keys, max_new=max_new, end_tokens=end_tokens, decoding=decoding)

    split = jax.shard_map(
        sample_shard,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data"), P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )

    # The responses are small; every process reads all of them.
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def sample(params, blocks, prompts, lengths, keys, episodes, turns, decoding):
        keys = turn_keys(keys[episodes], turns)
        return split(params, blocks, prompts, lengths, keys, decoding)

    return sample
