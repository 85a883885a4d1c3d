"""Prompts of compiled environments: goal, the last K observation-action pairs, the current observation, "now act".

An environment can define its own prompts (`hgpo_jax.envs.protocol.OwnPrompts`), of any length up to a bound. Where it shows
pictures (`protocol.Pictured`), tokens of the current one take the place of the observation, and there are no past turns.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct

from hgpo_jax.envs.protocol import OwnPrompts, Pictured, Team


def role_of(env, state) -> jax.Array:
    """Returns the role whose turn it is in a state, i32[]; 0 if the environment has one role."""
    return jnp.int32(env.role(state)) if isinstance(env, Team) else jnp.int32(0)


class History(struct.PyTreeNode):
    """The last K turns of each role in one episode, oldest first; zeros before the first turn."""

    observations: jax.Array  # i32[roles, K, O]
    actions: jax.Array  # i32[roles, K, A]

    @classmethod
    def empty(cls, roles: int, history_length: int, observation_length: int, action_length: int) -> History:
        return cls(
            observations=jnp.zeros((roles, history_length, observation_length), jnp.int32),
            actions=jnp.zeros((roles, history_length, action_length), jnp.int32),
        )

    def of(self, role) -> tuple[jax.Array, jax.Array]:
        """Returns the observations i32[K, O] and actions i32[K, A] of one role, i32[]."""
        return self.observations[role], self.actions[role]

    def push(self, role, observation, action) -> History:
        """Appends one turn of a role, i32[], to the history: observation i32[O], action i32[A]."""
        observations, actions = self.of(role)
        return History(
            observations=self.observations.at[role].set(jnp.concatenate([observations, observation[None]])[1:]),
            actions=self.actions.at[role].set(jnp.concatenate([actions, action[None]])[1:]),
        )


def prompt_length(env, history_length: int) -> int:
    """Returns P, the slots of the longest prompt."""
    if isinstance(env, OwnPrompts):
        return env.prompt_slots(history_length)
    if isinstance(env, Pictured):
        return env.goal_length + math.prod(env.picture_features) + 3
    pair = env.observation_length + env.action_length
    return env.goal_length + history_length * pair + env.observation_length + 1


def prompt_widths(env, history_length: int) -> list[int]:
    """Returns the prompt widths in slots, ascending to P; several if prompts differ in length."""
    P = prompt_length(env, history_length)
    return sorted({-(-P * part // 5) for part in (3, 5)}) if isinstance(env, OwnPrompts) else [P]


def make_prompt(env, state, goal, history: History, observation, act: int):
    """Builds one episode's prompt and its length, (i32[P], i32[]): the environment's own, or else that of `build_prompt`.

    It holds the past turns of the role that acts next.
    """
    past = history.of(role_of(env, state))
    if isinstance(env, OwnPrompts):
        return env.prompt(state, goal, *past, observation, act)
    if isinstance(env, Pictured):
        before, feature, after = env.picture_words
        observation = jnp.array([before, *[feature] * math.prod(env.picture_features), after], jnp.int32)
    prompt = build_prompt(goal, *past, observation, act)
    return prompt, jnp.int32(prompt.shape[0])


def picture_of(env, observation) -> jax.Array | None:
    """Returns what a prompt with this observation shows, uint8[H, W, 3]; None in an environment without pictures."""
    return env.picture(observation) if isinstance(env, Pictured) else None


def build_prompt(goal, observations, actions, observation, act: int):
    """Builds a prompt i32[P]: goal i32[slots of env.goal_length], the last K turns, observation i32[O], the token `act`.

    observations i32[K, O] and actions i32[K, A] are those of the turns. Every part has its fixed slots; an unused slot holds
    the blank word, id 0.
    """
    pairs = jnp.concatenate([observations, actions], axis=1).ravel()
    return jnp.concatenate([goal, pairs, observation, jnp.array([act], jnp.int32)])
