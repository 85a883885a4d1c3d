"""What an environment must have, so that one which lacks something is refused before anything is compiled or played.

A missing member would otherwise be noticed only where it is first read: in the middle of a trace, or, in a text environment,
as the failure of every single episode.
"""

from __future__ import annotations

TURNS, TYPES = "actions after which an episode ends", "the names of its task types"
ROLLOUT = {  # of a compiled environment, to be played
    "goal_length": "words of a goal",
    "observation_length": "words of an observation",
    "action_length": "words of an action",
    "max_turns": TURNS,
    "reset": "reset(key) -> (state, observation)",
    "step": "step(state, action) -> (state, observation, reward, done, invalid)",
    "goal": "goal(state) -> the words of the task",
    "won": "won(state) -> whether the task is solved",
}
RUNNER = ROLLOUT | {  # and to be read
    "words": "its vocabulary, the empty word first; a word's index is its token id",
    "task_types": TYPES,
    "decode": "decode(ids) -> text, for transcripts",
}
OWN = {  # what an environment with a `prompt` of its own has besides
    "prompt": "prompt(state, goal, observations [K, .], actions [K, .], observation, act) -> (token ids, how many of them)",
    "prompt_slots": "prompt_slots(history_length) -> tokens of the longest prompt",
    "goal_text": "goal_text(observation) -> the task, from an episode's first observation, for transcripts",
}
STATE = {"task": "the index of the episode's task type"}
TEXT = {
    "max_turns": TURNS,
    "task_types": TYPES,
    "reset": "reset(task) -> (observation, commands)",
    "step": "step(action) -> (observation, commands, reward, done, info with won and admissible)",
}
TEXT_RESET = {"goal": "the task as text", "task_type": "the index of the task's type in task_types"}
TEXT_INFO = {"won": "whether the task is solved", "admissible": "whether the last action was one of the commands"}


def check_compiled(env, members: dict[str, str]) -> None:
    """Raises ValueError, naming class and member, where a compiled environment lacks one of the members, or its state one."""
    import jax  # text environments are checked in worker processes, which do not need it

    name = type(env).__name__
    _check(name, env, members | (OWN if hasattr(env, "prompt") else {}))
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
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
        missing = [f"{key}: {meaning}" for key, meaning in TEXT_INFO.items() if key not in info]
    except Exception:
        return
    if missing:
        raise ValueError(f"{name}: the info of step(action) lacks {missing[0]}")


def _check(name: str, thing, members: dict[str, str]) -> None:
    for member, meaning in members.items():
        if not hasattr(thing, member):
            raise ValueError(f"{name} lacks {member}: {meaning}")
