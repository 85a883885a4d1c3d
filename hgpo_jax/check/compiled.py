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
from hgpo_jax.check.statistics import GROUP, Play
from hgpo_jax.envs.protocol import Expert, ListsActions, ListsGames, OwnPrompts, Team, TimeLimited, members
from hgpo_jax.rollout.compiled import start_episode
from hgpo_jax.rollout.compiled_prompts import make_prompt, prompt_length, role_of
from hgpo_jax.rollout.requirements import OWN, RUNNER, TEAM, roles_of
from hgpo_jax.utils.errors import one_line

COUNTS = ("goal_length", "observation_length", "action_length", "max_turns")
Player = Callable[[Any, Any, jax.Array, jax.Array], jax.Array]  # (env, state, recent i32[K, A], key) -> action i32[A]


def member_faults(env, expert) -> list[str]:
    """Lists missing members, and attributes of a wrong kind."""
    needed = RUNNER | (OWN if hasattr(env, "prompt") else {}) | (TEAM if hasattr(env, "roles") else {})
    faults = [f"{name}: is missing; add it: {meaning}" for name, meaning in needed.items() if not hasattr(env, name)]
    for name in COUNTS:
        value = getattr(env, name, 1)
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            faults.append(f"{name}: is {value!r}; make it a whole number above 0")
    for name in ("words", "task_types"):
        value = getattr(env, name, ("",))
        if isinstance(value, str) or not isinstance(value, Sequence) or not value or not all(isinstance(w, str) for w in value):
            faults.append(f"{name}: is {value!r:.80}; make it a tuple of texts")
        elif len(set(value)) < len(value):
            faults.append(f"{name}: has {next(w for w in value if value.count(w) > 1)!r} twice; name each once")
        elif name == "words" and value[0]:
            faults.append(f"words: begins with {value[0]!r}; put the empty word '' first, since id 0 is an empty slot")
    try:
        roles_of(env)
    except ValueError as error:
        faults.append(str(error).partition(": ")[2])
    if expert is None and hasattr(env, "expert_action"):
        faults.append(f"random_action: is missing beside expert_action; add it: {members(Expert)['random_action']}")
    return faults


