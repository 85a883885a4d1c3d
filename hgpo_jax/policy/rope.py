"""Rotary position embeddings (RoPE)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.policy.model_config import ModelConfig, RopeScaling


def scaled_frequency(frequency, scaling: RopeScaling):
    """Scales rotary frequencies, f32[E / 2]."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = scaling.original_max_position_embeddings * frequency / (2 * jnp.pi)  # waves that fit into the original context
    share = jnp.clip((waves - low) / (high - low), 0, 1)
    return frequency * (share + (1 - share) / scaling.factor)


def rope_tables(positions, c: ModelConfig):
    """Computes cosines and sines, f32[B, S, 1, E / 2] each (Su et al., arXiv 2104.09864).

    positions: i32[B, S], or i32[B, S, 3], time, row and column of which each section of the frequencies has its own, as
    `mrope_section` says (Qwen2-VL, arXiv 2409.12191).
    """
    half = c.head_size // 2
    frequency = c.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if c.rope_scaling:
        frequency = scaled_frequency(frequency, c.rope_scaling)
    if positions.ndim == 3:
        assert c.vision is not None  # only its tokens have three positions
        positions = positions[:, :, None, np.repeat(np.arange(3), c.vision.mrope_section)]
    else:
        positions = positions[..., None, None]
    angle = positions.astype(jnp.float32) * frequency
    # Computed once: the compiler would otherwise compute them for every element of every layer's queries and keys.
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def apply_rope(x, rope):
    """Rotates x [B, S, heads, E] by the `rope_tables` of its positions, whose B may be 1; the two halves of E are the pairs."""
    (cos, sin), half = rope, x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
