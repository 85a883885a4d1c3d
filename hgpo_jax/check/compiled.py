"""Checks of a compiled environment: first its members, then the results of its functions, then its behaviour in play."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.advantages import state_ids
from hgpo_jax.check.play import GROUP, Play, Report
from hgpo_jax.envs.protocol import CompiledEnv, ListsActions, ListsGames, TimeLimited
from hgpo_jax.rollout.compiled import start_episode
from hgpo_jax.rollout.compiled_prompts import make_prompt, prompt_length, role_of
from hgpo_jax.rollout.function_shapes import is_key, shape_faults
from hgpo_jax.rollout.requirements import member_faults, roles_of
from hgpo_jax.utils.errors import one_line

Player = Callable[[Any, Any, jax.Array, jax.Array], jax.Array]  # (env, state, recent i32[K, A], key) -> action i32[A]
ANY = "any words"  # the player of an environment that provides none


def players(env, expert) -> dict[str, Player]:
    """Returns the players, by the member that decides their actions."""

    def admissible(env, state, recent, key):
        legal, words = env.admissible(state)
        return words[jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))]

    acting: dict[str, Player] = {}
    if expert is not None:
        acting["random_action"] = lambda env, state, recent, key: expert.random_action(env, state, key)
        acting["expert_action"] = expert.expert_action
    if isinstance(env, ListsActions):
        acting["admissible"] = admissible
    return acting or {ANY: lambda env, state, recent, key: jax.random.randint(key, recent[0].shape, 1, len(env.words))}


def make_play(env, acting: Sequence[Player], history_length: int):
    """Builds jitted `play(tables, tasks [B], keys [P, B]) -> record [P, B, max_turns + 1]`, also of turns after the end, for
    each of the P players."""

    def episode(env, task, key, player):
        start = start_episode(env, max(history_length, 1), task, key)

        def turn(row, t):
            key = jax.random.fold_in(row.key, t)
            role = role_of(env, row.env)
            _, recent = row.history.of(role)
            action = jnp.stack([act(env, row.env, recent, key) for act in acting])[player]
            history = row.history if history_length else jax.tree.map(lambda a: a[:, :0], row.history)
            _, length = make_prompt(env, row.env, row.goal, history, row.observation, len(env.words))
            can_act = env.admissible(row.env)[0].any() if isinstance(env, ListsActions) else jnp.array(True)
            state, observation, reward, done, invalid = env.step(row.env, action)
            after = row.replace(
                env=state,
                observation=observation,
                history=row.history.push(role, row.observation, action),
                done=row.done | done,
            )
            record = {
                "goal": row.goal,
                "task": row.env.task,
                "observation": row.observation,
                "action": action,
                "reward": reward,
                "done": done,
                "invalid": invalid & can_act,
                "won": env.won(state),
                "prompt": length,
                "mask": ~row.done,
                "seen": observation,
                "role": role,
            }
            return after, record

        _, record = jax.lax.scan(turn, start, jnp.arange(env.max_turns + 1))
        return record

    def episodes(tables, tasks, keys):
        play_episode = functools.partial(episode, env if tables is None else env.bound(tables))
        return jax.vmap(jax.vmap(play_episode, (0, 0, None)), (None, 0, 0))(tasks, keys, jnp.arange(len(acting)))

    return jax.jit(episodes)


def check(env, expert, tasks, key, history_length: int) -> Report:
    """Plays an episode of each task, [B], with every player."""
    if unplayable := list(member_faults(env, CompiledEnv)) or shape_faults(env, expert, tasks[0], history_length):
        return Report(unplayable)
    tables = env.tables if isinstance(env, ListsGames) and not is_key(tasks) else None
    acting = players(env, expert)
    inputs = tables, tasks, jax.random.split(key, (len(acting), len(tasks)))
    attributes = dict(getattr(env, "__dict__", {}))
    try:
        # Both differ if something random, or a variable, became a constant of the program.
        traced = [make_play(env, list(acting.values()), history_length).lower(*inputs) for _ in range(2)]
        programs = [traced[0].compile()] * 2
        if traced[0].as_text() != traced[1].as_text():
            programs[1] = traced[1].compile()
        first = jax.device_get(programs[0](*inputs))
        began = time.perf_counter()
        second = jax.device_get(programs[1](*inputs))  # differs if something random is on the host, too
        speed = first["mask"].size / (time.perf_counter() - began)
    except Exception as error:  # any error of the environment
        return Report([one_line(f"reset, step: cannot be played: {type(error).__name__}: {error!s:.300}")])
    faults: dict[str, str] = {}  # by kind
    # An attribute that is only added, such as a cached property, is allowed.
    changed = [name for name, value in getattr(env, "__dict__", {}).items() if attributes.get(name, value) is not value]
    if changed:
        faults["leak"] = f"{changed[0]}: changes in play, and leaks from one episode into others; keep it in the state"
    plays = {}
    for index, name in enumerate(acting):
        record, again = ({field: array[index] for field, array in each.items()} for each in (first, second))
        for kind, line in itertools.chain(
            () if changed else _difference(record, again, name),
            _value_faults(env, record, prompt_length(env, history_length)),
            () if name == ANY else _player_faults(env, record, name),
        ):
            faults.setdefault(kind, line)
        plays[name] = _as_play(record, isinstance(env, TimeLimited))
    return Report(list(faults.values()), plays, speed)


def _difference(first: dict, second: dict, player: str) -> Iterator[tuple[str, str]]:
    """Yields the first difference between two plays of equal keys, if there is one."""
    answers = ("reward", "done", "invalid", "won", "seen")
    parts = {
        "reset(key): episodes of equal keys differ": ("goal", "task", "observation"),
        f"{player}: does something else in the same state with the same key": ("action",),
        "step(state, action): answers the same action in the same state differently": answers,
    }
    for t in range(first["mask"].shape[1]):
        for fault, names in parts.items():
            if not all(np.array_equal(first[name][:, t], second[name][:, t], equal_nan=True) for name in names):
                yield "differs", f"{fault}; draw everything random from the key, with jax.random"
                return


def _value_faults(env, record: dict, slots: int) -> Iterator[tuple[str, str]]:
    """Yields what no rollout should meet."""
    mask, reward, longest = record["mask"], record["reward"], record["prompt"][record["mask"]].max()
    for fault, indices, (what, names) in (
        ("goal(state): the goal has the id", record["goal"], ("words", env.words)),
        ("step(state, action): an observation has the id", record["seen"], ("words", env.words)),
        ("reset(key): an observation has the id", record["observation"][:, 0], ("words", env.words)),
        ("reset(key): state.task is", record["task"], ("task_types", env.task_types)),
        ("role(state): is", record["role"][mask], ("roles", roles_of(env))),
    ):
        wrong = indices[(indices < 0) | (indices >= len(names))]
        if wrong.size:
            yield fault, f"{fault} {wrong[0]}; make it the index of one of the {len(names)} {what}"
    broken = ~np.isfinite(reward)
    if (broken & mask).any():
        yield "reward", f"step(state, action): a reward is {reward[broken & mask][0]}; make it a finite number"
    elif (broken & ~mask).any():
        yield "reward", f"step(state, action): after the end a reward is {reward[broken][0]}; keep it finite"
    if mask[:, -1].any():
        fault = f"an episode goes on after max_turns={env.max_turns} actions; count them, and return done"
        yield "end", f"step(state, action): {fault}"
    if longest > slots:
        yield "prompt", f"prompt(...): is {longest} tokens long; prompt_slots(history_length) says at most {slots}"
    try:
        text = env.decode(record["observation"][0, 0])
    except Exception as error:  # any error of the environment
        fault = f"decode(ids): fails with {type(error).__name__}: {error!s:.200}; give text for any words"
        yield "decode", one_line(fault)
    else:
        if not isinstance(text, str):
            yield "decode", f"decode(ids): returns a {type(text).__name__}; return text"


def _player_faults(env, record: dict, player: str) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the actions of a player whom the environment or its expert provides."""
    mask, actions = record["mask"], record["action"]
    refused = record["invalid"] & mask
    if refused.any():
        action = " ".join(env.words[i] for i in actions[refused][0] if 0 < i < len(env.words))
        fault = f"calls invalid ({refused.sum() / mask.sum():.1%} of its actions); let both agree"
        yield f"{player} invalid", f"{player}: gives {action!r}, which step(state, action) {fault}"
    if ((actions[..., :-1] == 0) & (actions[..., 1:] != 0))[mask].any():
        yield f"{player} gap", f"{player}: gives an action with an empty word before others; fill its slots from the first on"


def _as_play(record: dict, says_truncated: bool) -> Play:
    record = {name: array[:, :-1] for name, array in record.items()}
    mask = record["mask"]
    states = np.asarray(jax.jit(state_ids)(jnp.asarray(record["observation"]), jnp.asarray(mask)))
    return Play(
        mask=mask,
        states=np.where(mask, states, 0),
        invalid=record["invalid"],
        prompts=record["prompt"],
        success=record["won"][np.arange(len(mask)), mask.sum(1) - 1].astype(np.float32),
        groups=np.arange(len(mask)) // GROUP,
        rewards=record["reward"].sum(1, where=mask),
        says_truncated=says_truncated,
    )