def shape_faults(env, expert, task, history_length: int) -> list[str]:
    """Lists wrong shapes and dtypes in the functions' results, without computing anything. task: begins an episode."""
    O, A, calls = env.observation_length, env.action_length, _Calls()
    ids = lambda *shape: ("int32", shape)  # noqa: E731
    start = env.reset if _drawn(task) else env.start
    call = "reset(key)" if _drawn(task) else "start(game)"
    begun = calls.result(call, start, task, state=None, observation=ids(O))
    if begun is None:
        return calls.faults
    state, observation = begun
    if not hasattr(state, "task"):
        return [*calls.faults, f"{call}: its state has no field task; add it: the index of the episode's task type, i32[]"]
    if (str(state.task.dtype), state.task.shape) != NUMBER:
        calls.faults.append(f"{call}: state.task is {_shown(state.task)}; make it i32[]")
    action, key = jax.ShapeDtypeStruct((A,), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    step = {"state": None, "observation": ids(O), "reward": ("float32", ()), "done": FLAG, "invalid": FLAG}
    result = calls.result("step(state, action)", env.step, state, action, **step)
    if result is not None:
        calls.faults += [f"step(state, action): {difference}" for difference in _changed_fields(state, result[0])]
    goal = calls.result("goal(state)", env.goal, state, goal=ids(env.goal_length))
    calls.result("won(state)", env.won, state, won=FLAG)
    if isinstance(env, TimeLimited):
        calls.result("truncated(state)", env.truncated, state, truncated=FLAG)
    if isinstance(env, Team):
        calls.result("role(state)", env.role, state, role=NUMBER)
    if isinstance(env, OwnPrompts) and goal is not None:
        past = [jax.ShapeDtypeStruct((history_length, width), jnp.int32) for width in (O, A)]
        prompt = functools.partial(env.prompt, act=1)
        slots = env.prompt_slots(history_length)
        calls.result("prompt(...)", prompt, state, goal, *past, observation, prompt=ids(slots), length=NUMBER)
    if expert is not None:
        recent = jax.ShapeDtypeStruct((max(history_length, 1), A), jnp.int32)
        calls.result("random_action(state, key)", functools.partial(expert.random_action, env), state, key, action=ids(A))
        player = functools.partial(expert.expert_action, env)
        calls.result("expert_action(state, recent, key)", player, state, recent, key, action=ids(A))
    if isinstance(env, ListsActions):
        listed = calls.result("admissible(state)", env.admissible, state, rows=None, words=None)
        if listed is not None:
            count = listed[0].shape[:1]
            calls.result("admissible(state)", env.admissible, state, rows=("bool", count), words=ids(*count, A))
    return calls.faults


NUMBER, FLAG = ("int32", ()), ("bool", ())  # dtype and shape of a scalar


class _Calls:
    """Calls functions of an environment without computing anything; `faults` are those found so far."""

    def __init__(self):
        self.faults: list[str] = []

    def result(self, call: str, function: Callable, *arguments, **expected) -> Any:
        """Returns a call's result, checked against name -> (dtype, shape), None for anything; None if the call fails."""
        try:
            result = jax.eval_shape(function, *arguments)
        except Exception as error:  # any error of the environment
            concrete = isinstance(error, jax.errors.ConcretizationTypeError)
            hint = " (use jnp.where and jax.lax instead of if and while)" if concrete else ""
            self.faults.append(one_line(f"{call}: cannot be compiled: {type(error).__name__}: {error!s:.300}{hint}"))
            return None
        values = result if len(expected) > 1 else (result,)
        if not isinstance(values, tuple | list) or len(values) != len(expected):
            self.faults.append(f"{call}: does not return {len(expected)} values; return ({', '.join(expected)})")
            return None
        for (name, wanted), value in zip(expected.items(), values, strict=True):
            if wanted is not None and (str(getattr(value, "dtype", "")), getattr(value, "shape", None)) != wanted:
                self.faults.append(f"{call}: {name} is {_shown(value)}; make it {_named(*wanted)}")
        return result


def _drawn(task) -> bool:
    """Whether a task is a random key, not the number of a game."""
    return jnp.issubdtype(task.dtype, jax.dtypes.prng_key)


def _changed_fields(before, after) -> Iterator[str]:
    """Yields the parts of a state that change their kind in a step."""
    kinds = [str(jax.tree.structure(state)) for state in (before, after)]
    if kinds[0] != kinds[1]:
        yield "its state has other fields than that of reset; return the same"
        return
    for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            yield f"state{jax.tree_util.keystr(path)} becomes {_shown(new)}; leave it {_shown(old)}, as reset made it"


def _shown(value) -> str:
    return _named(str(value.dtype), value.shape) if hasattr(value, "dtype") else f"a {type(value).__name__}"


def _named(dtype: str, shape: tuple[int, ...]) -> str:
    short = {"int32": "i32", "float32": "f32", "uint32": "u32"}.get(dtype, dtype)
    return f"{short}[{', '.join(map(str, shape))}]"


def players(env, expert) -> dict[str, Player]:
    """Returns the players, by the member that decides their actions."""
    found: dict[str, Player] = {}
    if expert is not None:
        found["random_action"] = lambda env, state, recent, key: expert.random_action(env, state, key)
        found["expert_action"] = expert.expert_action
    if isinstance(env, ListsActions):
        found["admissible"] = _admissible
    return found or {"any words": lambda env, state, recent, key: jax.random.randint(key, recent[0].shape, 1, len(env.words))}


def _admissible(env, state, recent, key):
    legal, words = env.admissible(state)
    return words[jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))]


