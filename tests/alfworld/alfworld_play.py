"""Plays games in the compiled environment and in the engine at once and compares all that a player sees."""

import random
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.envs.alfworld import Game, load_game
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld
from hgpo_jax.envs.alfworld.phrases import Splitter
from hgpo_jax.envs.alfworld.planner import TREATMENTS, Unsolvable, _Attempt, plan
from hgpo_jax.envs.alfworld.tables import compile_games

PLAYERS = ("planner", "expert", "random", "verbs", "shuffle", "cook")
SHUFFLE = ("take ", "move ", "put ", "open ", "look", "examine ")
NONSENSE = (
    "", "dance", "take", "go to nowhere 1", "Look", " look ", "take pen 99 from desk 1", "go to desk 1 desk 1", "look look",
)  # fmt: skip


@lru_cache(maxsize=4)
def environment(paths: tuple[Path, ...], logic: Path | None) -> CompiledAlfworld:
    return CompiledAlfworld(compile_games(paths, logic))


@lru_cache(maxsize=4)
def programs(env: CompiledAlfworld):
    """(start(games), step(states, actions)) over batches; both -> (states, what is seen)."""
    see = jax.jit(jax.vmap(lambda state: (*env.admissible(state), env.won(state))))
    begin, act = jax.jit(jax.vmap(env.start)), jax.jit(jax.vmap(env.step))

    def seen(state, observation, **more):
        filled, commands, won = see(state)
        return state, {"observation": observation, "filled": filled, "commands": commands, "won": won, **more}

    def step(state, action):
        state, observation, reward, done, invalid = act(state, action)
        return seen(state, observation, reward=reward, done=done, invalid=invalid)

    return lambda games: seen(*begin(games)), step


class Reader:
    """Texts of what the compiled environment tells, each worked out once."""

    def __init__(self, env: CompiledAlfworld):
        self.env, self.split, self.texts, self.commands = env, Splitter(env.words), {}, {}

    def text(self, ids: np.ndarray) -> str:
        ids = ids[: np.flatnonzero(ids)[-1] + 1]
        if (key := ids.tobytes()) not in self.texts:
            self.texts[key] = self.env.decode(ids)
            assert self.split(self.texts[key]) == ids.tolist(), "the words are not how the text is cut"
        return self.texts[key]

    def listing(self, filled: np.ndarray, rows: np.ndarray) -> list[str]:
        count = int(filled.sum())
        assert filled[:count].all() and not rows[count:].any()
        packed = (rows[:count].astype(np.int64) @ np.array([1 << 32, 1 << 16, 1])).tolist()
        for key, row in zip(packed, rows, strict=False):
            if key not in self.commands:
                self.commands[key] = self.env.command(row)
                assert (self.env.encode(self.commands[key]) == row).all()
        return [self.commands[key] for key in packed]


def cook(game: Game, rng: random.Random) -> list[str]:
    """Commands that slice, clean, heat and cool a thing and look at it in between, as far as its house allows."""
    facts, attempt = game.data.fixed, _Attempt(game, None)
    knives = sorted(o for o, kind in facts["objecttype"] if kind in ("knifetype", "butterknifetype"))
    what = rng.choice(("sliceable", "sliceable", "cleanable", "coolable"))
    placed = {o for o, _ in game.data.initial["inreceptacle"]}
    able, movable = ({o for (o,) in facts.get(name, ())} & placed for name in (what, "pickupable"))
    thing = rng.choice(sorted(able & movable or movable))
    with suppress(Unsolvable, IndexError):  # IndexError: no knife
        attempt.take(rng.choice(knives))
        if place := attempt.where(thing):  # it may be the knife
            attempt.go(place)
            attempt.do("sliceobject", thing)
    with suppress(Unsolvable):
        attempt.take(thing)
        attempt.do("examineobject", thing)
    for action, kinds in rng.sample(sorted(TREATMENTS.values()), len(TREATMENTS)):
        spots = sorted(r for r, kind in facts["receptacletype"] if kind in kinds)
        with suppress(Unsolvable):
            for spot in spots[:1]:
                attempt.go(spot)
                attempt.do(action, thing, spot)
                attempt.do("examineobject", thing)
    return attempt.done


class Player:
    """Chooses commands; sees the engine's game."""

    def __init__(self, kind: str, game: Game, rng: random.Random):
        self.kind, self.rng = kind, rng
        commands = cook(game, rng) if kind == "cook" else plan(game) if kind in ("planner", "expert") else []
        self.plan = commands[::-1]

    def choose(self, commands: list[str], elsewhere: list[str]) -> str:
        rng = self.rng
        if rng.random() < 0.04:
            return rng.choice((rng.choice(NONSENSE), rng.choice(elsewhere)))
        if self.plan and (self.kind != "expert" or rng.random() < 0.7):
            return self.plan.pop()
        if self.kind == "shuffle" and rng.random() < 0.9:
            return rng.choice([c for c in commands if c.startswith(SHUFFLE)])
        if self.kind in ("random", "planner"):
            return rng.choice(commands)
        verb = rng.choice(sorted({c.split()[0] for c in commands}))
        return rng.choice([c for c in commands if c.split()[0] == verb])


def compare(paths: Sequence[Path], logic: Path | None, players: Sequence[str], turns: int, seed: int) -> dict[str, int]:
    """Plays every game once with each player, all games at once, and asserts that nothing differs.

    Returns: steps, wins, invalid actions, and how often each phrase began what was told.
    """
    env = environment(tuple(paths), logic)
    start, step = programs(env)
    reader, rng = Reader(env), random.Random(seed)
    seen: dict[str, int] = {"steps": 0, "won": 0, "invalid": 0}
    games = [load_game(path, logic) for path in paths]
    for kind in players:
        live = [game.fresh() for game in games]
        state, got = start(jnp.arange(len(games)))
        expected = [(*game.reset(), False) for game in live]
        chosen = [Player(kind, game, rng) for game in live]
        actions = ["start"] * len(games)
        for turn in range(turns + 1):
            got = jax.device_get(got)
            for i, (observation, commands, won) in enumerate(expected):
                where = f"{paths[i]} turn {turn}: {actions[i]!r}"
                assert reader.text(got["observation"][i]) == observation, where
                assert reader.listing(got["filled"][i], got["commands"][i]) == commands, where
                assert got["won"][i] == won, where
            if turn == turns:
                break
            others = [commands for _, commands, _ in expected]
            actions = [player.choose(others[i], others[i - 1]) for i, player in enumerate(chosen)]
            legal = np.array([action.strip() in commands for action, commands in zip(actions, others, strict=True)])
            state, got = step(state, np.stack([env.encode(action) for action in actions]))
            expected = [game.step(action) for game, action in zip(live, actions, strict=True)]
            won = np.array([won for _, _, won in expected])
            assert (np.asarray(got["invalid"]) == ~legal).all()
            assert (np.asarray(got["reward"]) == 10.0 * won).all()
            assert (np.asarray(got["done"]) == won | (turn + 1 >= env.max_turns)).all()
            seen["steps"] += len(games)
            seen["won"] += int(won.sum())
            seen["invalid"] += int((~legal).sum())
            for word in np.asarray(got["observation"])[:, 0].tolist():
                seen[env.words[word]] = seen.get(env.words[word], 0) + 1
    return seen
