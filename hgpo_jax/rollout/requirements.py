"""The members that an environment must have, so that an incomplete one is rejected before anything is compiled or played.

A missing member would otherwise be noticed only where it is first read: in the middle of a trace or, in a text environment,
as the failure of every single episode. A fault is one line that names the class and the member.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hgpo_jax.envs.protocol import (
    INFO,
    BegunTextEnv,
    CompiledEnv,
    Expert,
    ListsActions,
    OwnPrompts,
    Pictured,
    Plans,
    Playable,
    Signals,
    Team,
    TextEnv,
    TextPictured,
    TextTeam,
    members,
)
from hgpo_jax.rollout.signals import are_names, declaration_fault, declared, signal_faults
from hgpo_jax.utils.errors import one_line

# Of each protocol: member -> the optional protocol whose other members it calls for.
COMPILED_PARTS = {
    "prompt": OwnPrompts,
    "picture": Pictured,
    "roles": Team,
    "answer_parts": Plans,
    "expert_action": Expert,
    "signals": Signals,
}
OPTIONAL: dict[Any, dict[str, Any]] = {
    Playable: COMPILED_PARTS,
    CompiledEnv: COMPILED_PARTS,
    TextEnv: {},
    BegunTextEnv: {"roles": TextTeam, "picture_size": TextPictured},
}
NUMBERS = ("goal_length", "observation_length", "action_length", "max_turns")
LIMIT = 60.0  # seconds
ONE_ROLE = ("agent",)  # for an environment that declares none


def roles_of(env) -> tuple[str, ...]:
    """Returns the names of an environment's roles."""
    return tuple(getattr(env, "roles", ONE_ROLE))


def member_faults(env, protocol: type) -> Iterator[str]:
    """Yields what is wrong with the members that an environment has or lacks, by one of the protocols in OPTIONAL."""
    name = type(env).__name__
    where = f"{name} after reset(task)" if protocol is BegunTextEnv else name
    for needed in (protocol, *(part for member, part in OPTIONAL[protocol].items() if hasattr(env, member))):
        yield from (f"{where} lacks {m}: {meaning}" for m, meaning in members(needed).items() if not hasattr(env, m))
    for member in filter(functools.partial(hasattr, env), NUMBERS):
        value = getattr(env, member)
        if not isinstance(value, numbers.Integral) or value < 1:
            yield f"{name}: {member} is {value!r:.100}; give a whole number above 0"
    for member in ("words", "task_types"):
        value = getattr(env, member, ("",))
        if isinstance(value, str) or not isinstance(value, Sequence) or not value or not all(isinstance(w, str) for w in value):
            yield f"{name}: {member} is {value!r:.100}; give a tuple of texts"
        elif len(set(value)) < len(value):
            yield f"{name}: {member} has {next(w for w in value if value.count(w) > 1)!r} twice; name each once"
        elif member == "words" and value[0]:
            yield f"{name}: words begins with {value[0]!r}; put the empty word '' first, since id 0 is an empty slot"
    roles = getattr(env, "roles", ONE_ROLE)  # they name metrics
    if not are_names(roles) or not roles:
        yield f'{name}: roles is {roles!r:.100}; give different words, as in ("searcher", "carrier")'
    if protocol is not BegunTextEnv and (fault := declaration_fault(env)):
        yield f"{name}: {fault}"
    if hasattr(env, "picture") and hasattr(env, "prompt"):
        yield f"{name} has both picture and prompt; a prompt of its own shows no picture, so leave one of the two out"
    if hasattr(env, "answer_parts"):
        parts, length = env.answer_parts, getattr(env, "action_length", 0)
        are_counts = isinstance(parts, tuple | list) and len(parts) == 3 and all(isinstance(n, int) and n > 0 for n in parts)
        if not are_counts or sum(parts) != length:
            yield f"{name}: answer_parts is {parts!r:.100}; give three numbers, {length} together"


def missing_info(info: dict) -> list[str]:
    """Lists what the info of a text environment's step lacks."""
    return [f"{key}: {meaning}" for key, meaning in INFO.items() if key not in info]


def check_compiled(env, protocol: type = CompiledEnv) -> None:
    """Raises ValueError for the first fault of a compiled environment: a member, or what a function returns when traced."""
    import jax  # text environments are checked in worker processes, which do not need it

    from hgpo_jax.rollout.function_shapes import shape_faults  # as above

    name = type(env).__name__
    _refuse(member_faults(env, protocol))
    key = jax.eval_shape(lambda: jax.random.key(0))
    _refuse(f"{name}: {fault}" for fault in shape_faults(env, None, key, history_length=1))
    if hasattr(env, "picture"):
        _check_picture(env, name)
    if names := declared(env):
        state, _ = jax.eval_shape(env.reset, key)
        values = _traced(env, "signal_values(state)", env.signal_values, state)
        is_array = isinstance(values, jax.ShapeDtypeStruct)
        if not is_array or values.shape != (len(names),) or not jax.numpy.issubdtype(values.dtype, jax.numpy.number):
            kind = f"{values.dtype}{list(values.shape)}" if is_array else f"a {type(values).__name__}"
            raise ValueError(f"{name}: signal_values(state) is {kind}; give f32[{len(names)}], for {', '.join(names)}")


