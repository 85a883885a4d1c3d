"""Writes data/qwen2_tiny: a random tiny Qwen2 by transformers' PyTorch, with the logits it gives. Run by hand with torch:

python tests/policy/make_reference.py
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

FOLDER = Path(__file__).parent / "data" / "qwen2_tiny"


def random_model(**sizes):
    """A Qwen2 whose weights and biases are all random and large enough to matter."""
    torch.manual_seed(0)
    config = Qwen2Config(initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **sizes)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


if __name__ == "__main__":
    model = random_model(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model.save_pretrained(FOLDER)
    ids = np.random.default_rng(0).integers(0, 67, (3, 19))
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits.numpy()
    np.savez_compressed(FOLDER / "expected.npz", ids=ids.astype(np.int32), logits=logits)
