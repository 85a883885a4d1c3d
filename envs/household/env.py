"""The household as two pure functions, `reset(key)` and `step(state, action)`, on integer words.

    env = Household()
    state, observation = env.reset(jax.random.key(0))
    state, observation, reward, done, invalid = env.step(state, env.encode("go_to fridge_1"))

One episode at a time; use `jax.vmap` for batches. `world.py` defines rooms, receptacles (some closed), things and task types.
The agent's view is local: the contents of the receptacle where it stands, if that is open, and the confirmation of its last
action. It is not reminded where it has been or, after a while, what it carries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.envs.household import world
from hgpo_jax.envs.vocabulary import Vocabulary

CAPACITY = 3  # things in one receptacle, so that an observation has a fixed width
NORMAL, HOT, COLD, CLEAN = range(4)  # the last treatment of a thing
WON_REWARD = 10.0  # as verl-agent pays for ALFWorld


class State(struct.PyTreeNode):
    """One episode. The place index `Household.places`, one past the last, means "nowhere" (mid-room) or "carried"."""

    room: jax.Array  # i32[], index into Household.rooms
    task: jax.Array  # i32[], index into world.TASKS
    goal_kind: jax.Array  # i32[], kind of the requested thing, index into the room's kinds
    goal_place: jax.Array  # i32[], word of the kind of the requested receptacle (0 for `look`)
    kind: jax.Array  # i32[things], kind of each thing
    copy: jax.Array  # i32[things], 0 or 1: mug_1 or mug_2
    where: jax.Array  # i32[things], receptacle of each thing, `places` when carried
    condition: jax.Array  # i32[things], NORMAL, HOT, COLD or CLEAN
    opened: jax.Array  # bool[places]
    at: jax.Array  # i32[], the agent's receptacle, `places` in the middle of the room
    lamp_on: jax.Array  # bool[]
    turn: jax.Array  # i32[], actions taken


class Household(Vocabulary):
    """A family of households.

    Args:
      tasks: task types to draw from, names of `world.TASKS`.
      rooms: rooms to draw from, names of `world.ROOMS`; a task type only uses the rooms that suit it.
      places: receptacles per room, 6 to 12.
      things: things per room, 2 to 8.
      max_turns: actions after which the episode ends.
      milestones: give the signal `milestones`, how many predicates of the goal hold after a turn.

    Raises:
      ValueError: an unknown name, a number out of range, or a task type with no suitable room.
    """

    task_types = tuple(world.TASKS)
    observation_length = 3 + CAPACITY
    goal_length = 4
    action_length = 2

    def __init__(self, tasks=("place",), rooms=("kitchen",), places=6, things=4, max_turns=20, milestones=False):
        for field, choice, options in (("tasks", tasks, world.TASKS), ("rooms", rooms, world.ROOMS)):
            names = list(choice) if isinstance(choice, list | tuple) else []
            if not names or any(name not in list(options) for name in names) or len(set(names)) != len(names):
                raise ValueError(f"{field}={names or choice!r}: list one or more of {', '.join(options)}, each once")
        sizes = (("places", places, 6, 12), ("things", things, 2, 8), ("max_turns", max_turns, 1, 1000))
        for field, value, low, high in sizes:
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or not low <= value <= high:
                raise ValueError(f"{field}={value!r}: must be a whole number between {low} and {high}")
        self.tasks, self.rooms = tuple(tasks), tuple(rooms)
        self.places, self.things, self.max_turns = places, things, max_turns
        self.signals = ("milestones",) if milestones else ()
        settings = [[(world.TASK_ID[t], r) for r, room in enumerate(rooms) if room in world.TASKS[t]] for t in tasks]
        for task, pairs in zip(tasks, settings, strict=True):
            if not pairs:
                raise ValueError(f"rooms={list(rooms)}: task {task!r} needs one of {', '.join(world.TASKS[task])}")
        # A task type is drawn first, then one of its rooms.
        self._settings = np.array([pair for pairs in settings for pair in pairs], np.int32)
        chances = [1 / len(pairs) / len(tasks) for pairs in settings for _ in pairs]
        self._settings_logp = np.log(chances, dtype=np.float32)
        self.words = world.vocabulary(self.rooms, places)
        self._tabulate()

    def _tabulate(self):
        """Makes the lookup tables of `step`, as arrays indexed by room."""
        w = self.word_id
        names = [world.ROOMS[room][: self.places] for room in self.rooms]
        kind_of = lambda name: name.rsplit("_", 1)[0]  # noqa: E731
        index = lambda row, name: row.index(name) if name in row else -1  # noqa: E731
        self._place_word = np.array([[w[n] for n in row] for row in names], np.int32)
        self._place_kind = np.array([[w[kind_of(n)] for n in row] for row in names], np.int32)
        self._openable = np.array([[kind_of(n) in world.OPENABLE for n in row] for row in names])
        # [room, heat/cool/clean] and [room]: the receptacle that has the tool, -1 where the room has none.
        self._tool_at = np.array([[index(row, tool) for tool in world.TOOL.values()] for row in names], np.int32)
        self._lamp_at = np.array(
            [index(row, world.LAMP_AT.get(room)) for room, row in zip(self.rooms, names, strict=True)], np.int32
        )
        kinds = [world.KINDS[room] for room in self.rooms]
        self._kind_word = np.array([[w[k] for k in row] for row in kinds], np.int32)
        self._thing_word = np.array(
            [[[w[f"{k}_{n + 1}"] for n in range(world.COPIES)] for k in row] for row in kinds], np.int32
        )
        self._affords = np.array([world.affordances(row) for row in kinds])
        self._verb_word = np.array([w[verb] for verb in world.VERBS], np.int32)
        self._task_word = np.array([w[word] for word in world.TASK_WORDS], np.int32)

    # -- words --------------------------------------------------------------------------------------------------

    def goal(self, state: State) -> jax.Array:
        """Returns the room, the task, the kind of thing and the kind of receptacle, i32[4]."""
        room_words = jnp.array([self.word_id[room] for room in self.rooms])
        kind = jnp.asarray(self._kind_word)[state.room, state.goal_kind]
        return jnp.stack([room_words[state.room], jnp.asarray(self._task_word)[state.task], kind, state.goal_place])

    def thing_words(self, state: State) -> jax.Array:
        """Returns the name of each thing, i32[things]."""
        return jnp.asarray(self._thing_word)[state.room, state.kind, state.copy]

    def place_words(self, state: State) -> jax.Array:
        """Returns the name of each receptacle, i32[places]."""
        return jnp.asarray(self._place_word)[state.room]

    # -- facts about a state ------------------------------------------------------------------------------------

    def accessible(self, state: State) -> jax.Array:
        """Marks the receptacles that are open or cannot be closed, bool[places]."""
        return state.opened | ~jnp.asarray(self._openable)[state.room]

    def won(self, state: State) -> jax.Array:
        """Whether the task is fulfilled, bool[]."""
        fit, placed = self._fit(state), self._placed(state)
        count = jnp.where(state.task == world.TASK_ID["two"], 2, 1)
        examined = state.lamp_on & (state.at == self._lamp(state)) & (fit & (state.where == self.places)).any()
        return jnp.where(state.task == world.TASK_ID["look"], examined, (placed.sum(0) >= count).any())

    def signal_values(self, state: State) -> jax.Array:
        """Counts the predicates of the goal that hold, f32[1].

        A wanted thing was picked up: it is carried, in its place, or treated as wanted. It is treated, if it has to be. Of two
        wanted things, one is in its place, and the other one is then carried. The task is fulfilled.
        """
        carried = ((state.kind == state.goal_kind) & (state.where == self.places)).any()
        treated = (self._needed(state) >= 0) & self._fit(state).any()
        placed, won = self._placed(state).any(), self.won(state)
        one_of_two = (state.task == world.TASK_ID["two"]) & placed
        predicates = [carried | placed | treated, treated, one_of_two, one_of_two & (carried | won), won]
        return jnp.stack(predicates).sum(dtype=jnp.float32)[None]

    def _needed(self, state):
        """Returns the wanted treatment, -1 for none, i32[]."""
        return jnp.array([-1, -1, -1, CLEAN, HOT, COLD])[state.task]  # by task id

    def _fit(self, state):
        """Marks the wanted things that are treated as the goal says, bool[things]."""
        needed = self._needed(state)
        return (state.kind == state.goal_kind) & ((needed < 0) | (state.condition == needed))

    def _placed(self, state):
        """Marks where such things are in a wanted place, bool[things, places]."""
        is_goal_place = jnp.asarray(self._place_kind)[state.room] == state.goal_place
        return self._fit(state)[:, None] & (state.where[:, None] == jnp.arange(self.places)) & is_goal_place

    def _lamp(self, state):
        return jnp.asarray(self._lamp_at)[state.room]

    def admissible(self, state: State) -> tuple[jax.Array, jax.Array]:
        """Returns the effective actions: (bool[actions], i32[actions, 2] words); illegal rows may repeat or be partial."""
        places, things = self.places, self.things
        here = jnp.arange(places) == state.at
        openable = jnp.asarray(self._openable)[state.room]
        reach = jnp.append(self.accessible(state), False)[state.at]  # the contents here can be touched
        carried = state.where == places
        occupancy = (state.where[:, None] == jnp.arange(places)).sum(0)
        room_here = jnp.append(occupancy < CAPACITY, False)[state.at]
        tools = jnp.asarray(self._tool_at)[state.room] == state.at  # heat, cool, clean
        can = jnp.asarray(self._affords)[state.room][:, state.kind]  # [tasks, things]
        able = jnp.stack([can[world.TASK_ID[name]] for name in ("heat", "cool", "clean")])
        legal = jnp.concatenate(
            [
                ~here,
                here & openable & ~state.opened,
                here & openable & state.opened,
                (state.where == state.at) & reach & ~carried.any(),
                carried & reach & room_here,
                (carried & able & tools[:, None]).ravel(),
                (state.at == self._lamp(state))[None],
                jnp.array([True, True]),
            ]
        )
        place_words, thing_words = self.place_words(state), self.thing_words(state)
        arguments = jnp.concatenate(
            [*[place_words] * 3, *[thing_words] * 5, jnp.array([self.word_id[world.LAMP], 0, 0], jnp.int32)]
        )
        sizes = [*[places] * 3, *[things] * 5, 1, 1, 1]
        verbs = jnp.asarray(np.repeat(self._verb_word, sizes))
        return legal, jnp.stack([verbs, arguments], axis=1)

    # -- the two functions --------------------------------------------------------------------------------------

    def reset(self, key: jax.Array) -> tuple[State, jax.Array]:
        """Starts a new episode from a key: (State, observation i32[6]). Equal keys give equal episodes."""
        places, things = self.places, self.things
        keys = jax.random.split(key, 4)
        task, room = jnp.asarray(self._settings)[jax.random.categorical(keys[0], jnp.asarray(self._settings_logp))]
        # Distinct kinds, the first of which suits the task; for "two" the second thing repeats the first's kind.
        n_kinds = self._kind_word.shape[1]
        suits = jnp.asarray(self._affords)[room, task]
        score = jax.random.uniform(keys[1], (n_kinds,))
        first = jnp.argmax(score + suits)
        kind = jnp.argsort(-score.at[first].set(2.0))[:things].astype(jnp.int32)
        twin = task == world.TASK_ID["two"]
        kind = kind.at[1].set(jnp.where(twin, kind[0], kind[1]))
        copy = jnp.zeros(things, jnp.int32).at[1].set(twin.astype(jnp.int32))
        where = (jax.random.permutation(keys[2], places * CAPACITY)[:things] // CAPACITY).astype(jnp.int32)
        # The goal receptacle: of a kind that holds none of the wanted things, with space left for them.
        place_kind = jnp.asarray(self._place_kind)[room]
        holds = ((where[:, None] == jnp.arange(places)) & (kind == kind[0])[:, None]).any(0)
        excluded = ((place_kind[:, None] == place_kind) & holds).any(1)
        occupancy = (where[:, None] == jnp.arange(places)).sum(0)
        fits = ~excluded & (occupancy + jnp.where(twin, 2, 1) <= CAPACITY)
        goal = jnp.argmax(jax.random.uniform(keys[3], (places,)) + fits)
        state = State(
            room=room,
            task=task,
            goal_kind=kind[0],
            goal_place=jnp.where(task == world.TASK_ID["look"], 0, place_kind[goal]).astype(jnp.int32),
            kind=kind,
            copy=copy,
            where=where,
            condition=jnp.zeros(things, jnp.int32),
            opened=jnp.zeros(places, bool),
            at=jnp.int32(places),
            lamp_on=jnp.array(False),
            turn=jnp.int32(0),
        )
        return state, self._middle(state)

    def step(self, state: State, action: jax.Array):
        """Performs one action.

        Args:
          state: the episode.
          action: i32[2], a verb and its argument (0 where there is none).

        Returns:
          (State, observation i32[6], reward f32[] 10 on success else 0, done bool[], invalid bool[]). An inadmissible action
          only takes a turn, shows "nothing_happens" and is invalid. Done: solved, or out of turns.
        """
        places = self.places
        legal, words = self.admissible(state)
        index = jnp.argmax(legal & (words == action).all(1))
        invalid = ~(legal[index] & (words[index] == action).all())
        verb = jnp.where(invalid, -1, jnp.argmax(jnp.asarray(self._verb_word) == action[0]))
        does = {name: verb == number for name, number in world.VERB_ID.items()}
        place = jnp.argmax(self.place_words(state) == action[1])
        is_place, is_thing = jnp.arange(places) == place, self.thing_words(state) == action[1]
        condition = jnp.where(is_thing & does["heat"], HOT, state.condition)
        condition = jnp.where(is_thing & does["cool"], COLD, condition)
        condition = jnp.where(is_thing & does["clean"], CLEAN, condition)
        where = jnp.where(is_thing & does["take"], places, state.where)
        where = jnp.where(is_thing & does["put"], state.at, where)
        after = state.replace(
            where=where,
            condition=condition,
            opened=(state.opened | (is_place & does["open"])) & ~(is_place & does["close"]),
            at=jnp.where(does["go_to"], place, state.at).astype(jnp.int32),
            lamp_on=state.lamp_on | does["use"],
            turn=state.turn + 1,
        )
        won = self.won(after)
        done = won | (after.turn >= self.max_turns)
        return after, self._observe(after, does, action[1], invalid), WON_REWARD * won, done, invalid

    # -- what the agent sees ------------------------------------------------------------------------------------

    def _row(self, *words):
        """Puts words (names, ids or arrays of ids) into the slots of an observation; the rest is empty."""
        ids = [jnp.atleast_1d(jnp.int32(self.word_id[w]) if isinstance(w, str) else w) for w in words]
        row = jnp.concatenate(ids).astype(jnp.int32)
        return jnp.pad(row, (0, self.observation_length - row.shape[0]))

    def _middle(self, state):
        room_words = jnp.array([self.word_id[room] for room in self.rooms])
        return self._row("you_are_in_the_middle_of_the", room_words[state.room])

    def _observe(self, state, does, argument, invalid):
        word = self.word_id
        things = self.thing_words(state)
        here = jnp.append(self.place_words(state), 0)[state.at]
        present = (state.where == state.at) & (state.at < self.places)
        slot = jnp.where(present, jnp.cumsum(present) - 1, CAPACITY)
        contents = jnp.where(slot[:, None] == jnp.arange(CAPACITY), things[:, None], 0).sum(0)
        closed = ~jnp.append(self.accessible(state), True)[state.at]
        listing = jnp.where(present.any(), word["you_see"], word["you_see_nothing"])
        status = jnp.where(closed, word["it_is_closed"], listing)
        contents = jnp.where(closed, 0, contents)
        arrive = jnp.where(does["open"], word["you_open"], word["you_arrive_at"])
        arrive = jnp.where(does["look"], word["you_are_facing"], arrive)
        view = self._row(arrive, here, status, contents)
        view = jnp.where(does["look"] & (state.at == self.places), self._middle(state), view)
        # Confirmations name the thing, then the place.
        phrase = jnp.select(
            [does[v] for v in ("take", "put", "heat", "cool", "clean")],
            [word[f"you_{v}"] for v in ("pick_up", "put", "heat", "cool", "clean")],
        )
        link = jnp.select([does["take"], does["put"]], [word["from"], word["in"]], word["using"])
        confirm = self._row(phrase, argument, link, here)
        carried = state.where == self.places
        quality = jnp.array([0, word["hot"], word["cold"], word["clean_now"]])[(state.condition * carried).sum()]
        inventory = self._row(
            jnp.where(carried.any(), word["you_carry"], word["you_carry_nothing"]), quality, (things * carried).sum()
        )
        rows = [
            (invalid, self._row("nothing_happens")),
            (does["go_to"] | does["open"] | does["look"], view),
            (does["close"], self._row("you_close", argument)),
            (does["use"], self._row("you_turn_on", argument)),
            (does["inventory"], inventory),
        ]
        return jnp.select([c for c, _ in rows], [r for _, r in rows], confirm)


class Variant(Vocabulary):
    """A base for environments in which a household is part of a larger state, `state.house`; `house` is the `Household`."""

    task_types, goal_length = Household.task_types, Household.goal_length
    house: Household

    def goal(self, state) -> jax.Array:
        """Returns the room, the task, the kind of thing and the kind of receptacle, i32[4], the same for all roles."""
        return self.house.goal(state.house)

    def won(self, state) -> jax.Array:
        """Whether the task is fulfilled, bool[]."""
        return self.house.won(state.house)
