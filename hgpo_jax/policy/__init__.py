"""The policy: a Qwen2.5, Qwen2.5-VL, Qwen3 or Llama (`transformer.py`), its tokenizer, and both as a Hugging Face folder.

policy = load_policy("runs/household-hgpo-s0/policy")
policy = load_policy("smollm2")
policy = load_policy("Qwen/Qwen2.5-1.5B-Instruct", make_mesh("fsdp=8"), "bfloat16")
logits = policy.logits(input_ids, lengths)
"""

from hgpo_jax.policy.load import load_policy
from hgpo_jax.policy.model_config import LoraConfig, ModelConfig, RopeScaling
from hgpo_jax.policy.placement import PARAMETER_AXES, initialize, network, shapes, shardings
from hgpo_jax.policy.policy import Policy
from hgpo_jax.policy.transformer import Qwen2

__all__ = [
    "PARAMETER_AXES",
    "LoraConfig",
    "ModelConfig",
    "Policy",
    "Qwen2",
    "RopeScaling",
    "initialize",
    "load_policy",
    "network",
    "shapes",
    "shardings",
]
