"""The household whose agent states its subgoal: every answer has a switch, a subgoal and an action part.

    env = HouseholdSubgoals()
    state, observation = env.reset(jax.random.key(0))
    state, observation, *_ = env.step(state, env.encode("switch fridge_1 go_to fridge_1"))
    state, observation, *_ = env.step(state, env.encode("keep fridge_1 open fridge_1"))

The subgoal is a place to work at. It only precedes the next observation, so that an agent remembers its own intention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from hgpo_jax.envs.household import expert
from hgpo_jax.envs.household.env import Household, State, Variant


class SubgoalState(struct.PyTreeNode):
    """One episode."""

    house: State
    task: jax.Array  # i32[], the house's
    subgoal: jax.Array  # i32[], word of the most recent subgoal's place, 0 before


class HouseholdSubgoals(Variant):
    """A family of households; its arguments and errors are those of `Household`.

    An answer is `switch` and a place of the room, or `keep` and the current subgoal's place; then an action of the household.
    """

    answer_parts = (1, 1, Household.action_length)
    action_length = sum(answer_parts)
    observation_length = 1 + Household.observation_length

    def __init__(self, tasks=("place",), rooms=("kitchen",), places=6, things=4, max_turns=20):
        self.house = Household(tasks, rooms, places, things, max_turns)
        self.max_turns, self.words = max_turns, (*self.house.words, "switch", "keep")
        self._switch, self._keep = len(self.words) - 2, len(self.words) - 1

    def switches(self, answer: jax.Array) -> jax.Array:
        """Whether an answer i32[4] takes up a new subgoal, bool[]."""
        return answer[0] == self._switch

    # -- facts about a state ------------------------------------------------------------------------------------

    def admissible(self, state: SubgoalState) -> tuple[jax.Array, jax.Array]:
        """Returns the possible answers: (bool[answers], i32[answers, 4] their words), every plan with every action."""
        legal, actions = self.house.admissible(state.house)
        places = self.house.place_words(state.house)
        plans = jnp.stack([jnp.full_like(places, self._switch), places], axis=1)
        plans = jnp.concatenate([plans, jnp.stack([jnp.int32(self._keep), state.subgoal])[None]])
        fits = jnp.append(jnp.ones(len(places), bool), state.subgoal > 0)
        answers = [jnp.repeat(plans, len(actions), axis=0), jnp.tile(actions, (len(plans), 1))]
        return (fits[:, None] & legal).ravel(), jnp.concatenate(answers, axis=1)

    # -- the two functions --------------------------------------------------------------------------------------

    def reset(self, key: jax.Array) -> tuple[SubgoalState, jax.Array]:
        """Starts a new episode from a key: (SubgoalState, observation i32[7])."""
        house, observation = self.house.reset(key)
        return SubgoalState(house=house, task=house.task, subgoal=jnp.int32(0)), jnp.append(0, observation).astype(jnp.int32)

    def step(self, state: SubgoalState, action: jax.Array):
        """Performs one answer i32[4].

        Returns:
          (SubgoalState, observation i32[7], the subgoal and the household's observation, reward f32[] 10 on success else 0,
          done bool[], invalid bool[]). If the plan does not fit, the subgoal stays and the action is not performed, like an
          inadmissible one in `Household.step`.
        """
        switches = self.switches(action)
        named = (self.house.place_words(state.house) == action[1]).any()
        keeps = (action[0] == self._keep) & (state.subgoal > 0) & (action[1] == state.subgoal)
        fits = (switches & named) | keeps
        house, observation, reward, done, invalid = self.house.step(state.house, jnp.where(fits, action[2:], 0))
        after = state.replace(house=house, subgoal=jnp.where(fits, action[1], state.subgoal))
        return after, jnp.append(after.subgoal, observation), reward, done, invalid

    # -- two scripted players -----------------------------------------------------------------------------------

    def expert_action(self, state: SubgoalState, recent: jax.Array, key: jax.Array) -> jax.Array:
        """Returns an answer i32[4] of the local expert, whose subgoal is the place where it acts or goes to.

        recent: i32[K, 4], the last K answers.
        """
        house, places = state.house, self.house.place_words(state.house)
        action = expert.expert_action(self.house, house, recent[:, 2:], key)
        goes = action[0] == self.house.word_id["go_to"]
        here = jnp.append(places, places[0])[house.at]  # in the middle of the room it only goes
        subgoal = jnp.where(goes, action[1], here)
        plan = jnp.where(subgoal == state.subgoal, self._keep, self._switch)
        return jnp.concatenate([jnp.stack([plan, subgoal]), action])

    def random_action(self, state: SubgoalState, key: jax.Array) -> jax.Array:
        """Returns one of the admissible answers, all equally likely, i32[4]."""
        legal, words = self.admissible(state)
        return words[jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))]
