"""Arrays in 8 bits for sampling: integers from -127 to 127, and a scale for each channel (absmax, symmetric).

The error of a value is at most half a scale, 1/254 of the largest value of its channel. Products apply the scale afterwards.
"""

from __future__ import annotations

import jax.numpy as jnp


def quantize(values, axis: int):
    """Quantizes `values` of any float type to about i8 x scale: (i8 of the same shape, scales f32 without `axis`).

    Values along `axis` share a scale; if all of them are 0, it is 0, too.
    """
    values = values.astype(jnp.float32)
    scale = jnp.abs(values).max(axis, keepdims=True) / 127
    whole = jnp.round(values / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    return whole, jnp.squeeze(scale, axis)
