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
from hgpo_jax.envs.protocol import CompiledEnv, ListsActions, ListsGames, OwnPrompts, TimeLimited
from hgpo_jax.rollout.compiled import start_episode
from hgpo_jax.rollout.compiled_prompts import make_prompt, prompt_length, role_of
from hgpo_jax.rollout.requirements import member_faults, roles_of
from hgpo_jax.utils.errors import one_line

Player = Callable[[Any, Any, jax.Array, jax.Array], jax.Array]  # (env, state, recent i32[K, A], key) -> action i32[A]
ANY = "any words"  # the player of an environment that provides none


def shape_faults(env, expert, task, history_length: int) -> list[str]:
    """Lists wrong shapes and dtypes in the functions' results, without computing anything. task: begins an episode."""
    O, A, G, K = env.observation_length, env.action_length, env.goal_length, history_length
    faults: list[str] = []
    call = functools.partial(_result, faults)
    beginning, start = ("reset(key)", env.reset) if _drawn(task) else ("start(game)", env.start)
    first = call(beginning, start, task, state=None, observation=f"i32[{O}]")
    if first is None:
        return faults
    state, observation = first
    if not hasattr(state, "task"):
        return [*faults, f"{beginning}: its state has no field task; add it: the index of the episode's task type, i32[]"]
    if _kind(state.task) != "i32[]":
        faults.append(f"{beginning}: state.task is {_kind(state.task)}; make it i32[]")
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    key = jax.eval_shape(lambda: jax.random.key(0))
    values = {"state": None, "observation": f"i32[{O}]", "reward": "f32[]", "done": "bool[]", "invalid": "bool[]"}
    result = call("step(state, action)", env.step, state, ids(A), **values)
    if result is not None:
        before, after = _kinds(state), _kinds(result[0])
        if before.keys() != after.keys():
            faults.append("step(state, action): its state has other fields than that of reset; return the same")
        for path in (path for path in before if after.get(path, before[path]) != before[path]):
            message = f"state{path} becomes {after[path]}; leave it {before[path]}, as reset made it"
            faults.append(f"step(state, action): {message}")
    for name, kind in {"goal": f"i32[{G}]", "won": "bool[]", "truncated": "bool[]", "role": "i32[]"}.items():
        if hasattr(env, name):
            call(f"{name}(state)", getattr(env, name), state, **{name: kind})
    if isinstance(env, OwnPrompts):
        prompt, arguments = functools.partial(env.prompt, act=1), (ids(G), ids(K, O), ids(K, A), observation)
        call("prompt(...)", prompt, state, *arguments, prompt=f"i32[{env.prompt_slots(K)}]", length="i32[]")
    if expert is not None:
        action = f"i32[{A}]"
        call("random_action(state, key)", functools.partial(expert.random_action, env), state, key, action=action)
        player = functools.partial(expert.expert_action, env)
        call("expert_action(state, recent, key)", player, state, ids(max(K, 1), A), key, action=action)
    if isinstance(env, ListsActions) and (table := call("admissible(state)", env.admissible, state, rows=None, words=None)):
        count = len(table[1]) if table[1].ndim else 0
        call("admissible(state)", env.admissible, state, rows=f"bool[{count}]", words=f"i32[{count}, {A}]")
    return faults


def _result(faults: list[str], call: str, function: Callable, *arguments, **expected: str | None) -> Any:
    """Returns what a call would; None, and a fault more, if it fails or does not return the expected values, name -> kind."""
    try:
        result = jax.eval_shape(function, *arguments)
    except Exception as error:  # any error of the environment
        concrete = isinstance(error, jax.errors.ConcretizationTypeError)
        hint = " (use jnp.where and jax.lax instead of if and while)" if concrete else ""
        faults.append(one_line(f"{call}: cannot be compiled: {type(error).__name__}: {error!s:.300}{hint}"))
        return None
    values = result if len(expected) > 1 else (result,)
    if not isinstance(values, tuple | list) or len(values) != len(expected):
        faults.append(f"{call}: does not return {len(expected)} values; return ({', '.join(expected)})")
        return None
    for (name, kind), value in zip(expected.items(), values, strict=True):
        if kind not in (None, _kind(value)):
            faults.append(f"{call}: {name} is {_kind(value)}; make it {kind}")
    return result


def _kind(value) -> str:
    """Returns dtype and shape of an array, as in i32[3, 2]."""
    if not hasattr(value, "dtype"):
        return f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}".replace("uint", "u").replace("int", "i").replace("float", "f")


def _kinds(state) -> dict[str, str]:
    return {jax.tree_util.keystr(path): _kind(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def _drawn(tasks) -> bool:
    """Whether tasks are random keys, not the numbers of games."""
    return jnp.issubdtype(tasks.dtype, jax.dtypes.prng_key)


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
    tables = env.tables if isinstance(env, ListsGames) and not _drawn(tasks) else None
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
