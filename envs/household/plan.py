"""The household with a plan: a planner that sees where things are writes a blueprint, an executor carries it out.

    env = HouseholdPlan()
    state, observation = env.reset(jax.random.key(0))                            # the planner's: which thing lies where
    state, observation, *_ = env.step(state, env.encode("fridge_1 countertop_1"))  # the blueprint; the executor's observation
    state, observation, *_ = env.step(state, env.encode("go_to fridge_1"))         # what is left of it: countertop_1

A blueprint is a short list of subgoals: the places to visit, in order. The planner writes it in the first turn of an episode
and never acts again. In every turn the executor sees the observation of the household's agent, and the remaining subgoals: the
first one is removed when the executor stands at its place after a turn. Both share the reward. It is made for HiMAC (Jin et
al., 2026, arXiv 2603.00977), whose executor itself declares a subgoal done.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.envs.household import expert, world
from hgpo_jax.envs.household.env import WON_REWARD, Household, State, Variant

PLANNER, EXECUTOR = range(2)
SUBGOALS = {"place": 2, "two": 4, "look": 2, "clean": 3, "heat": 3, "cool": 3}  # number that a task takes


class PlanState(struct.PyTreeNode):
    """One episode."""

    house: State
    task: jax.Array  # i32[], the house's
    plan: jax.Array  # i32[A], words of the remaining places of the blueprint, then 0
    observation: jax.Array  # i32[6], the executor's last observation of the house
    turn: jax.Array  # i32[], turns of both


class HouseholdPlan(Variant):
    """A family of households with a planner; arguments and errors are `Household`'s, `max_turns` counts both roles' turns.

    Words are the household's and the names of the roles. An observation begins with the role that it is for. A blueprint, and
    an action, has as many words as the longest of the task types needs.
    """

    roles = ("planner", "executor")

    def __init__(self, tasks=("place",), rooms=("kitchen",), places=6, things=4, max_turns=20):
        self.house = Household(tasks, rooms, places, things, max_turns)
        self.max_turns, self.words = max_turns, (*self.house.words, *self.roles)
        self.action_length = max(SUBGOALS[task] for task in tasks)
        self.observation_length = 1 + max(self.action_length + self.house.observation_length, 2 * things)
        self._role_word = np.arange(len(self.house.words), len(self.words), dtype=np.int32)

    # -- words --------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> np.ndarray:
        """Encodes the words of an action or a blueprint as i32[A]; words that the household does not know become 0."""
        ids = [self.house.word_id.get(word, 0) for word in text.split()][: self.action_length]
        return np.array(ids + [0] * (self.action_length - len(ids)), np.int32)

    # -- facts about a state ------------------------------------------------------------------------------------

    def role(self, state: PlanState) -> jax.Array:
        """Returns the role that acts next, i32[], PLANNER or EXECUTOR."""
        return jnp.where(state.turn == 0, PLANNER, EXECUTOR)

    # -- the two functions --------------------------------------------------------------------------------------

    def reset(self, key: jax.Array) -> tuple[PlanState, jax.Array]:
        """Starts a new episode from a key: (PlanState, the planner's observation i32[O])."""
        house, observation = self.house.reset(key)
        plan = jnp.zeros(self.action_length, jnp.int32)
        state = PlanState(house=house, task=house.task, plan=plan, observation=observation, turn=jnp.int32(0))
        return state, self._observe(state)

    def step(self, state: PlanState, action: jax.Array):
        """Takes the planner's blueprint, or does one action of the executor, i32[A] each.

        Returns:
          (PlanState, the executor's observation i32[O], reward f32[] 10 on success else 0, done bool[], invalid bool[]). A
          blueprint that does not begin with a place of the room, or has anything but such places before its end, is invalid and
          leaves the executor without one; the executor is as in `Household.step`, and invalid with more than two words.
        """
        plans = self.role(state) == PLANNER
        place_words = self.house.place_words(state.house)
        named = (action[:, None] == place_words).any(1)
        wrong = ~named[0] | (named != (action != 0)).any() | (named[1:] > named[:-1]).any()
        written = jnp.where(wrong, 0, action)
        house, observation, _, _, refused = self.house.step(state.house, jnp.where(action[2:].any(), 0, action[:2]))
        reached = jnp.append(place_words, -1)[house.at] == state.plan[0]
        left = jnp.where(reached, jnp.append(state.plan[1:], 0), state.plan)
        after = state.replace(
            house=jax.tree.map(lambda old, new: jnp.where(plans, old, new), state.house, house),
            observation=jnp.where(plans, state.observation, observation),
            plan=jnp.where(plans, written, left),
            turn=state.turn + 1,
        )
        won = self.won(after)
        done = won | (after.turn >= self.max_turns)
        return after, self._observe(after), WON_REWARD * won, done, jnp.where(plans, wrong, refused)

    # -- what is seen -------------------------------------------------------------------------------------------

    def _observe(self, state: PlanState) -> jax.Array:
        """Returns the acting role's view, i32[O]: its name; then each thing and its place, or the plan and the house."""
        house, role = state.house, self.role(state)
        things = self.house.thing_words(house)
        spots = jnp.append(self.house.place_words(house), 0)[house.where]
        listed = jnp.stack([things, spots], axis=1)[jnp.argsort(things)].ravel()  # otherwise the wanted one would come first
        local = jnp.concatenate([state.plan, state.observation])
        width = self.observation_length - 1
        padded = lambda words: jnp.pad(words, (0, width - words.shape[0]))  # noqa: E731
        body = jnp.where(role == PLANNER, padded(listed), padded(local))
        return jnp.concatenate([jnp.asarray(self._role_word)[role][None], body])

    # -- two scripted players -----------------------------------------------------------------------------------

    def expert_action(self, state: PlanState, recent: jax.Array, key: jax.Array) -> jax.Array:
        """Returns an action, i32[A]: the planner names the solution's places; the executor is the local expert, which
        first looks for things at the next of them.

        recent: i32[K, A], the last K actions of the same role.
        """
        acted = expert.expert_action(self.house, state.house, recent[:, :2], key, state.plan[0])
        acted = jnp.pad(acted, (0, self.action_length - 2))
        return jnp.where(self.role(state) == PLANNER, self._blueprint(state.house), acted)

    def random_action(self, state: PlanState, key: jax.Array) -> jax.Array:
        """Draws a blueprint of any places of the room, or one of the executor's admissible actions, uniformly; i32[A]."""
        blueprint = jax.random.choice(key, self.house.place_words(state.house), (self.action_length,))
        acted = jnp.pad(expert.random_action(self.house, state.house, key), (0, self.action_length - 2))
        return jnp.where(self.role(state) == PLANNER, blueprint, acted)

    def _blueprint(self, house: State) -> jax.Array:
        """Lists the places of the wanted thing, its treatment and its destination; two things one after the other; i32[A]."""
        rooms, goal_things = self.house, house.kind == house.goal_kind
        first, last = jnp.argmax(goal_things), goal_things.shape[0] - 1 - jnp.argmax(goal_things[::-1])
        goal = jnp.argmax(jnp.asarray(rooms._place_kind)[house.room] == house.goal_place)
        heat, cool, clean = jnp.asarray(rooms._tool_at)[house.room]
        lamp = jnp.asarray(rooms._lamp_at)[house.room]
        start, nothing = house.where[first], jnp.int32(-1)
        routes = {
            "place": (start, goal),
            "two": (start, goal, house.where[last], goal),
            "look": (start, lamp),
            "clean": (start, clean, goal),
            "heat": (start, heat, goal),
            "cool": (start, cool, goal),
        }
        rows = [jnp.stack([*routes[task], *[nothing] * (4 - len(routes[task]))]) for task in world.TASKS]
        route = jnp.stack(rows)[house.task, : self.action_length]
        return jnp.where(route < 0, 0, rooms.place_words(house)[route])
