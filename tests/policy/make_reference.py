"""Writes data/qwen2_tiny, qwen3_tiny, llama_tiny and qwen2_5_vl_tiny: random tiny models by transformers' PyTorch, with what
they compute.

expected.npz: ids i32[B, T], logits f32[B, T, V] and, as gradient/NAME, the gradient of the next-token cross-entropy (mean over
the B * (T - 1) predictions) with respect to every parameter. Of a model with vision also patches
f32[N, .], grids i32[pictures, 3] in the order of the prompts, and features f32[n, D].

Run by hand with torch: python tests/policy/make_reference.py
"""

import functools
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

DATA = Path(__file__).parent / "data"
CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (functools.partial(MistralConfig, sliding_window=None), MistralForCausalLM),
}
# So short that each of the three ranges of wave lengths holds some of a tiny head's.
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def random_model(model_type="qwen2", rope_theta=1e4, llama3=False, **sizes):
    """A model whose weights, biases and norms are all random and large enough to matter. llama3: with its rope scaling."""
    make_config, make_model = CLASSES[model_type]
    rope = {"rope_type": "default", "rope_theta": rope_theta} | (LLAMA3_ROPE if llama3 else {})
    return randomized(make_model, make_config(initializer_range=0.2, rope_parameters=rope, **sizes))


def random_vision_model(vision, mrope_section, tokens, tie_word_embeddings=False, **sizes):
    """The same for a Qwen2.5-VL. tokens: the ids of image, film, and the tokens before and after a picture."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": mrope_section}
    special = {"bos_token_id": None, "eos_token_id": None}
    config = Qwen2_5_VLConfig(
        text_config={"rope_parameters": rope, "initializer_range": 0.2, **special, **sizes},
        vision_config={"out_hidden_size": sizes["hidden_size"], "initializer_range": 0.2, **vision},
        tie_word_embeddings=tie_word_embeddings, **dict(zip(names, tokens, strict=True)),
    )  # fmt: skip
    return randomized(Qwen2_5_VLForConditionalGeneration, config)


def randomized(make_model, config):
    torch.manual_seed(0)
    model = make_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name or "ln_q" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def prompts_with_pictures(config, rows, length, seed=0):
    """Random prompts of a Qwen2.5-VL: (ids i64[B, length], patches f32[N, .], the grids of all pictures in order).

    rows: the grids of each prompt's pictures, which come after two or more tokens of text each and before more of it.
    """
    rng, v = np.random.default_rng(seed), config.vision_config
    text = lambda count: rng.integers(0, min(config.image_token_id, 50), count).tolist()  # noqa: E731
    ids = []
    for grids in rows:
        row = text(3)
        for grid in grids:
            images = [config.image_token_id] * (np.prod(grid) // v.spatial_merge_size**2)
            row += [*text(2), config.vision_start_token_id, *images, config.vision_end_token_id]
        ids.append(row + text(length - len(row)))
    grids = [grid for row in rows for grid in row]
    numbers = v.in_channels * v.temporal_patch_size * v.patch_size**2
    return np.array(ids), rng.standard_normal((sum(map(np.prod, grids)), numbers)).astype(np.float32), grids


def compute(model, ids, **pictures):
    """(logits, gradient by parameter name) for ids i64[B, T]."""
    ids = torch.tensor(ids)
    logits = model(ids, **pictures).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def compute_with_pictures(model, ids, patches, grids):
    """(logits, gradients, features f32[n, D]) for prompts whose image tokens are the features of pictures."""
    seen = dict(pixel_values=torch.tensor(patches), image_grid_thw=torch.tensor(grids))
    is_image = torch.tensor(ids == model.config.image_token_id).int()
    logits, gradients = compute(model, ids, **seen, mm_token_type_ids=is_image)
    with torch.no_grad():
        features = model.model.visual(seen["pixel_values"], seen["image_grid_thw"]).pooler_output.numpy()
    return logits, {stored_name(name): value for name, value in gradients.items()}, features


def stored_name(name):
    """The name in files of a parameter of a Qwen2.5-VL."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def write(name, ids, **sizes):
    model = random_model(**sizes)
    write_expected(name, model, ids, *compute(model, ids))


def write_expected(name, model, ids, logits, gradients, **more):
    model.save_pretrained(DATA / name)
    gradients = {f"gradient/{key}": value for key, value in gradients.items()}
    np.savez_compressed(DATA / name / "expected.npz", ids=ids.astype(np.int32), logits=logits, **gradients, **more)


def write_vision(name, rows, length, **sizes):
    model = random_vision_model(**sizes)
    ids, patches, grids = prompts_with_pictures(model.config, rows, length)
    logits, gradients, features = compute_with_pictures(model, ids, patches, grids)
    write_expected(name, model, ids, logits, gradients, patches=patches, grids=np.array(grids), features=features)


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
    write_vision(
        "qwen2_5_vl_tiny", [[(1, 6, 4)], [(1, 4, 4), (1, 2, 6)]], 26, vocab_size=43, hidden_size=24, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, mrope_section=[1, 1, 2], tokens=[39, 40, 41, 42],
        vision=dict(depth=3, hidden_size=16, intermediate_size=20, num_heads=2, fullatt_block_indexes=[1], window_size=8,
                    patch_size=2),
    )  # fmt: skip
