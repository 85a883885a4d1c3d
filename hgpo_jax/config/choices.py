"""The names that fields of the configuration accept, apart from the objects that they stand for.

Importing those also imports jax and flax, which takes seconds, and a mistyped field should be rejected before that. The tables
of `rollout/environments.py`, `learner/methods.py` and `learner/loss_table.py` have these names (tests/config/test_config.py).
"""

from typing import Literal

ENVIRONMENTS = (
    "household",
    "household_text",
    "household_team",
    "household_team_text",
    "household_plan",
    "household_subgoals",
    "sokoban",
    "sokoban_pixels",
    "sokoban_text",
    "alfworld",
    "math",
    "math_team",
    "webshop",
    "search",
    "search_team",
    "agent",
)
METHODS = (
    "adora",
    "beacon",
    "crbc",
    "dr_mas",
    "dvao",
    "eb_gae",
    "eb_td",
    "ecpo",
    "g2po",
    "g2rpo",
    "gagpo",
    "gbpo",
    "gdpo",
    "gigpo",
    "graphgpo",
    "grpo",
    "hapo",
    "hbpo",
    "hgpo",
    "himac",
    "milegpo",
    "pgpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "dapo",
    "gspo",
    "hiper",
    "kpo",
    "ppo",
)
LOSSES = ("clip", "egpo", "fiber", "gbpo", "gspo", "hapo", "hicra", "kpo")
# The built-in environments with several roles, and those roles.
ROLES = {
    "household_team": ("searcher", "carrier"),
    "household_team_text": ("searcher", "carrier"),
    "household_plan": ("planner", "executor"),
    "math_team": ("solver", "verifier"),
    "search_team": ("verifier", "searcher", "answerer"),
}
HeldOut = Literal["valid_seen", "valid_unseen"]  # splits of ALFWorld to evaluate on
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # layers with adapters
