"""Layers that the language model and the vision tower share: RMSNorm, linear layers with adapters, SwiGLU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from hgpo_jax.policy.model_config import ModelConfig

# Parts of a block that are saved for the backward pass, by the value of learner.remat; the rest is recomputed.
REMAT = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size, eps):
        self.weight, self.eps = nnx.Param(jnp.ones(size)), eps

    def __call__(self, x):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...]).astype(x.dtype)


def product_transposed(x, w):
    """Computes x [..., in] with W [out, in] -> [..., out]. Not as x W.T, for which XLA's CPU compiler copies a transposed W."""
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x, w, dtype=None):
    """Computes x [..., in] W [in, out] -> [..., out] in a dtype, by default that of the operands."""
    return jnp.matmul(x, w, preferred_element_type=dtype)


def _product_forward(x, w, dtype):
    return jnp.matmul(x, w, preferred_element_type=dtype), (x, w)  # not by `product`: learner.remat=dots would not see the dot


def _product_backward(_, residuals, g):
    """Returns the usual gradients, computed in the operands' dtype: products of two dtypes widen all of W on GPUs.

    jax would form W's as (g^T x)^T, for which XLA's CPU compiler recomputes g transposed.
    """
    x, w = residuals
    g = g.astype(x.dtype)
    leading = tuple(range(x.ndim - 1))
    return product_transposed(g, w), jax.lax.dot_general(x, g, ((leading, leading), ((), ())))


product.defvjp(_product_forward, _product_backward)


class Linear(nnx.Linear):
    """x W + bias, plus the adapter if the config names this layer (Hu et al., arXiv 2106.09685)."""

    def __init__(self, c: ModelConfig, name: str, inputs: int, outputs: int, rngs, bias=False):
        init = nnx.initializers.normal(c.initializer_range)
        super().__init__(inputs, outputs, use_bias=bias, kernel_init=init, rngs=rngs)
        self.lora = c.lora if c.lora and name in c.lora.targets else None
        if self.lora:
            self.lora_a = nnx.Param(jnp.zeros((inputs, self.lora.rank)))
            self.lora_b = nnx.Param(jnp.zeros((self.lora.rank, outputs)))
        self.transposed = False

    def transpose(self):
        """Stores W as [out, in] from now on: products of few rows read it a quarter faster on CPUs."""
        self.kernel, self.transposed = nnx.Param(self.kernel[...].T), True

    def __call__(self, x):  # type: ignore[override]  # no `out_sharding` here
        y = (product_transposed if self.transposed else product)(x, self.kernel[...])
        if self.bias is not None:
            y += self.bias[...]
        if self.lora:
            a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
            y += self.lora.scale * ((x @ a) @ b)
        return y


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). prefix: of the layers' names among `c.lora.targets`."""

    def __init__(self, c: ModelConfig, hidden: int, inner: int, rngs, bias=False, prefix=""):
        self.gate_proj = Linear(c, f"{prefix}gate_proj", hidden, inner, rngs, bias)
        self.up_proj = Linear(c, f"{prefix}up_proj", hidden, inner, rngs, bias)
        self.down_proj = Linear(c, f"{prefix}down_proj", inner, hidden, rngs, bias)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