def make_play(env, acting: Sequence[Player], history_length: int):
    """Builds jitted `play(tables, tasks [B], keys [B], which i32[B]) -> record` of max_turns + 1 turns, also after the end.

    which: for each episode, the player's index in `acting`.
    """

    def episode(env, task, key, which):
        start = start_episode(env, max(history_length, 1), task, key)

        def turn(row, t):
            key = jax.random.fold_in(row.key, t)
            role = role_of(env, row.env)
            _, recent = row.history.of(role)
            action = jnp.stack([player(env, row.env, recent, key) for player in acting])[which]
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
        return record | {"goal": start.goal, "task": start.env.task}

    def episodes(tables, tasks, keys, which):
        played = env if tables is None else env.bound(tables)
        return jax.vmap(functools.partial(episode, played))(tasks, keys, which)

    return jax.jit(episodes)


def check(env, expert, tasks, key, history_length: int) -> tuple[list[str], dict[str, Play], float]:
    """Plays an episode of each task, [B], with every player.

    Returns: the faults, the play by player, and steps per second of the compiled program.
    """
    if faults := member_faults(env, expert) or shape_faults(env, expert, tasks[0], history_length):
        return faults, {}, 0.0
    tables = env.tables if isinstance(env, ListsGames) and not _drawn(tasks) else None
    B, acting = len(tasks), players(env, expert)
    all_tasks, which = jnp.concatenate([tasks] * len(acting)), np.repeat(np.arange(len(acting)), B)
    inputs = tables, all_tasks, jax.random.split(key, len(all_tasks)), jnp.asarray(which)
    trace = lambda: make_play(env, list(acting.values()), history_length).lower(*inputs)  # noqa: E731
    try:
        attributes = [dict(getattr(env, "__dict__", {}))]
        traced = trace()
        program = traced.compile()
        records = [jax.device_get(program(*inputs))]
        attributes.append(dict(getattr(env, "__dict__", {})))
        began = time.perf_counter()
        records.append(jax.device_get(program(*inputs)))  # differs if something random is on the host
        speed = records[0]["mask"].size / (time.perf_counter() - began)
        again = trace()
        attributes.append(dict(getattr(env, "__dict__", {})))
        if again.as_text() != traced.as_text():  # something random, or a variable, became a constant of the program
            records.append(jax.device_get(again.compile()(*inputs)))
    except Exception as error:  # any error of the environment
        return [one_line(f"reset, step: cannot be played: {type(error).__name__}: {error!s:.300}")], {}, 0.0
    found, plays = _leaks(*attributes), {}
    for index, name in enumerate(acting):
        rows = slice(index * B, (index + 1) * B)
        record, *repeated = ({field: array[rows] for field, array in each.items()} for each in records)
        for second in repeated if "leak" not in found else ():
            found = _differences(record, second, name) | found
        found = _value_faults(env, record, name, prompt_length(env, history_length)) | found
        plays[name] = _as_play(record, isinstance(env, TimeLimited))
    return list(found.values()), plays, speed


def _leaks(*snapshots: dict) -> dict[str, str]:
    """Finds attributes that playing changed; one that is only added, such as a cached property, is allowed."""
    changed = sorted({n for a, b in itertools.pairwise(snapshots) for n in a.keys() & b.keys() if a[n] is not b[n]})
    if not changed:
        return {}
    return {"leak": f"{changed[0]}: changes in play, and leaks from one episode into others; keep it in the state"}


def _differences(first: dict, second: dict, player: str) -> dict[str, str]:
    """Describes the first difference between two plays of equal keys."""
    unequal = {}
    for name, array in first.items():
        axes = tuple(range(2 if name not in ("goal", "task") else 1, array.ndim))
        unequal[name] = ((array != second[name]) & ~((array != array) & (second[name] != second[name]))).any(axes)
    told = "; draw everything random from the key, with jax.random"
    if unequal["goal"].any() or unequal["task"].any() or unequal["observation"][:, 0].any():
        return {"differs": f"reset(key): episodes of equal keys differ{told}"}
    for t in range(first["mask"].shape[1]):
        if unequal["action"][:, t].any():
            return {"differs": f"{player}: does something else in the same state with the same key{told}"}
        if any(unequal[name][:, t].any() for name in ("reward", "done", "invalid", "won", "seen")):
            return {"differs": f"step(state, action): answers the same action in the same state differently{told}"}
    return {}


