"""What an environment must have, so that one which lacks something is refused before anything is compiled or played.

A missing member would otherwise be noticed only where it is first read: in the middle of a trace, or, in a text environment,
as the failure of every single episode.
"""

from __future__ import annotations

from hgpo_jax.envs.protocol import INFO, BegunTextEnv, CompiledEnv, OwnPrompts, Playable, TextEnv, members

ROLLOUT = members(Playable)  # of a compiled environment, to be played
RUNNER = members(CompiledEnv)  # and to be read
OWN = members(OwnPrompts)  # what an environment with a `prompt` of its own has besides
STATE = {"task": "the index of the episode's task type"}
TEXT = members(TextEnv)
TEXT_RESET = members(BegunTextEnv, beyond=TextEnv)


def check_compiled(env, members: dict[str, str]) -> None:
    """Raises ValueError, naming class and member, where a compiled environment lacks one of the members, or its state one."""
    import jax  # text environments are checked in worker processes, which do not need it

    name = type(env).__name__
    _check(name, env, members | (OWN if hasattr(env, "prompt") else {}))
    state, _ = jax.eval_shape(lambda: env.reset(jax.random.key(0)))  # opens no device
    _check(f"{name}: the state of reset(key)", state, STATE)


def check_text(env) -> None:
    """Raises ValueError, naming class and member, where a text environment lacks something. Takes one step in task 0."""
    name = type(env).__name__
    _check(name, env, TEXT)
    try:
        _, commands = env.reset(0)
    except Exception:  # as in play: whatever is wrong costs the episodes that have this task
        return
    _check(f"{name} after reset(task)", env, TEXT_RESET)
    try:
        *_, info = env.step(commands[0] if commands else "")
        missing = [f"{key}: {meaning}" for key, meaning in INFO.items() if key not in info]
    except Exception:
        return
    if missing:
        raise ValueError(f"{name}: the info of step(action) lacks {missing[0]}")


def _check(name: str, thing, members: dict[str, str]) -> None:
    for member, meaning in members.items():
        if not hasattr(thing, member):
            raise ValueError(f"{name} lacks {member}: {meaning}")
