"""The interface of environments: the members that a rollout relies on, and optional ones.

A class needs these members and no base class. `members` lists them with their meanings, so that an incomplete class is
rejected in one line. Letters are those of `hgpo_jax`: O words of an observation, A of an action, K past turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_type_hints, runtime_checkable

if TYPE_CHECKING:  # text environments run in processes that do not need it
    import jax

_MaxTurns = Annotated[int, "actions after which an episode ends"]
_TaskTypes = Annotated[Sequence[str], "the names of its task types"]
_Roles = Annotated[Sequence[str], "the names of its roles"]


class Playable(Protocol):
    """A compiled environment as a rollout plays it: pure JAX functions of one episode, which are mapped over a batch.

    A state is any pytree of arrays with a field `task`, i32[], the index of the episode's task type. Words are token ids, i32,
    and 0 is an empty slot. Everything random comes from the key of `reset`; `step` must also take states of ended episodes.
    """

    goal_length: Annotated[int, "words of a goal"]
    observation_length: Annotated[int, "words of an observation"]
    action_length: Annotated[int, "words of an action"]
    max_turns: _MaxTurns

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """reset(key) -> (state, observation i32[O]): a new episode; equal keys give equal episodes"""
        ...

    def step(self, state: Any, action: jax.Array) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """step(state, action i32[A]) -> (state, observation i32[O], reward f32[], done bool[], invalid bool[])"""
        ...

    def goal(self, state: Any) -> jax.Array:
        """goal(state) -> the words of the task, i32[goal_length]"""
        ...

    def won(self, state: Any) -> jax.Array:
        """won(state) -> whether the task is solved, bool[]"""
        ...


class CompiledEnv(Playable, Protocol):
    """A compiled environment that can also be read, as a training run needs."""

    words: Annotated[Sequence[str], "its vocabulary, the empty word first; a word's index is its token id"]
    task_types: _TaskTypes

    def decode(self, ids: Any) -> str:
        """decode(ids) -> text, for transcripts"""
        ...


def is_compiled(env) -> bool:
    """Whether an environment is meant to be compiled: it has two of the three lengths, of which it may lack one by mistake."""
    return sum(hasattr(env, length) for length in members(Playable) if length.endswith("_length")) > 1


@runtime_checkable
class OwnPrompts(Protocol):
    """Optional for a compiled environment: prompts of its own, of any length up to a bound."""

    def prompt(
        self, state: Any, goal: Any, observations: jax.Array, actions: jax.Array, observation: jax.Array, act: int
    ) -> tuple[jax.Array, jax.Array]:
        """prompt(state, goal, observations [K, O], actions [K, A], observation, act) -> (token ids i32[P], how many of them)"""
        ...

    def prompt_slots(self, history_length: int) -> int:
        """prompt_slots(history_length) -> P, tokens of the longest prompt"""
        ...

    def goal_text(self, observation: Any) -> str:
        """goal_text(observation) -> the task, from an episode's first observation, for transcripts"""
        ...


@runtime_checkable
class Pictured(Playable, Protocol):
    """Optional for a compiled environment: its observations are pictures, for a policy that sees.

    A prompt shows the picture in place of the observation's words, which still tell states apart. So observations must be
    equal exactly where their pictures are.
    """

    picture_size: Annotated[tuple[int, int], "height and width of a picture in pixels"]
    picture_features: Annotated[tuple[int, int], "rows and columns of features that a policy sees in it, a token each"]
    picture_words: Annotated[tuple[int, int, int], "ids of the words before a picture, for each of its features, and after it"]

    def picture(self, observation: jax.Array) -> jax.Array:
        """picture(observation i32[O]) -> the picture, uint8[H, W, 3]"""
        ...


@runtime_checkable
class ListsGames(Protocol):
    """Optional for a compiled environment: a list of games instead of tasks generated from keys."""

    tables: Annotated[Any, "a pytree of arrays, all games; an argument of the compiled program"]

    def start(self, game: jax.Array) -> tuple[Any, jax.Array]:
        """start(game i32[]) -> (state, observation): as reset, of the game with this number"""
        ...

    def bound(self, tables: Any) -> Any:
        """bound(tables) -> the environment with these tables"""
        ...


@runtime_checkable
class Expert(Protocol):
    """Optional for a compiled environment: a scripted player, which the warm start clones. A module with these functions, or
    the environment's own class with these methods (`env` is then `self`)."""

    def expert_action(self, env: Any, state: Any, recent: jax.Array, key: jax.Array) -> jax.Array:
        """expert_action(env, state, recent i32[K, A], key) -> what the expert does, i32[A], after the role's last K actions"""
        ...

    def random_action(self, env: Any, state: Any, key: jax.Array) -> jax.Array:
        """random_action(env, state, key) -> one of the admissible actions, i32[A]"""
        ...


