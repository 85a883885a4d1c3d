"""Slots on the devices: their state, and the computation on one index of the data axis, inside any program.

The sampler of the host (`continuous_batching.py`) calls it step by step, a compiled rollout (`compiled_slots.py`) inside its
loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.policy.kv_cache import KVCache, on_each_device
from hgpo_jax.policy.mesh import max_across_devices
from hgpo_jax.policy.pictures import Pictures
from hgpo_jax.sampling.generate import is_end, sample_next

Array = jax.Array | np.ndarray
MAX_STEPS = 64  # tokens that are decoded at a time


class SlotState(struct.PyTreeNode):
    """S slots on the devices, some of them free."""

    key: jax.Array  # [S], the key of the request's turn
    prompt_length: jax.Array  # i32[S]
    offset: jax.Array  # i32[S], from the slots of a row to the rotary positions of its tokens (`Pictures.offset`)
    sampled: jax.Array  # i32[S], tokens sampled so far
    token: jax.Array  # i32[S], the last token
    ended: jax.Array  # bool[S], also true for a free slot
    answer: jax.Array  # i32[S], the number of a sequence of `Decoding.answers` that begins with the tokens sampled so far
    cache: list[KVCache]  # one for each layer

    @staticmethod
    def of(rows: Callable[[str], Any], cache: list) -> Any:
        """Makes a state from `rows(name)` for each of the arrays [S], and the cache."""
        names = [field.name for field in dataclasses.fields(SlotState) if field.name != "cache"]
        return SlotState(**{name: rows(name) for name in names}, cache=cache)

    def rows(self) -> dict[str, jax.Array]:
        """The arrays [S]."""
        return {name: value for name, value in vars(self).items() if name != "cache"}


class Sampled(struct.PyTreeNode):
    """The tokens that a step has sampled in S slots."""

    tokens: jax.Array  # i32[S, MAX_STEPS]
    logp: jax.Array  # f32[S, MAX_STEPS]
    counts: jax.Array  # i32[S], the number of these tokens
    ended: jax.Array  # bool[S], whether the slot's response has ended


class NewPrompts(struct.PyTreeNode):
    """n prompts to prefill, and the m responses that begin with them; each device has its part of the rows."""

    tokens: Array  # i32[n, W], right-padded
    lengths: Array  # i32[n]
    source: Array  # i32[m], the prompt of each response, counted within the device's part
    slots: Array  # i32[m], the slot that it goes into, likewise; one beyond the last drops the response
    limits: Array  # i32[m], the most tokens that it may have
    said: Array  # i32[m], the tokens of it that the prompt ends with


class Continued(struct.PyTreeNode):
    """n prompts that begin with what their slots hold, each with one response; each device has its part of the rows."""

    tokens: Array  # i32[n, W], the rest of each prompt, right-padded
    lengths: Array  # i32[n], of the rest
    begin: Array  # i32[n], tokens that are held
    offset: Array  # i32[n], as in `SlotState`; the rest holds no picture
    slots: Array  # i32[n], the slot that holds them, counted within the device's part; one beyond the last is no slot
    limits: Array  # i32[n], the most tokens that it may have
    said: Array  # i32[n], the tokens of it that the prompt ends with


class Pace(NamedTuple):
    """How long slots are decoded before ended responses make room for others."""

    least: int  # tokens in every slot
    most: int | jax.Array  # i32[], MAX_STEPS or fewer
    share: int  # in between, until one in this many active slots has ended


def free_slots(model, slots: int, length: int) -> SlotState:
    """Makes `slots` free slots whose caches hold `length` tokens, for a bound `Qwen2`."""
    one = jnp.zeros((slots, 1), jnp.int32)
    like = jax.eval_shape(lambda: [layer.in_parts() for layer in model.prefill(one, one[:, 0], length)[1]])
    cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    ones = jnp.ones(slots, jnp.int32)
    rows = {"key": jax.random.split(jax.random.key(0), slots), "ended": ones > 0}
    return SlotState.of(lambda name: rows.get(name, ones), cache)


def prefill_slots(
    model,
    state: SlotState,
    prompts: NewPrompts,
    keys,
    widths: Sequence[int],
    end_tokens,
    decoding,
    pictures: Pictures | None = None,
):
    """Prefills prompts and samples first tokens of responses: (the state, i32[m], their log-probabilities f32[m]).

    It runs on one index of the data axis. keys: [m], those of the turns. widths: possible prompt widths in slots, ascending to
    W; the smallest that holds all prompts is used. pictures: those of the prompts.
    """

    def read(width: int):
        return model.prefill(prompts.tokens[:, :width], prompts.lengths - 1, prompts.tokens.shape[1], pictures)

    if len(widths) > 1:
        wide_enough = jnp.searchsorted(jnp.array(widths), max_across_devices(prompts.lengths.max()))
        hidden, prompt_cache = jax.lax.switch(wide_enough, [functools.partial(read, width) for width in widths])
    else:
        hidden, prompt_cache = read(prompts.tokens.shape[1])
    offset = jnp.zeros_like(prompts.lengths) if pictures is None else pictures.offset()
    select = lambda hidden, lengths, offset, at: (hidden[at], lengths[at], offset[at])  # noqa: E731
    hidden, lengths, offset = on_each_device(select, hidden, prompts.lengths, offset, prompts.source)
    rows, token, logp = _first_tokens(model, hidden, lengths, offset, prompts, keys, end_tokens, decoding)

    def insert(state, rows, cache, source, slots):
        cache = [layer.insert(prompt, source, slots) for layer, prompt in zip(state.cache, cache, strict=True)]
        return _begin(state.replace(cache=cache), rows, slots)

    return on_each_device(insert, state, rows, prompt_cache, prompts.source, prompts.slots), token, logp


def extend_slots(model, blocks, state: SlotState, prompts: Continued, keys, end_tokens, decoding):
    """Like `prefill_slots`, for prompts that begin with what their slots hold."""
    begin, offset = prompts.begin, prompts.offset
    hidden, cache = model.extend(prompts.tokens, begin, prompts.lengths, state.cache, prompts.slots, blocks, offset)
    lengths = begin + prompts.lengths
    rows, token, logp = _first_tokens(model, hidden, lengths, offset, prompts, keys, end_tokens, decoding)
    return on_each_device(_begin, state.replace(cache=cache), rows, prompts.slots), token, logp


def _first_tokens(model, hidden, lengths, offset, prompts: NewPrompts | Continued, keys, end_tokens, decoding):
    """Samples the first token of m responses, or the next one of those that their prompts end with.

    Returns: (their rows of a SlotState, i32[m], log-probabilities f32[m]).
    """
    said = prompts.said
    token, logp, answer = _sample(model, hidden, keys, said, jnp.zeros_like(lengths), end_tokens, decoding)
    ended = is_end(token, end_tokens) | (said + 1 >= prompts.limits)
    rows = {"key": keys, "prompt_length": lengths - said, "offset": offset, "sampled": said + 1, "token": token}
    return rows | {"ended": ended, "answer": answer}, token, logp


def _sample(model, hidden, keys, i, answer, end_tokens, decoding):
    """Samples token number i32[S] of each response: (tokens i32[S], log-probabilities f32[S], `SlotState.answer`)."""
    answers = decoding.answers
    if answers is None:
        return *sample_next(model, hidden, keys, i, decoding.allowed, end_tokens=end_tokens, decoding=decoding), answer
    sampled = answers.numbered(answer)
    allowed = answers.next_tokens(sampled, i)
    token, logp = sample_next(model, hidden, keys, i, allowed, end_tokens=end_tokens, decoding=decoding)
    return token, logp, answers.chosen(sampled, i, token)


def _begin(state: SlotState, rows, slots) -> SlotState:
    """Begins responses in `slots`, whose caches hold their prompts, on one device."""
    new = {name: value.at[slots].set(rows[name], mode="drop") for name, value in state.rows().items()}
    return SlotState.of(new.get, state.cache)


def copy_rows(cache: list[KVCache], other: list[KVCache], source, rows) -> list[KVCache]:
    """Writes rows i32[m] `source` of another cache with as many slots to the rows `rows` i32[m] of a cache, on one device.

    A row outside the cache is not written.
    """
    layers = zip(cache, other, strict=True)
    return [layer.insert(from_layer.take(source), jnp.arange(rows.shape[0]), rows) for layer, from_layer in layers]


def decode_slots(model, blocks, state: SlotState, limits, pace: Pace, end_tokens, decoding) -> tuple[SlotState, Sampled]:
    """Decodes tokens in every slot at this pace; stops early when all have ended.

    It runs on one index of the data axis and continues as long as any other index does. limits: i32[S], tokens of each longest
    response.
    """
    S = state.token.shape[0]

    def step(carry):
        i, state, out, _ = carry
        # A slot that has ended writes past its response.
        position, live = state.prompt_length + state.sampled - 1, ~state.ended
        hidden, cache = model.decode(state.token, position, state.cache, blocks, live, state.offset)
        token, logp, answer = _sample(model, hidden, state.key, state.sampled, state.answer, end_tokens, decoding)
        out = out.replace(tokens=out.tokens.at[:, i].set(token), logp=out.logp.at[:, i].set(logp), counts=out.counts + live)
        sampled = state.sampled + live
        ended = state.ended | is_end(token, end_tokens) | (sampled >= limits)
        state = state.replace(sampled=sampled, token=token, ended=ended, answer=answer, cache=cache)
        return i + 1, state, out, goes_on(i + 1, ended)

    def goes_on(i, ended):
        enough = (i >= pace.least) & ((ended & ~out.ended).sum() * pace.share >= (~out.ended).sum())
        return max_across_devices(((i < pace.most) & ~ended.all() & ~enough).astype(jnp.int32))

    out = Sampled(
        tokens=jnp.zeros((S, MAX_STEPS), jnp.int32),
        logp=jnp.zeros((S, MAX_STEPS)),
        counts=jnp.zeros(S, jnp.int32),
        ended=state.ended,
    )
    carry = (jnp.int32(0), state, out, goes_on(0, state.ended))
    _, state, out, _ = jax.lax.while_loop(lambda carry: carry[-1] > 0, step, carry)
    return state, out.replace(ended=state.ended)
