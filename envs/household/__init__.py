"""A small household in pure JAX: six task types of ALFWorld, partial observation, sparse reward."""

from hgpo_jax.envs.household.env import Household, State
from hgpo_jax.envs.household.plan import HouseholdPlan
from hgpo_jax.envs.household.subgoals import HouseholdSubgoals
from hgpo_jax.envs.household.team import HouseholdTeam
from hgpo_jax.envs.household.world import TASKS

__all__ = ["TASKS", "Household", "HouseholdPlan", "HouseholdSubgoals", "HouseholdTeam", "State"]
