"""The household for two: a searcher that sees where things are and a carrier that acts, taking turns.

    env = HouseholdTeam()
    state, observation = env.reset(jax.random.key(0))                        # the searcher's: which thing lies where
    state, observation, *_ = env.step(state, env.encode("fridge_1"))         # it says so; the carrier's observation
    state, observation, *_ = env.step(state, env.encode("go_to fridge_1"))

The searcher cannot move, and the carrier sees only the observation of the household's agent and the last place that the
searcher named. The searcher speaks before every `CARRIER_TURNS` turns of the carrier. Both share the reward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.envs.household import expert, world
from hgpo_jax.envs.household.env import WON_REWARD, Household, State, Variant

SEARCHER, CARRIER = range(2)
CARRIER_TURNS = 4  # between two of the searcher's turns


class TeamState(struct.PyTreeNode):
    """One episode."""

    house: State
    task: jax.Array  # i32[], the house's
    hint: jax.Array  # i32[], word of the place that the searcher named last, 0 before
    observation: jax.Array  # i32[6], the carrier's last observation of the house
    turn: jax.Array  # i32[], turns of both


class HouseholdTeam(Variant):
    """A family of households for two; arguments and errors are those of `Household`, `max_turns` counts both roles' turns.

    Words are the household's and the names of the roles. An observation begins with the role that it is for.
    """

    roles = ("searcher", "carrier")
    action_length = Household.action_length

    def __init__(self, tasks=("place",), rooms=("kitchen",), places=6, things=4, max_turns=20):
        self.house = Household(tasks, rooms, places, things, max_turns)
        self.max_turns, self.words = max_turns, (*self.house.words, *self.roles)
        self.observation_length = 1 + max(1 + self.house.observation_length, 2 * things)
        self._role_word = np.arange(len(self.house.words), len(self.words), dtype=np.int32)

    # -- words --------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> np.ndarray:
        """Encodes an action's words as i32[2], as `Household.encode` does."""
        return self.house.encode(text)

    # -- facts about a state ------------------------------------------------------------------------------------

    def role(self, state: TeamState) -> jax.Array:
        """Returns the role that acts next, i32[], SEARCHER or CARRIER."""
        return jnp.where(state.turn % (1 + CARRIER_TURNS) == 0, SEARCHER, CARRIER)

    def admissible(self, state: TeamState) -> tuple[jax.Array, jax.Array]:
        """Returns the possible actions: (bool[actions], i32[actions, 2] words). The searcher names any place of the room."""
        searches = self.role(state) == SEARCHER
        names = jnp.pad(self.house.place_words(state.house)[:, None], ((0, 0), (0, 1)))
        legal, words = self.house.admissible(state.house)
        can_name = jnp.broadcast_to(searches, names.shape[:1])
        return jnp.concatenate([can_name, legal & ~searches]), jnp.concatenate([names, words])

    # -- the two functions --------------------------------------------------------------------------------------

    def reset(self, key: jax.Array) -> tuple[TeamState, jax.Array]:
        """Starts a new episode from a key: (TeamState, the searcher's observation i32[O])."""
        house, observation = self.house.reset(key)
        state = TeamState(house=house, task=house.task, hint=jnp.int32(0), observation=observation, turn=jnp.int32(0))
        return state, self._observe(state)

    def step(self, state: TeamState, action: jax.Array):
        """Performs one action i32[2] of the role that acts next.

        Returns:
          (TeamState, the next role's observation i32[O], reward f32[] 10 on success else 0, done bool[], invalid bool[]). A
          searcher that names no place of the room is invalid and changes nothing; the carrier is as in `Household.step`.
        """
        searches = self.role(state) == SEARCHER
        named = (self.house.place_words(state.house) == action[0]).any() & (action[1] == 0)
        house, observation, _, _, refused = self.house.step(state.house, action)
        keep = lambda old, new: jax.tree.map(lambda a, b: jnp.where(searches, a, b), old, new)  # noqa: E731
        after = state.replace(
            house=keep(state.house, house),
            observation=keep(state.observation, observation),
            hint=jnp.where(searches & named, action[0], state.hint),
            turn=state.turn + 1,
        )
        won = self.won(after)
        done = won | (after.turn >= self.max_turns)
        return after, self._observe(after), WON_REWARD * won, done, jnp.where(searches, ~named, refused)

    # -- what is seen -------------------------------------------------------------------------------------------

    def _observe(self, state: TeamState) -> jax.Array:
        """Returns the acting role's view, i32[O]: its name; then each thing and its place, or the hint and the house."""
        house, role = state.house, self.role(state)
        places = jnp.append(self.house.place_words(house), self._role_word[CARRIER])  # carried things are at the carrier
        things = self.house.thing_words(house)
        order = jnp.argsort(things)  # the wanted one would come first
        listed = jnp.stack([things, places[house.where]], axis=1)[order].ravel()
        local = jnp.concatenate([state.hint[None], state.observation])
        width = self.observation_length - 1
        body = jnp.where(role == SEARCHER, _padded(listed, width), _padded(local, width))
        return jnp.concatenate([jnp.asarray(self._role_word)[role][None], body])

    # -- two scripted players -----------------------------------------------------------------------------------

    def expert_action(self, state: TeamState, recent: jax.Array, key: jax.Array) -> jax.Array:
        """Returns an action, i32[2]: the searcher names the next important place; the carrier, a local expert, searches there.

        recent: i32[K, 2], the last K actions of the same role.
        """
        named = jnp.stack([self._next_place(state.house), 0])
        acted = expert.expert_action(self.house, state.house, recent, key, state.hint)
        return jnp.where(self.role(state) == SEARCHER, named, acted)

    def random_action(self, state: TeamState, key: jax.Array) -> jax.Array:
        """Returns one of the admissible actions, all equally likely, i32[2]."""
        legal, words = self.admissible(state)
        return words[jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))]

    def _next_place(self, house: State) -> jax.Array:
        """Returns the place, i32[], of a wanted thing still to be fetched or, while one is carried, its destination."""
        rooms, goal_things = self.house, house.kind == house.goal_kind
        looks = house.task == world.TASK_ID["look"]
        is_goal = jnp.asarray(rooms._place_kind)[house.room] == house.goal_place
        goal = jnp.where(looks, jnp.asarray(rooms._lamp_at)[house.room], jnp.argmax(is_goal))
        lies = goal_things & (house.where < rooms.places)
        to_fetch = lies & ~jnp.append(is_goal, False)[house.where]
        fetch = house.where[jnp.argmax(2 * to_fetch + lies)]
        carries = (goal_things & (house.where == rooms.places)).any()
        return rooms.place_words(house)[jnp.where(carries, goal, fetch)]


def _padded(words: jax.Array, width: int) -> jax.Array:
    return jnp.pad(words, (0, width - words.shape[0]))
