"""Prompts of compiled environments: goal, the last K observation-action pairs, the current observation, "now act"."""

from __future__ import annotations

import chex
import jax.numpy as jnp


@chex.dataclass(frozen=True)
class Memory:
    """The last K turns of one episode, oldest first; zeros before the first turn."""

    observations: chex.Array  # i32[K, W]
    actions: chex.Array  # i32[K, A]

    @classmethod
    def empty(cls, history_length: int, observation_length: int, action_length: int) -> Memory:
        return cls(
            observations=jnp.zeros((history_length, observation_length), jnp.int32),
            actions=jnp.zeros((history_length, action_length), jnp.int32),
        )

    def push(self, observation, action) -> Memory:
        """The memory after one more turn."""
        return Memory(
            observations=jnp.concatenate([self.observations, observation[None]])[1:],
            actions=jnp.concatenate([self.actions, action[None]])[1:],
        )


def prompt_length(env, history_length: int) -> int:
    """P: slots of the longest prompt."""
    pair = env.observation_length + env.action_length
    return env.goal_length + history_length * pair + env.observation_length + 1


def build_prompt(goal, memory: Memory, observation, act: int):
    """One episode's prompt, i32[P]. Every part has its fixed slots; an unused slot holds the blank word, id 0."""
    pairs = jnp.concatenate([memory.observations, memory.actions], axis=1).ravel()
    return jnp.concatenate([goal, pairs, observation, jnp.array([act], jnp.int32)])
