"""Writes data/qwen2_tiny, qwen3_tiny and llama_tiny: random tiny models by transformers' PyTorch, with what they compute.

expected.npz: ids i32[B, T], logits f32[B, T, V] and, as gradient/NAME, the gradient of the next-token cross-entropy (mean over
the B * (T - 1) predictions) with respect to every parameter. Run by hand with torch: python tests/policy/make_reference.py
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

DATA = Path(__file__).parent / "data"
CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
# So short that each of the three ranges of wave lengths holds some of a tiny head's.
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def random_model(model_type="qwen2", rope_theta=1e4, llama3=False, **sizes):
    """A model whose weights, biases and norms are all random and large enough to matter. llama3: with its rope scaling."""
    torch.manual_seed(0)
    make_config, make_model = CLASSES[model_type]
    rope = {"rope_type": "default", "rope_theta": rope_theta} | (LLAMA3_ROPE if llama3 else {})
    model = make_model(make_config(initializer_range=0.2, rope_parameters=rope, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def compute(model, ids):
    """(logits, gradient by parameter name) for ids i64[B, T]."""
    ids = torch.tensor(ids)
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def write(name, ids, **sizes):
    model = random_model(**sizes)
    model.save_pretrained(DATA / name)
    logits, gradients = compute(model, ids)
    gradients = {f"gradient/{key}": value for key, value in gradients.items()}
    np.savez_compressed(DATA / name / "expected.npz", ids=ids.astype(np.int32), logits=logits, **gradients)


if __name__ == "__main__":
    write(
        "qwen2_tiny", np.random.default_rng(0).integers(0, 67, (3, 19)), vocab_size=67, hidden_size=32,
        intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    write(
        "qwen3_tiny", np.random.default_rng(0).integers(0, 41, (3, 13)), model_type="qwen3", vocab_size=41, hidden_size=16,
        intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        tie_word_embeddings=True, rope_theta=1e6,
    )  # fmt: skip
    write(
        "llama_tiny", np.random.default_rng(0).integers(0, 43, (3, 15)), model_type="llama", vocab_size=43, hidden_size=24,
        intermediate_size=32, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True,
        llama3=True,
    )  # fmt: skip