def _value_faults(env, record: dict, player: str, slots: int) -> dict[str, str]:
    """Lists values that no rollout should meet, by kind."""
    mask, words, found = record["mask"], len(env.words), {}
    texts = {"goal(state): the goal": record["goal"], "step(state, action): an observation": record["seen"]}
    for told, ids in (texts | {"reset(key): an observation": record["observation"][:, 0]}).items():
        if ((ids < 0) | (ids >= words)).any():
            wrong = ids[(ids < 0) | (ids >= words)][0]
            found["ids"] = f"{told} has the id {wrong}; an id is the index of one of the {words} words"
    if ((record["task"] < 0) | (record["task"] >= len(env.task_types))).any():
        found["task"] = f"reset(key): state.task is {record['task'].max()}; it is one of the {len(env.task_types)} task_types"
    if ((record["role"] < 0) | (record["role"] >= len(roles_of(env))))[mask].any():
        found["role"] = f"role(state): is {record['role'][mask].max()}; it is one of the {len(roles_of(env))} roles"
    broken = ~np.isfinite(record["reward"])
    if (broken & mask).any():
        found["reward"] = f"step(state, action): a reward is {record['reward'][broken & mask][0]}; make it a finite number"
    elif (broken & ~mask).any():
        found["reward"] = f"step(state, action): after the end a reward is {record['reward'][broken][0]}; keep it finite"
    if mask[:, -1].any():
        found["end"] = (
            f"step(state, action): an episode goes on after max_turns={env.max_turns} actions; count them, and return done"
        )
    if (mask & (record["prompt"] > slots)).any():
        longest = record["prompt"][mask].max()
        found["prompt"] = f"prompt(...): is {longest} tokens long; prompt_slots(history_length) says at most {slots}"
    refused = record["invalid"] & mask
    if player != "any words" and refused.any():
        action = env.decode(record["action"][refused][0])
        found[f"{player} invalid"] = (
            f"{player}: gives {action!r}, which step(state, action) calls invalid ({refused.sum() / mask.sum():.1%} of its "
            "actions); let both agree"
        )
    gaps = (record["action"][..., :-1] == 0) & (record["action"][..., 1:] != 0)
    if player != "any words" and gaps[mask].any():
        found[f"{player} gap"] = f"{player}: gives an action with an empty word before others; fill its slots from the first on"
    try:
        text = env.decode(record["observation"][0, 0])
    except Exception as error:  # any error of the environment
        found["decode"] = one_line(f"decode(ids): fails with {type(error).__name__}: {error!s:.200}; give text for any words")
    else:
        if not isinstance(text, str):
            found["decode"] = f"decode(ids): returns a {type(text).__name__}; return text"
    return found


def _as_play(record: dict, says_truncated: bool) -> Play:
    mask = record["mask"][:, :-1]
    last = mask.sum(1) - 1
    every, happened = record["observation"][:, :-1], jnp.asarray(mask)
    return Play(
        mask=mask,
        states=np.where(mask, np.asarray(jax.jit(state_ids)(jnp.asarray(every), happened)), 0),
        invalid=record["invalid"][:, :-1],
        prompts=record["prompt"][:, :-1],
        success=record["won"][np.arange(len(last)), last],
        groups=np.arange(len(mask)) // GROUP,
        rewards=record["reward"][:, :-1].sum(1, where=mask),
        judged=np.ones(len(mask), bool),
        says_truncated=says_truncated,
    )
