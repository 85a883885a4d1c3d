"""The update: one compiled program from rows of tokens to new parameters, whatever the loss.

A mini-batch is a run of rows in a given order, worked through in micro-batches of fixed size; gradients and statistics are
summed as numerators and divided once, so that micro-batch size, padding and the number of devices change nothing but the
speed. Trip counts are dynamic, shapes are static: one compilation serves every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hgpo_jax import objective
from hgpo_jax.config import LearnerConfig


@chex.dataclass(frozen=True)
class Rows:
    """N decisions to learn from.

    old_logp and advantages are only read by the policy loss.
    """

    prompts: chex.Array  # i32[N, P], right-padded
    prompt_lengths: chex.Array  # i32[N]
    responses: chex.Array  # i32[N, R], right-padded
    response_lengths: chex.Array  # i32[N]
    old_logp: chex.Array  # f32[N, R]
    advantages: chex.Array  # f32[N]


def token_logprobs(model, rows: Rows, *, temperature=1.0, remat=False):
    """Log-probability and entropy of each response token: (f32[N, R], f32[N, R]).

    temperature: of the distribution, as in sampling.
    """
    n, R = rows.responses.shape
    slots = rows.prompt_lengths[:, None] + jnp.arange(R)
    tokens = jnp.pad(rows.prompts, ((0, 0), (0, R - 1)))
    # The last response token is only a target; its slot may lie past the end.
    tokens = tokens.at[jnp.arange(n)[:, None], slots].set(rows.responses, mode="drop")
    logits = model.logits(model.hidden(tokens, slots - 1, remat=remat)) / temperature
    logps = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logps, rows.responses[..., None], axis=-1)[..., 0]
    return chosen, -(jnp.exp(logps) * logps).sum(-1)


def response_mask(rows: Rows):
    """bool[N, R]"""
    return jnp.arange(rows.responses.shape[1]) < rows.response_lengths[:, None]


def make_policy_loss(graphdef, config: LearnerConfig, temperature: float):
    """PPO-clip + KL to the reference policy - entropy bonus, as numerators: `loss(params, reference, rows)`."""
    aggregate = config.aggregate

    def loss(params, reference, rows: Rows):
        mask = response_mask(rows)
        logp, entropy = token_logprobs(nnx.merge(graphdef, params), rows, temperature=temperature, remat=config.remat)
        _, stats = objective.policy_loss(
            logp, rows.old_logp, rows.advantages, mask,
            clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip, aggregate=aggregate,
        )  # fmt: skip
        total = stats["loss"][0]
        if config.kl_weight:
            reference_logp, _ = token_logprobs(nnx.merge(graphdef, reference), rows, temperature=temperature)
            _, kl = objective.kl_loss(
                logp, jax.lax.stop_gradient(reference_logp), mask, kind=config.kl_kind, aggregate=aggregate
            )
            total += config.kl_weight * kl["loss"][0]
            stats["kl"] = kl["kl"]
        stats["entropy"] = objective.reduce_tokens(entropy, mask, "token-mean")
        total -= config.entropy_weight * objective.reduce_tokens(entropy, mask, aggregate)[0]
        # How far the sampler's log-probabilities are from the trainer's; exact only before the first step.
        difference = jnp.where(mask, jnp.abs(logp - rows.old_logp), 0.0)
        return total, stats, difference.max(initial=0.0)

    return loss


def make_cloning_loss(graphdef):
    """Cross-entropy of the responses: `loss(params, None, rows)`."""

    def loss(params, _, rows: Rows):
        logp, _ = token_logprobs(nnx.merge(graphdef, params), rows)
        part = objective.reduce_tokens(-logp, response_mask(rows), "token-mean")
        return part[0], {"loss": part}, jnp.float32(0)

    return loss


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip, with a linear warm-up."""
    schedule = optax.linear_schedule(
        config.lr / max(config.warmup_steps, 1), config.lr, max(config.warmup_steps - 1, 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay),
    )


def make_update(
    loss: Callable, optimizer, mesh: Mesh, *, minibatch_size: int, microbatch_size: int, per_token: bool = True
):
    """Builds `update(params, opt_state, reference, rows, order, count, lr_share)`, to be called under `jax.jit`.

    Args:
      loss: `(params, reference, rows) -> (numerator, stats, worst)`; the numerator is a sum over tokens (`per_token`) or
        over rows, stats are (numerator, denominator) pairs, worst is a maximum of interest in the first mini-batch.
      mesh: each device of its `data` axis takes its part of every mini-batch.
      minibatch_size: rows per optimizer step at most; an epoch is cut into equal steps.
      microbatch_size: rows per device and gradient computation.

    `order` i32[N] lists the rows to learn from in its first `count` entries; `lr_share` scales the optimizer's step.
    Returns (params, opt_state, stats), with every stat a scalar mean over what it counts, plus `grad_norm` (mean),
    `optimizer_steps` and `worst`.
    """
    devices, C = mesh.shape["data"], microbatch_size

    def epoch(params, opt_state, reference, rows: Rows, order, count, lr_share):
        device = jax.lax.axis_index("data")
        steps = jnp.maximum(-(-count // minibatch_size), 1)
        size = -(-count // steps)
        weight = rows.response_lengths if per_token else (rows.response_lengths > 0).astype(jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(weight[order])])

        def numerator(params, chunk):
            total, stats, worst = loss(params, reference, chunk)
            return total, (stats, worst)

        grad = jax.grad(numerator, has_aux=True)

        def chunk_at(first, stop):
            at = first + jnp.arange(C)
            chunk = jax.tree.map(lambda a: a[order[jnp.minimum(at, order.shape[0] - 1)]], rows)
            return chunk.replace(response_lengths=jnp.where(at < stop, chunk.response_lengths, 0))

        nothing = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda: grad(params, chunk_at(0, 0)))
        )

        def one_step(j, carry):
            params, opt_state, stats, worst, norms = carry
            begin, stop = j * size, jnp.minimum((j + 1) * size, count)

            def one_chunk(i, carry):
                total, (stats, worst) = carry
                new, (new_stats, new_worst) = grad(params, chunk_at(begin + (i * devices + device) * C, stop))
                total, stats = jax.tree.map(jnp.add, (total, stats), (new, new_stats))
                return total, (stats, jnp.maximum(worst, new_worst))

            chunks = -(-(stop - begin) // (C * devices))
            gradient, (new_stats, new_worst) = jax.lax.fori_loop(0, chunks, one_chunk, nothing)
            gradient, new_stats = jax.lax.psum((gradient, new_stats), "data")
            scale = 1.0 / jnp.maximum(before[stop] - before[begin], 1)
            gradient = jax.tree.map(lambda g: g * scale, gradient)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            params = optax.apply_updates(params, jax.tree.map(lambda u: u * lr_share, updates))
            stats = jax.tree.map(jnp.add, stats, new_stats)
            worst = jnp.where(j == 0, jax.lax.pmax(new_worst, "data"), worst)
            return params, opt_state, stats, worst, norms + optax.global_norm(gradient)

        carry = (params, opt_state, nothing[1][0], jnp.float32(0), jnp.float32(0))
        params, opt_state, stats, worst, norms = jax.lax.fori_loop(0, steps, one_step, carry)
        stats = {name: objective.divide(part) for name, part in stats.items()}
        return params, opt_state, stats | {"grad_norm": norms / steps, "optimizer_steps": steps, "worst": worst}

    return jax.shard_map(epoch, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False)
