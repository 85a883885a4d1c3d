"""Slots on the devices: their state, and the computation on one index of the data axis, inside any program.

The sampler of the host (`continuous_batching.py`) calls it step by step, a compiled rollout (`compiled_slots.py`) inside its
loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from hgpo_jax.policy.kv_cache import KVCache, on_each_device
from hgpo_jax.policy.mesh import max_across_devices
from hgpo_jax.sampling.generate import is_end, sample_next

MAX_STEPS = 64  # tokens that are decoded at a time


class SlotState(struct.PyTreeNode):
    """S slots on the devices, some of them free."""

    key: jax.Array  # [S], the key of the request's turn
    prompt_length: jax.Array  # i32[S]
    sampled: jax.Array  # i32[S], tokens sampled so far
    token: jax.Array  # i32[S], the last token
    ended: jax.Array  # bool[S], also true for a free slot
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


def free_slots(model, slots: int, length: int) -> SlotState:
    """Makes `slots` free slots whose caches hold `length` tokens, for a bound `Qwen2`."""
    one = jnp.zeros((slots, 1), jnp.int32)
    like = jax.eval_shape(lambda: model.prefill(one, one[:, 0], length)[1])
    cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    ones = jnp.ones(slots, jnp.int32)
    rows = {"key": jax.random.split(jax.random.key(0), slots), "ended": ones > 0}
    return SlotState.of(lambda name: rows.get(name, ones), cache)


def begin(model, state: SlotState, prompts, lengths, source, slots, keys, limits, widths: Sequence[int], end_tokens, decoding):
    """Prefills prompts i32[n, W] and samples first tokens of responses: (the state, i32[m], their log-probabilities f32[m]).

    Like `SlotPrograms._prefill`, with the keys [m] of the turns, on one index of the data axis; source and slots count within a
    device's part of it. widths: possible prompt widths in slots, ascending to W; the smallest that holds all prompts is used.
    """

    def read(width: int):
        return model.prefill(prompts[:, :width], lengths - 1, prompts.shape[1])

    if len(widths) > 1:
        wide_enough = jnp.searchsorted(jnp.array(widths), max_across_devices(lengths.max()))
        hidden, prompt_cache = jax.lax.switch(wide_enough, [functools.partial(read, width) for width in widths])
    else:
        hidden, prompt_cache = read(prompts.shape[1])
    hidden, lengths = on_each_device(lambda hidden, lengths, at: (hidden[at], lengths[at]), hidden, lengths, source)
    token, logp = sample_next(model, hidden, keys, 0, end_tokens=end_tokens, decoding=decoding)
    ended = is_end(token, end_tokens) | (limits <= 1)
    new = {"key": keys, "prompt_length": lengths, "sampled": jnp.ones_like(token), "token": token, "ended": ended}

    def insert(state, new, prompt_cache, source, slots):
        rows = {name: value.at[slots].set(new[name], mode="drop") for name, value in state.rows().items()}
        layers = zip(state.cache, prompt_cache, strict=True)
        return SlotState.of(rows.get, [layer.insert(prompt, source, slots) for layer, prompt in layers])

    return on_each_device(insert, state, new, prompt_cache, source, slots), token, logp


def go_on(
    model, blocks, state: SlotState, limits, least: int, most, share: int, end_tokens, decoding
) -> tuple[SlotState, Sampled]:
    """Decodes `least` to `most` (i32[], at most MAX_STEPS) tokens in every slot, until one in `share` of the active ones has
    ended; stops early when all have ended.

    It runs on one index of the data axis and continues as long as any other index does. limits: i32[S], tokens of each longest
    response.
    """
    S = state.token.shape[0]

    def step(carry):
        i, state, out, _ = carry
        # A slot that has ended writes past its response.
        hidden, cache = model.decode(state.token, state.prompt_length + state.sampled - 1, state.cache, blocks)
        token, logp = sample_next(model, hidden, state.key, state.sampled, end_tokens=end_tokens, decoding=decoding)
        live = ~state.ended
        out = out.replace(tokens=out.tokens.at[:, i].set(token), logp=out.logp.at[:, i].set(logp), counts=out.counts + live)
        sampled = state.sampled + live
        ended = state.ended | is_end(token, end_tokens) | (sampled >= limits)
        state = state.replace(sampled=sampled, token=token, ended=ended, cache=cache)
        return i + 1, state, out, goes_on(i + 1, ended)

    def goes_on(i, ended):
        enough = (i >= least) & ((ended & ~out.ended).sum() * share >= (~out.ended).sum())
        return max_across_devices(((i < most) & ~ended.all() & ~enough).astype(jnp.int32))

    out = Sampled(
        tokens=jnp.zeros((S, MAX_STEPS), jnp.int32),
        logp=jnp.zeros((S, MAX_STEPS)),
        counts=jnp.zeros(S, jnp.int32),
        ended=state.ended,
    )
    carry = (jnp.int32(0), state, out, goes_on(0, state.ended))
    _, state, out, _ = jax.lax.while_loop(lambda carry: carry[-1] > 0, step, carry)
    return state, out.replace(ended=state.ended)