@runtime_checkable
class ListsActions(Protocol):
    """Optional for a compiled environment: what can be done now, as `hgpo_jax.envs.play` lists it and
    `rollout.constrain=admissible` samples it."""

    def admissible(self, state: Any) -> tuple[jax.Array, jax.Array]:
        """admissible(state) -> (which rows are admissible bool[.], their words i32[., A])"""
        ...


@runtime_checkable
class Team(Protocol):
    """Optional for a compiled environment: turns that belong to several roles.

    A role remembers its own turns: a prompt holds the last K of the role that acts next. Whatever it should know
    about the others, the environment must show it. Where roles learn in turns (`method=himac`) the first
    of `roles` must act first.
    """

    roles: _Roles

    def role(self, state: Any) -> jax.Array:
        """role(state) -> whose turn the next one is, an index into roles, i32[]"""
        ...


@runtime_checkable
class TimeLimited(Protocol):
    """Optional for a compiled environment: which ends are due to a time limit, after which a critic's value goes on. By default
    they are those after `max_turns` actions if the task is not won."""

    def truncated(self, state: Any) -> jax.Array:
        """truncated(state) -> whether a time limit, and not the task itself, ended the episode, bool[]"""
        ...


@runtime_checkable
class Signals(Protocol):
    """Optional for a compiled environment: numbers beside the reward (`rollout/signals.py`)."""

    signals: Annotated[Sequence[str], "the names of its signals"]

    def signal_values(self, state: Any) -> jax.Array:
        """signal_values(state) -> the signals of a turn that led to this state, f32[number of signals]"""
        ...


@runtime_checkable
class Plans(Protocol):
    """Optional for a compiled environment: answers that state a subgoal before the action, as `method=hiper` needs.

    The parts follow one another, each in its own words of the A of an action.
    """

    answer_parts: Annotated[Sequence[int], "how many words the switch, subgoal and action parts of an answer have, A together"]

    def switches(self, answer: jax.Array) -> jax.Array:
        """switches(answer i32[A]) -> whether it takes up the subgoal that it names in place of the one before, bool[]"""
        ...


class TextEnv(Protocol):
    """A program on the host that is read and answered in text, one episode at a time, with tasks numbered from 0.

    It must be deterministic, because a worker that takes over an episode replays its actions. An environment with a fixed
    number of tasks has it as its `len`; tasks of others are numbers below 2**64. A class whose parameters include `held_out` is
    made with `held_out=True` to be evaluated, and has other tasks then; else it is evaluated on what it is trained on.
    """

    max_turns: _MaxTurns
    task_types: _TaskTypes

    def reset(self, task: int) -> tuple[str, Sequence[str]]:
        """reset(task) -> (observation, commands): starts a task"""
        ...

    def step(self, action: str) -> tuple[str, Sequence[str], float, bool, dict]:
        """step(action) -> (observation, commands, reward, done, info with won and admissible)"""
        ...


@runtime_checkable
class TextExpert(Protocol):
    """Optional for a text environment: a scripted player, which the warm start clones."""

    def expert(self, history_length: int) -> str:
        """expert(history_length) -> the command that it gives now; a prompt shows that many past turns"""
        ...


class BegunTextEnv(TextEnv, Protocol):
    """A text environment after a reset."""

    goal: Annotated[str, "the task as text"]
    task_type: Annotated[int, "the index of the task's type in task_types"]


class TextTeam(Protocol):
    """Optional for a text environment: turns that belong to several roles, as in `Team`; after a reset."""

    roles: _Roles
    role: Annotated[int, "whose turn the next one is, an index into roles"]


class TextPictured(Protocol):
    """Optional for a text environment: a picture beside each observation, for a language model that sees (Qwen2.5-VL).

    A prompt begins with the picture. States are equal where both the observation and the picture are.
    """

    picture_size: Annotated[tuple[int, int], "height and width of a picture in pixels, the same for all tasks"]
    picture: Annotated[Any, "what is seen now, uint8[H, W, 3], also as a PIL image; after a reset and after each step"]


# The info of a text environment's step. Optional are `score`, a float, by default 1 for a solved task, and `truncated`,
# whether a time limit ended the episode, by default true if `max_turns` actions did not solve the task. An environment with an
# attribute `signals`, names such as ("format", "cost"), also has `signals` here, a dict with a number for each.
INFO = {
    "won": "whether the task is solved, None where nobody can tell",
    "admissible": "whether the last action was one of the commands",
}


def members(protocol: type, beyond: type | None = None) -> dict[str, str]:
    """Returns name -> meaning of a protocol's members, attributes first; only of those that the protocol `beyond` lacks."""
    meanings = {name: hint.__metadata__[0] for name, hint in get_type_hints(protocol, include_extras=True).items()}
    for each in reversed(protocol.__mro__):
        meanings |= {
            name: inspect.cleandoc(value.__doc__ or "")
            for name, value in vars(each).items()
            if inspect.isfunction(value) and not name.startswith("_")
        }
    return {name: meaning for name, meaning in meanings.items() if beyond is None or name not in members(beyond)}
