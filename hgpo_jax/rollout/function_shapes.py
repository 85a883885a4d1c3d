"""Shapes and dtypes of what a compiled environment's functions return, found by tracing them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hgpo_jax.envs.protocol import ListsActions, OwnPrompts
from hgpo_jax.utils.errors import one_line


def shape_faults(env, expert, task, history_length: int) -> list[str]:
    """Lists wrong shapes and dtypes in the functions' results, without computing anything. task: begins an episode."""
    O, A, G, K = env.observation_length, env.action_length, env.goal_length, history_length
    faults: list[str] = []
    call = functools.partial(_result, faults)
    beginning, start = ("reset(key)", env.reset) if is_key(task) else ("start(game)", env.start)
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


def is_key(tasks) -> bool:
    """Whether tasks are random keys, not the numbers of games."""
    return jnp.issubdtype(tasks.dtype, jax.dtypes.prng_key)
