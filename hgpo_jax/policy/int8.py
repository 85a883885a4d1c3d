"""Arrays in 8 bits for sampling: whole numbers of -127 to 127, and a scale for each channel (absmax, symmetric).

A value is off by half a scale at most, 1/254 of the largest value of its channel. Products multiply by the scale afterwards.
"""

from __future__ import annotations

import jax.numpy as jnp


def quantize(values, axis: int):
    """(i8 of the same shape, scales f32 without `axis`): `values`, of any float type, are about i8 x scale.

    Those along `axis` share a scale; where all of them are 0, it is 0, too.
    """
    values = values.astype(jnp.float32)
    scale = jnp.abs(values).max(axis, keepdims=True) / 127
    whole = jnp.round(values / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    return whole, jnp.squeeze(scale, axis)
