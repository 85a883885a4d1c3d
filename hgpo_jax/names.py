"""The names that fields of the configuration take, apart from what they stand for.

That imports jax and flax, which takes seconds, and a mistyped field is to be refused before. The tables of
`environments.py` and `methods.py` have these names (tests/test_config.py).
"""

from typing import Literal

ENVIRONMENTS = ("household", "household_text", "sokoban", "sokoban_text", "alfworld", "webshop", "agent")
METHODS = (
    "eb_gae", "eb_td", "gagpo", "gigpo", "graphgpo", "grpo", "hgpo", "pgpo", "reinforce_pp", "reinforce_pp_baseline", "rloo",
    "dapo", "gspo", "ppo",
)  # fmt: skip
HeldOut = Literal["valid_seen", "valid_unseen"]  # splits of ALFWorld to evaluate on
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a block, for adapters
