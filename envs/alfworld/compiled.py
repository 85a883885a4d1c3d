"""ALFWorld's games as two pure functions, `reset(key)` and `step(state, action)`, on integer words (`phrases.py`).

    env = CompiledAlfworld(compile_games(paths))
    state, observation = env.start(3)
    state, observation, reward, done, invalid = env.step(state, env.encode("take pen 2 from desk 1"))
    env.decode(observation)  # "You pick up the pen 2 from the desk 1."

One episode at a time; use `jax.vmap` for batches, whose episodes may play different games. Observations, admissible commands
and wins equal those of `game.py` exactly. Some quirks of the domain follow from its rules: only a held thing can be examined;
one cannot go to a place at one's own location; a thing can be in several places at once; beside a place one sees things that
were once taken out of it and have been at the same location since.
"""

from __future__ import annotations

import copy
import hashlib
import re
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.envs.alfworld import bits
from hgpo_jax.envs.alfworld.compiled_commands import Layout, admissible
from hgpo_jax.envs.alfworld.compiled_observations import Deed, tell
from hgpo_jax.envs.alfworld.dataset import TASK_TYPES
from hgpo_jax.envs.alfworld.game import WON_REWARD
from hgpo_jax.envs.alfworld.game_file import CAN, MARKS, PLACE_CAN
from hgpo_jax.envs.alfworld.phrases import ID, LINKS, VERBS, command, join
from hgpo_jax.envs.alfworld.tables import Games, Tables
from hgpo_jax.envs.alfworld.usual_places import kinds_of, search_order

NOTHING = -1  # value for empty hands


class State(struct.PyTreeNode):
    """One episode. O things in W words of bits, R places, L locations and the one at the start; see `tables.Games`."""

    game: jax.Array  # i32[], number of the game
    task: jax.Array  # i32[], index into CompiledAlfworld.task_types
    at: jax.Array  # i32[], the agent's location
    held: jax.Array  # i32[], the thing in the agent's hands, or -1
    opened: jax.Array  # bool[R]
    inside: jax.Array  # u32[R, W], things in each place
    removals: jax.Array  # u32[R, W], things that were taken out of a place and not put back into it
    lying: jax.Array  # u32[L + 1, W], things at each location
    marks: jax.Array  # u32[5, W], things that are clean, hot, cool, sliced, toggled
    turn: jax.Array  # i32[], actions taken


