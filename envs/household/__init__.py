"""A small household in pure JAX: six task types of ALFWorld, partial observation, sparse reward."""

from envs.household.env import Household, State
from envs.household.world import TASKS

__all__ = ["TASKS", "Household", "State"]
