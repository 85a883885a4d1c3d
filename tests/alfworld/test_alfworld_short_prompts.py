"""Prompts of the compiled games, against the same made from the engine's texts in plain Python."""

import functools
import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alfworld_places import GAMES, LOGIC
from alfworld_play import Player

from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.alfworld.phrases import LINKS, VERBS, Splitter
from hgpo_jax.envs.alfworld.short_prompts import ShortPromptAlfworld
from hgpo_jax.envs.alfworld.tables import compile_games
from hgpo_jax.policy.tokenizer import word_tokenizer

K = 2
STRINGING = (" a", ",", ", and", ".")
ARGUMENT_IN_HAND = ("clean", "cool", "heat", "move", "put")


@functools.lru_cache(maxsize=8)
def environment(paths: tuple[Path, ...], logic: Path | None, slots: int = 128) -> ShortPromptAlfworld:
    return ShortPromptAlfworld(compile_games(paths, logic), slots=slots)


@functools.lru_cache(maxsize=8)
def programs(env: ShortPromptAlfworld):
    """(start(games), step(states, actions), read(states, observations, history)), jitted over batches."""
    act = len(env.words) + 2

    def read(state, past, actions, observation):
        prompt, length = env.prompt(state, env.goal(state), past, actions, observation, act)
        return prompt, length

    return jax.jit(jax.vmap(env.start)), jax.jit(jax.vmap(env.step)), jax.jit(jax.vmap(read))


def plain_prompt(split: Splitter, goal: str, past, now: str, commands: list[str], slots: int) -> list[str]:
    """The words of a prompt. past: [(observation, action)], oldest first."""

    def words(text: str, most: int) -> list[str]:
        found = [split.words[i] for i in split(text)]
        found = [word for word in found if word not in STRINGING]
        return found[: 1 if found[0].startswith("-=") else most]

    turns = [[*words(observation, 5), ">", *parts(action)] for observation, action in past]
    listed = [c for c in commands if c.split()[0] not in ("help", "inventory", "look", "examine")]
    listing, before = [], ("", "", "")
    for command in listed:
        verb, first, *second = parts(command)
        second = second[0] if second else ""
        again = before[0] == verb
        shown = [] if again else [verb]
        if not (again and verb in ARGUMENT_IN_HAND):
            shown.append(first)
        if not (again and verb not in ARGUMENT_IN_HAND and before[2] == second):
            shown.append(second)
        listing.append([word for word in shown if word])
        before = verb, first, second
    task, seen = [split.words[i] for i in split(goal) if split.words[i] != "."], words(now, 16)
    room = slots - len(task) - len(seen) - 1
    flat = lambda lists: [word for some in lists for word in some]  # noqa: E731
    while turns and len(flat([*turns, *listing])) > room:
        turns.pop(0)
    more = []
    while len(flat(listing)) + len(more) > room:
        listing.pop()
        more = [" ..."]
    return [*task, *flat(turns), *seen, *flat(listing), *more, ">"]


def parts(command: str) -> list[str]:
    """A command's verb and the names in it, with the blanks before them; none of a text that is no command."""
    for verb in VERBS:
        if command == verb or command.startswith(f"{verb} "):
            rest = command[len(verb) :]
            return [verb, *filter(None, re.split(f"{LINKS[verb]}(?= )", rest) if verb in LINKS else [rest])]
    return []


def check(paths, logic, kinds, turns, slots, seed=0) -> dict:
    """Plays games with several players, all at once, and asserts that every prompt is what it should be."""
    env = environment(tuple(paths), logic, slots)
    start, step, read = programs(env)
    tokenizer, split, rng = word_tokenizer(env.words), Splitter(env.words), random.Random(seed)
    split.words = env.words
    games = [load_game(path, logic) for path in paths for _ in kinds]
    chosen = [Player(kind, game, rng) for game, kind in zip(games, [*kinds] * len(paths), strict=True)]
    state, observation = start(jnp.arange(len(games)) // len(kinds))
    B, counts = len(games), {"prompts": 0, "more": 0, "fewer turns": 0, "longest": 0}
    past = np.zeros((B, K, env.observation_length), np.int32)
    actions = np.zeros((B, K, 3), np.int32)
    told, texts = [game.reset() for game in games], [[] for _ in games]
    for _ in range(turns):
        prompt, length = jax.device_get(read(state, past, actions, observation))
        done = []
        for i, (now, commands) in enumerate(told):
            goal = games[i].task
            words = plain_prompt(split, goal, texts[i][-K:], now, commands, slots)
            ids = prompt[i, : length[i]]
            assert tokenizer.decode(ids) == "".join(words) and not prompt[i, length[i] :].any()
            assert ids.tolist() == [tokenizer.convert_tokens_to_ids(word) for word in words]
            assert tokenizer("".join(words))["input_ids"] == ids.tolist()
            counts["prompts"] += 1
            counts["more"] += " ..." in words
            counts["fewer turns"] += words.count(">") - 1 < min(K, len(texts[i]))
            counts["longest"] = max(counts["longest"], len(words))
            done.append(chosen[i].choose(commands, told[i - 1][1]))
        sent = np.stack([env.encode(action) for action in done])
        sent[(sent < 0).any(1)] = 0  # what is not a command
        past = np.concatenate([past, np.asarray(observation)[:, None]], 1)[:, 1:]
        actions = np.concatenate([actions, sent[:, None]], 1)[:, 1:]
        for i, action in enumerate(done):
            texts[i].append((told[i][0], env.command(sent[i])))
            told[i] = games[i].step(action)[:2]
        state, observation, *_ = step(state, sent)
    return counts


def test_prompts() -> None:
    counts = check(GAMES, None, ("planner", "verbs", "shuffle"), 25, slots=128)
    assert counts["prompts"] == len(GAMES) * 3 * 25 and counts["more"] == counts["fewer turns"] == 0 < counts["longest"]


@pytest.mark.slow
def test_what_does_not_fit() -> None:
    """The oldest turns go first, then the last commands, and the prompt says so. In the current release's wording."""
    counts = check(GAMES, LOGIC, ("planner", "verbs"), 40, slots=48)
    assert counts["fewer turns"] > counts["more"] > 0 and counts["longest"] == 48
    with pytest.raises(ValueError, match="slots=40: must be at least"):
        environment(tuple(GAMES), None, 40)


@pytest.mark.slow
@pytest.mark.needs("data")
@pytest.mark.optimized
def test_prompts_of_official_games(some_official: list[Path]) -> None:
    counts = check(some_official[::2], None, ("expert", "verbs"), 40, slots=128, seed=1)
    assert counts["prompts"] == 40 * 2 * 40 and counts["more"] == 0 and counts["fewer turns"] < 0.002 * counts["prompts"]
