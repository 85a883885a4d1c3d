"""The members that an environment must have, so that an incomplete one is rejected before anything is compiled or played.

A missing member would otherwise be noticed only where it is first read: in the middle of a trace or, in a text environment,
as the failure of every single episode.
"""

from __future__ import annotations

import contextlib
import numbers
import signal
import threading
from collections.abc import Iterator

from hgpo_jax.envs.protocol import (
    INFO,
    BegunTextEnv,
    CompiledEnv,
    OwnPrompts,
    Plans,
    Playable,
    Team,
    TextEnv,
    TextTeam,
    members,
)
from hgpo_jax.utils.errors import one_line

ROLLOUT = members(Playable)  # members that a compiled environment needs to be played
RUNNER = members(CompiledEnv)  # and to be read
OWN = members(OwnPrompts)  # those of an environment with a `prompt` of its own
TEAM = members(Team)  # and of one with several roles
PLANS = members(Plans)  # and of one whose answers have parts
NUMBERS = ("goal_length", "observation_length", "action_length", "max_turns")
STATE = {"task": "the index of the episode's task type"}
TEXT = members(TextEnv)
TEXT_RESET = members(BegunTextEnv, beyond=TextEnv)
TEXT_TEAM = members(TextTeam)
LIMIT = 60.0  # seconds
ONE_ROLE = ("agent",)  # for an environment that declares none


def roles_of(env) -> tuple[str, ...]:
    """Returns the names of an environment's roles. Raises ValueError unless they are distinct words: they name metrics."""
    roles = getattr(env, "roles", ONE_ROLE)
    named = isinstance(roles, tuple | list) and all(isinstance(role, str) and role.isidentifier() for role in roles)
    if not named or not roles or len(set(roles)) < len(roles):
        raise ValueError(f'{type(env).__name__}: roles is {roles!r:.100}; give different words, as in ("searcher", "carrier")')
    return tuple(roles)


def check_compiled(env, members: dict[str, str]) -> None:
    """Raises ValueError, naming class and member, if a compiled environment lacks one of the members or its state one, if a
    numeric member is not a number, or if reset fails."""
    import jax  # text environments are checked in worker processes, which do not need it

    name = type(env).__name__
    for member, more in (("prompt", OWN), ("roles", TEAM), ("answer_parts", PLANS)):
        members = members | (more if hasattr(env, member) else {})
    _check(name, env, members)
    for number in filter(members.__contains__, NUMBERS):
        _check_number(name, env, number)
    roles_of(env)
    try:
        state, _ = jax.eval_shape(lambda: env.reset(jax.random.key(0)))  # this opens no device
    except Exception as error:  # any error of the environment
        raise ValueError(one_line(f"{name}: reset(key) fails with {type(error).__name__}: {error!s:.300}")) from None
    _check(f"{name}: the state of reset(key)", state, STATE)
    if hasattr(env, "answer_parts"):
        parts = env.answer_parts
        counted = isinstance(parts, tuple | list) and len(parts) == 3 and all(isinstance(n, int) and n > 0 for n in parts)
        if not counted or sum(parts) != env.action_length:
            raise ValueError(f"{name}: answer_parts is {parts!r:.100}; give three numbers, {env.action_length} together")
    if hasattr(env, "roles"):
        try:
            shape = jax.eval_shape(env.role, state).shape
        except Exception as error:  # any error of the environment
            raise ValueError(one_line(f"{name}: role(state) fails with {type(error).__name__}: {error}")) from None
        if shape:
            raise ValueError(f"{name}: role(state) has shape {list(shape)}; give a single index into roles, i32[]")


def check_text(env, time_limit: float | None = None) -> None:
    """Raises ValueError, naming class and member, if a text environment lacks something or hangs. Takes a step in task 0.

    time_limit: as in `deadline`.
    """
    name = type(env).__name__
    _check(name, env, TEXT)
    _check_number(name, env, "max_turns")
    roles_of(env)
    with deadline(f"{name}: reset(0)", time_limit):
        try:
            _, commands = env.reset(0)
        except Exception:  # as during play: the error costs only the episodes with this task
            return
    _check(f"{name} after reset(task)", env, TEXT_RESET | (TEXT_TEAM if hasattr(env, "roles") else {}))
    action = commands[0] if commands else ""
    with deadline(f"{name}: step({action!r:.80}) in task 0", time_limit):
        try:
            *_, info = env.step(action)
            missing = [f"{key}: {meaning}" for key, meaning in INFO.items() if key not in info]
        except Exception:
            return
    if missing:
        raise ValueError(f"{name}: the info of step(action) lacks {missing[0]}")


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


def _check_number(name: str, env, member: str) -> None:
    value = getattr(env, member)
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}: {member} is {value!r:.100}; give a whole number above 0")


def _check(name: str, thing, members: dict[str, str]) -> None:
    for member, meaning in members.items():
        if not hasattr(thing, member):
            raise ValueError(f"{name} lacks {member}: {meaning}")
