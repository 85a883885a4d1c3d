"""Attention over all slots, forward and backward: as the policy computes it, against jax's plain products.

    python -m hgpo_jax.bench attention --policy Qwen2.5-1.5B --rows 4 --tokens 2048

On a GPU with bfloat16 ours is cuDNN's kernel, on a TPU splash. Errors are relative to products in float32. `packed` has
several segments a row, as `learner.packing` makes them. Operations are those of visible pairs alone: a forward pass, and a
backward pass of two and a half.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp

from hgpo_jax.bench import limits, policy_options
from hgpo_jax.bench.limits import row
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.policy.attention import attend_all

SEGMENTS = 4  # of a packed row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy_options.add_arguments(parser)
    parser.add_argument("--rows", type=whole_number, default=2, help="sequences")
    parser.add_argument("--tokens", type=whole_number, default=512, help="tokens of each")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a ratio is our speed to that of plain products, both in --dtype."""
    model, _, mesh = policy_options.open_policy(args, [args.rows])
    B, S, H, G, E = args.rows, args.tokens, model.num_attention_heads, model.num_key_value_heads, model.head_size
    rates, rows = limits.measure_rates(mesh, args.dtype), []
    slots = jnp.broadcast_to(jnp.arange(S), (B, S))
    width = -(-S // SEGMENTS)
    with jax.set_mesh(mesh):
        keys = jax.random.split(jax.random.key(0), 4)
        arrays = [
            jax.random.normal(key, (B, S, heads, E)).astype(args.dtype) for key, heads in zip(keys, (H, G, G, H), strict=True)
        ]
        for kind, start, visible in (("", None, S * S / 2), (", packed", slots // width * width, S * width / 2)):
            calls = {
                "ours": functools.partial(passes(attend_all, start), *arrays),
                "products": functools.partial(passes(products, start), *arrays),
            }
            seconds = {name: timing.median for name, timing in limits.timed(calls, args.repeats, args.profile).items()}
            with jax.default_matmul_precision("highest"):
                truth = passes(products, start)(*(a.astype(jnp.float32) for a in arrays))
            shape = f"{args.policy}, {B} x {S} tokens, {args.dtype}{kind}"
            least = rates.seconds(0, 3.5 * 4 * B * H * E * visible)
            ratio = seconds["products"] / seconds["ours"]
            rows.append(row(f"attention and its gradient, {shape}", seconds["ours"], "s", least / seconds["ours"], ratio))
            for name, call in calls.items():
                largest = max(relative_error(out, exact) for out, exact in zip(call(), truth, strict=True))
                rows.append(row(f"largest error of {name}{kind}, values and gradients", largest, "of the norm"))
    return [*rows, *rates.rows(args.dtype)]


def products(q, k, v, start=None):
    """Computes `attend_all` by jax's own plain products, which hold all scores."""
    mask = None if start is None else (start[:, :, None] == start[:, None])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")


def relative_error(out, exact) -> float:
    """Returns the norm of the difference over that of `exact`."""
    return float(jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))


def passes(attend, start):
    """Compiles (q, k, v, the output's gradient), each [B, S, heads, E], to (output, gradients of q, k and v)."""

    @jax.jit
    def both(q, k, v, gradient):
        out, back = jax.vjp(lambda *qkv: attend(*qkv, start), q, k, v)
        return out, *back(gradient)

    return both