def _check_picture(env, name: str) -> None:
    """Raises ValueError for the first fault of an environment that shows pictures."""
    import jax  # as above

    for member, count, what in (("picture_size", 2, "height and width"), ("picture_features", 2, "rows and columns")):
        _check_counts(f"{name}: {member}", getattr(env, member), count, f"{what}, each above 0")
    _check_counts(f"{name}: picture_words", env.picture_words, 3, "ids of words from 1 on")
    (height, width), (rows, columns) = env.picture_size, env.picture_features
    if height % rows or height // rows * columns != width:
        raise ValueError(f"{name}: picture_features is {rows, columns}; give what cuts {height} x {width} pixels into squares")
    words = jax.ShapeDtypeStruct((env.observation_length,), jax.numpy.int32)
    drawn = _traced(env, "picture(observation)", env.picture, words)
    kind = f"{getattr(drawn, 'dtype', type(drawn).__name__)}{list(getattr(drawn, 'shape', ()))}"
    if kind != f"uint8{[height, width, 3]}":
        raise ValueError(f"{name}: picture(observation) is {kind}; give uint8[{height}, {width}, 3], as picture_size says")


def _check_counts(what: str, values: Any, count: int, meaning: str) -> None:
    """Raises ValueError unless the values are so many whole numbers from 1 on."""
    whole = isinstance(values, tuple | list) and len(values) == count
    if not whole or not all(isinstance(n, numbers.Integral) and int(n) > 0 for n in values):
        raise ValueError(f"{what} is {values!r:.100}; give {count} numbers, {meaning}")


def check_lists_actions(env) -> None:
    """Raises ValueError if a compiled environment, which has passed `check_compiled`, does not list its actions."""
    if not isinstance(env, ListsActions):
        raise ValueError(f"{type(env).__name__} does not list its actions (admissible); leave it out")


def _traced(env, call: str, function: Callable, argument) -> Any:
    """Returns the shapes of a function's result; opens no device. Raises ValueError in one line for any error of it."""
    import jax

    try:
        return jax.eval_shape(function, argument)
    except Exception as error:  # any error of the environment
        fails = f"{type(env).__name__}: {call} fails with {type(error).__name__}: {error!s:.300}"
        raise ValueError(one_line(fails)) from None


def picture_of(env) -> np.ndarray | None:
    """Returns what a text environment shows now, uint8[H, W, 3]; None without pictures. Raises ValueError for another one."""
    if not hasattr(env, "picture_size"):
        return None
    picture = np.array(env.picture)  # a copy: the environment may draw the next one into the same array
    if picture.dtype != np.uint8 or picture.shape != (*env.picture_size, 3):
        expected = f"give uint8{[*env.picture_size, 3]}, as picture_size says"
        raise ValueError(f"{type(env).__name__}: picture is {picture.dtype}{list(picture.shape)}; {expected}")
    return picture


def check_text(env, time_limit: float | None = None) -> bool:
    """Raises ValueError for the first fault of a text environment, and if it hangs. Takes a step in task 0.

    time_limit: as in `deadline`. Returns whether it lists commands in task 0, or fails there.
    """
    name = type(env).__name__
    _refuse(member_faults(env, TextEnv))
    waiting = [member for member in ("reset", "step") if inspect.iscoroutinefunction(getattr(env, member))]
    _refuse(f"{name}: {member} is async; write it without, as with asyncio.run(...) inside" for member in waiting)
    with deadline(f"{name}: reset(0)", time_limit):
        try:
            _, commands = env.reset(0)
        except Exception:  # as during play: the error costs only the episodes with this task
            return True
    _refuse(member_faults(env, BegunTextEnv))
    if hasattr(env, "picture_size"):
        _check_counts(f"{name}: picture_size", env.picture_size, 2, "height and width, each above 0")
        picture_of(env)
    action = commands[0] if commands else ""
    with deadline(f"{name}: step({action!r:.80}) in task 0", time_limit):
        try:
            *_, info = env.step(action)
            faults = [f"lacks {each}" for each in missing_info(info)]
            faults += [f"has wrong signals: {each}" for each in signal_faults(declared(env), info.get("signals", {}))]
        except Exception:
            return bool(commands)
    _refuse(f"{name}: the info of step(action) {each}" for each in faults)
    return bool(commands)


class Hangs(ValueError):
    """Raised for a call of an environment that does not return."""


class _Late(BaseException):
    """A timeout. It is not an Exception, so that environments do not catch it."""


@contextlib.contextmanager
def deadline(call: str, time_limit: float | None = None) -> Iterator[None]:
    """Limits calls of an environment in this process before a run begins: raises Hangs in one line.

    time_limit: seconds, env.time_limit of a run; None: LIMIT.

    It works only in the main thread, which alone receives the signal, and not in code that never returns to Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise _Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, time_limit or LIMIT)
    try:
        yield
    except _Late:
        waited = f"{LIMIT:g} s" if time_limit is None else f"{time_limit:g} s (env.time_limit)"
        raise Hangs(f"{call} gives no answer in {waited}; see why it hangs") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _refuse(faults: Iterable[str]) -> None:
    for fault in faults:
        raise ValueError(fault)