class CompiledAlfworld:
    """A list of games.

    Args:
      tables: from `compile_games`.
      max_turns: actions after which an episode ends; observations are complete up to there.

    Attributes:
      words: text of each word id; 0 is the empty slot.
      observation_length, goal_length, action_length: words of an observation, a task and an action.
      commands: maximum number of admissible commands.
    """

    task_types = (*TASK_TYPES, "unknown")
    action_length = 3

    def __init__(self, tables: Tables, max_turns: int = 50):
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be at least 1")
        self.words, self.max_turns = tables.words, max_turns
        games = tables.games
        self.things, self.places, self.nearby = games.thing_word.shape[1], games.place_word.shape[1], games.here.shape[2]
        self.goal_length, self.commands = games.goal.shape[1], int(games.commands.max())
        # The longest list: things that lay in a place and things brought there, or things that were taken and put down beside
        # it; each takes two turns.
        brought = max_turns // 2
        self.listed = max(min(int(games.contents.max()) + brought, self.things), min(int(games.pairs.max()), brought))
        self.sentence = max(5, 2 * self.nearby + 1)  # words before a list
        self.observation_length = max(self.sentence + 3 * self.listed, games.intro.shape[1])
        self._games = games
        self._bound: dict[str, Any] | None = None
        self._arrays: dict[tuple, Any] = {}
        self.layout = Layout(games)

    @property
    def games(self) -> Games:
        """The tables as arrays on the device, shared by all episodes."""
        return self._on_device("games")

    @property
    def by_name(self) -> dict[str, jax.Array]:
        """The fields of `Layout.by_name`."""
        return self._on_device("by_name")

    @property
    def search_order(self) -> jax.Array:
        """`usual_places.search_order` of these games. It may be replaced by that of other games with the same words."""
        return self._on_device("search_order")

    @search_order.setter
    def search_order(self, order) -> None:
        self.tables["search_order"], self._arrays = np.asarray(order), {}

    @property
    def kind_of_word(self) -> jax.Array:
        """i32[V], the row of `search_order` for a word that is a name, else -1."""
        return self._on_device("kind_of_word")

    @cached_property
    def tables(self) -> dict[str, Any]:
        """All arrays about the games, in NumPy: the argument of programs that should not contain any game (`bound`)."""
        order, kinds = search_order(self.words, self._games), kinds_of(self.words)[1]
        return {"games": self._games, "by_name": self.layout.by_name, "search_order": order, "kind_of_word": kinds}

    def bound(self, tables: dict[str, Any]) -> CompiledAlfworld:
        """Returns a copy with other arrays, such as the traced ones of `tables` in a program that takes them as an argument."""
        other = copy.copy(self)
        other._bound = tables
        return other

    @cached_property
    def digest(self) -> str:
        """A digest of all words and games, in hexadecimal digits."""
        parts = ["\0".join(self.words).encode(), *(array.tobytes() for _, array in sorted(vars(self._games).items()))]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def _on_device(self, name: str):
        """Returns one of `tables`; constants if none were bound, which different meshes cannot share."""
        if self._bound is not None:
            return self._bound[name]
        key = name, jax.sharding.get_abstract_mesh()
        if key not in self._arrays:
            with jax.ensure_compile_time_eval():
                self._arrays[key] = jax.tree.map(jnp.asarray, self.tables[name])
        return self._arrays[key]

    def __len__(self) -> int:
        return len(self._games.task)

    # -- words --------------------------------------------------------------------------------------------------

    @cached_property
    def word_id(self) -> dict[str, int]:
        """Word -> token id."""
        return {word: index for index, word in enumerate(self.words)}

    def encode(self, text: str) -> np.ndarray:
        """Encodes a command's words as i32[3]; text that is not a verb with names becomes -1, which no action has."""
        text, unknown = text.strip(), np.full(self.action_length, -1, np.int32)
        verb = next((verb for verb in VERBS if text == verb or text.startswith(f"{verb} ")), None)
        if verb is None:
            return unknown
        rest = text[len(verb) :]
        arguments = re.split(f"{LINKS[verb]}(?= )", rest) if verb in LINKS else [rest]  # " tomato 1" begins with " to"
        ids = [self.word_id[verb], *(self.word_id.get(name, -1) for name in arguments if rest)]
        if len(ids) > self.action_length or command(self.words, ids) != text:
            return unknown
        return np.array(ids + [0] * (self.action_length - len(ids)), np.int32)

    def decode(self, ids) -> str:
        """Decodes the text of an observation or a task."""
        return join(self.words, np.asarray(ids).ravel())

    def command(self, ids) -> str:
        """Returns the text of an action."""
        return command(self.words, np.asarray(ids).tolist())

    def goal(self, state: State) -> jax.Array:
        """Returns the task, as the first observation states it, i32[goal_length]."""
        return self.games.goal[state.game].astype(jnp.int32)

    def goal_of(self, game: int) -> str:
        """Returns the text of a game's task."""
        return self.decode(self._games.goal[game])

    # -- the game -----------------------------------------------------------------------------------------------

    def reset(self, key: jax.Array) -> tuple[State, jax.Array]:
        """Starts an episode of a game drawn from a key: (State, observation i32[observation_length])."""
        return self.start(jax.random.randint(key, (), 0, len(self)))

    def start(self, game) -> tuple[State, jax.Array]:
        """Starts an episode of this game, i32[]: (State, observation i32[observation_length])."""
        games, game = self.games, jnp.asarray(game, jnp.int32)
        state = State(
            game=game,
            task=games.task[game].astype(jnp.int32),
            at=jnp.int32(games.lying.shape[1] - 1),
            held=jnp.int32(NOTHING),
            opened=games.opened[game],
            inside=games.inside[game],
            removals=jnp.zeros_like(games.inside[game]),
            lying=games.lying[game],
            marks=games.marks[game],
            turn=jnp.int32(0),
        )
        intro = games.intro[game].astype(jnp.int32)
        return state, jnp.pad(intro, (0, self.observation_length - intro.shape[0]))

    def step(self, state: State, action: jax.Array):
        """Performs one action.

        Args:
          state: the episode.
          action: i32[3], words of a verb and its arguments, 0 where there is none.

        Returns:
          (State, observation i32[observation_length], reward f32[] 10 when the task is fulfilled else 0, done bool[],
          invalid bool[]). An inadmissible action changes nothing, shows "Nothing happens." and is invalid.
        """
        deed = self._deed(state, action)
        does, thing, place, W = deed.does, deed.thing, deed.place, state.inside.shape[1]
        one = bits.single(thing, W)
        there = jnp.where(jnp.arange(self.places)[:, None] == place, one, jnp.uint32(0))
        around = jnp.where(jnp.arange(state.lying.shape[0])[:, None] == state.at, one, jnp.uint32(0))
        take, put = does["take"], does["move"] | does["put"]

        def changed(sets, some, gain, lose):
            return jnp.where(gain, sets | some, jnp.where(lose, sets & ~some, sets))

        hot, cool = does["heat"], does["cool"]
        never = jnp.array(False)
        gain = jnp.stack([does["clean"], hot, cool, does["slice"], does["use"]])[:, None]
        lose = jnp.stack([never, cool, hot, never, never])[:, None]
        is_place = jnp.arange(self.places) == place
        after = state.replace(
            at=jnp.where(does["go to"], self.games.location[state.game, place], state.at).astype(jnp.int32),
            held=jnp.where(take, thing, jnp.where(put, NOTHING, state.held)).astype(jnp.int32),
            opened=(state.opened | (is_place & does["open"])) & ~(is_place & does["close"]),
            inside=changed(state.inside, there, put, take),
            removals=changed(state.removals, there, take, put),
            lying=changed(state.lying, around, put, take),
            marks=changed(state.marks, one, gain, lose),
            turn=state.turn + 1,
        )
        won = self.won(after)
        done = won | (after.turn >= self.max_turns)
        return after, tell(self, after, deed), WON_REWARD * won, done, deed.invalid

    def won(self, state: State) -> jax.Array:
        """Whether the task is fulfilled, bool[]."""
        games, game = self.games, state.game
        goal_things, mark = games.wanted[game], games.mark[game]
        fit = goal_things & jnp.where(mark < 0, ~jnp.uint32(0), state.marks[mark])
        count = jax.lax.population_count(state.inside & fit).sum(1)
        placed = (games.target[game] & (count >= games.count[game])).any()
        lit = games.lamp[game] & state.marks[MARKS.index("istoggled")]
        here = games.here[game, state.at]
        by_lamp = (here >= 0) & ((state.inside[here] & lit) != 0).any(1)
        holds = (state.held >= 0) & bits.test(goal_things, state.held)
        return placed | (by_lamp.any() & holds)

    def open_here(self, state: State, place) -> jax.Array:
        """Whether one can reach into these places i32[...], if one is there, bool[...]."""
        return state.opened[place] | ~self.games.place_can[state.game, PLACE_CAN.index("openable"), place]

    def _deed(self, state: State, action) -> Deed:
        """Describes the effect of an action in this state."""
        games, game, held = self.games, state.game, state.held
        verb, first, second = action
        is_word = (action >= 0) & (action < len(self.words))
        entity = games.entity[game, jnp.where(is_word, action, 0)].astype(jnp.int32)
        _, x, y = jnp.where(is_word, entity, -1)
        is_thing, is_place = (x >= 0) & (x < self.things), x >= self.things
        alone = second == 0
        pair = is_thing & (y >= self.things)
        thing = jnp.clip(x, 0, self.things - 1)
        place = jnp.clip(jnp.where(is_place, x, y) - self.things, 0, self.places - 1)

        here = games.location[game, place] == state.at
        reach = here & self.open_here(state, place)
        openable, cleans, heats, cools = games.place_can[game, :, place] & here
        can = dict(zip(CAN, bits.tests(games.can[game], thing), strict=True))
        holds = held == thing
        there = bits.test(state.inside[place], thing)
        nearby = games.here[game, state.at]
        usable = ((nearby >= 0) & bits.tests(state.inside[nearby], thing)).any()
        puts = pair & holds & reach & bits.test(games.accepts[game, place], thing)
        knife = bits.test(games.can[game, CAN.index("knife")], held) & (held >= 0) & (y == held)
        opened = state.opened[place]
        legal = {
            "clean": pair & holds & cleans & can["cleanable"],
            "close": is_place & alone & openable & opened,
            "cool": pair & holds & cools & can["coolable"],
            "examine": alone & ((is_place & here) | (is_thing & holds)),
            "go to": is_place & alone & ~here,
            "heat": pair & holds & heats & can["heatable"],
            "help": (first == 0) & alone & games.helps[game],
            "inventory": (first == 0) & alone,
            "look": (first == 0) & alone,
            "move": puts & games.moves[game],
            "open": is_place & alone & openable & ~opened,
            "put": puts & ~games.moves[game],
            "slice": is_thing & knife & can["sliceable"] & bits.test(state.lying[state.at], thing),
            "take": pair & reach & there & (held < 0) & can["pickupable"],
            "use": is_thing & alone & can["toggleable"] & usable,
        }
        does = {name: legal[name] & (verb == number) for number, name in enumerate(VERBS, 1)}
        invalid = ~jnp.stack(list(does.values())).any()
        words = {"first": first, "second": second}
        return Deed(does=does, invalid=invalid, thing=thing, place=place, container=can["isreceptacleobject"], **words)

    # -- commands -----------------------------------------------------------------------------------------------

    def admissible(self, state: State) -> tuple[jax.Array, jax.Array]:
        """Lists the admissible commands in the engine's order: (bool[commands] which rows hold one, i32[commands, 3] words)."""
        return admissible(self, state)

    def choices(self, state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Lists these as texts and as actions: (i32[commands, 4] words that spell the command, i32[commands, 3], bool[commands]
        whether agents see it, as they do all but `help`); 0 if there are fewer."""
        filled, rows = self.admissible(state)
        verb, first, second = rows.T
        link = jnp.where(second > 0, jnp.asarray(self._links)[verb], 0)
        return jnp.stack([verb, first, link, second], 1), rows, filled & (verb != ID["help"])

    @cached_property
    def _links(self) -> np.ndarray:
        """Returns the word between a verb's arguments, 0 if it has none, i32[1 + verbs]."""
        return np.array([0, *(self.word_id[LINKS[verb]] if verb in LINKS else 0 for verb in VERBS)], np.int32)
