"""ALFWorld's games as chat on the device (`rollout/device_text.py`): prompts per second, and the share of padding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.bench.limits import alternate, row
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld
from hgpo_jax.envs.alfworld.tables import compile_games
from hgpo_jax.policy.chat_frame import ChatFrame
from hgpo_jax.policy.device_tokenizer import spell
from hgpo_jax.rollout.chat_prompts import ChatFormat, PromptInput
from hgpo_jax.rollout.compiled import EpisodeState, start_episode
from hgpo_jax.rollout.compiled_slots import ENDED, READ
from hgpo_jax.rollout.compiled_text import widths
from hgpo_jax.rollout.device_text import MAX_ACTION, MAX_COMMAND, DeviceText

HISTORY, LIMIT = 2, 4096


def measure_told(
    games: Sequence[Path], tokenizer, batch: int = 64, turns: int = 30, slots: int = 64, repeats: int = 3
) -> list[dict]:
    """Measures episodes of random commands.

    batch: episodes at once. slots: of a compiled rollout; they decide how many prompts are prefilled together.

    Returns rows of name, value and unit; the ratio of a turn is the host's time for the same over the device's.
    """
    chat = ChatFormat(ChatFrame(tokenizer), "alfworld", LIMIT, lower_case=True)
    text = DeviceText(CompiledAlfworld(compile_games(games), turns), chat, tokenizer, 512)
    tables = jax.device_put(text.tables)

    def begin(tables, game):
        return start_episode(text.bound(tables), HISTORY, game, jnp.zeros((), jnp.uint32))

    def ask(tables, state: EpisodeState):
        made = text.bound(tables).prompt(state.env, state.goal, *state.history.of(0), state.observation)
        return made.ids, made.length

    def act(tables, state: EpisodeState, key):
        """Chooses one of the visible commands, as text."""
        told = text.bound(tables)
        texts, _, shown = told.env.choices(state.env.env)
        chosen = texts[jax.random.categorical(key, jnp.where(shown, 0.0, -jnp.inf))]
        letters, _ = spell(tables["words"], chosen, MAX_COMMAND)
        action = jnp.zeros(MAX_ACTION, jnp.int32).at[:MAX_COMMAND].set(letters.astype(jnp.int32))
        after, observation, _, _, _ = told.step(state.env, action)
        history = state.history.push(0, state.observation, action)
        return state.replace(env=after, observation=observation, history=history)

    begin, ask = (jax.jit(jax.vmap(f, (None, 0))) for f in (begin, ask))
    act = jax.jit(jax.vmap(act, (None, 0, 0)))
    states, lengths = begin(tables, jnp.arange(batch) % len(games)), []
    for turn in range(turns - 1):
        lengths.append(np.asarray(ask(tables, states)[1]))
        if turn == turns // 2:
            middle = jax.block_until_ready(states)
        states = act(tables, states, jax.random.split(jax.random.key(turn), batch))
    seen = jax.device_get(middle)
    known = [_known(text, jax.tree.map(lambda a, i=i: a[i], seen)) for i in range(batch)]
    ids, count = jax.device_get(ask(tables, middle))
    assert [prompt.ids for prompt in chat.build(known)] == [r[:n].tolist() for r, n in zip(ids, count, strict=True)]

    calls: dict[str, Callable[[], object]] = {"device": lambda: ask(tables, middle), "host": lambda: chat.build(known)}
    seconds = {name: statistics.median(times) for name, times in alternate(calls, repeats).items()}
    made = batch / seconds["device"]
    padding = float(1 - np.sum(lengths) / padded(np.array(lengths), slots))
    return [
        row(f"alfworld told in chat, {batch} prompts", made, "prompts/s", ratio=seconds["host"] / seconds["device"]),
        row("alfworld told in chat, tokens of a prompt", float(np.mean(lengths)), "tokens"),
        row(f"alfworld told in chat, padding in a rollout of {slots} slots", padding, "of what is read"),
    ]


def _known(text: DeviceText, state: EpisodeState) -> PromptInput:
    """Returns the host's view of this state."""
    env = text.env
    texts, _, shown = env.choices(state.env.env)
    commands = ["".join(env.words[i] for i in words) for words in np.asarray(texts)[np.asarray(shown)]]
    observations, actions = (np.asarray(part) for part in state.history.of(0))
    said = [bytes(action[action != 0].tolist()).decode() for action in actions]
    pairs = [(env.decode(seen), done) for seen, done in zip(observations, said, strict=True) if done]
    return PromptInput(env.decode(state.goal), pairs, int(state.env.turn), env.decode(state.observation), commands)


def padded(lengths: np.ndarray, slots: int) -> int:
    """Returns the tokens processed for prompts of i32[T, B] tokens in a compiled rollout, which sorts the prompts of one stop
    of its slots and processes some of them together (`compiled_slots.py`)."""
    steps, read = np.array(widths(LIMIT)), max(1, slots // READ)
    waiting = np.sort(lengths.reshape(-1, max(1, slots // ENDED)), axis=1)
    longest = waiting.reshape(len(waiting), -1, read).max(-1)
    return int(read * steps[np.searchsorted(steps, longest)].sum())
