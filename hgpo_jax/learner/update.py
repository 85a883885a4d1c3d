"""The update: one compiled program from a batch of decisions to new parameters, whatever the loss.

A mini-batch is a run of decisions in a given order, processed in micro-batches of fixed size. Gradients and statistics are
summed as numerators and divided once, so that micro-batch size, padding and the number of devices affect only the speed. Trip
counts are dynamic, shapes are static: one compilation serves every number of decisions. The decisions of a mini-batch are
packed into sequences as long as the longest possible decision (`packing.py`), and a micro-batch is some of these
sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hgpo_jax.config import LearnerConfig
from hgpo_jax.learner import loss_table, losses
from hgpo_jax.learner.batch import TrainingBatch, assign_to_sequences, gather_microbatch
from hgpo_jax.learner.methods import Method
from hgpo_jax.policy import ModelConfig, lora, network
from hgpo_jax.policy.mesh import max_across_devices
from hgpo_jax.policy.placement import cast
from hgpo_jax.policy.transformer import Qwen2
from hgpo_jax.policy.vocabulary import gather_logprobs
from hgpo_jax.sampling.constraint import restrict

Two = tuple[jax.Array, jax.Array]
# (params, reference, microbatch) -> (numerator, stats, the largest difference of log-probabilities); see `make_update`.
Loss = Callable[[Any, Any, TrainingBatch], tuple[jax.Array, losses.Stats, jax.Array]]
Update = Callable[..., tuple[Any, Any, dict[str, jax.Array]]]
MAX_LOGITS = 2**26  # 256 MB in float32, over the devices of fsdp and tensor together


def token_logprobs(
    model: Qwen2, batch: TrainingBatch, *, temperature: float = 1.0, remat: str = "none", max_logits: int = MAX_LOGITS
) -> Two:
    """Computes log-probability and entropy of each response token: (f32[N, R], f32[N, R]), 0 beyond a response's end.

    Where decoding was constrained (`batch.allowed`), both are of the distribution over the allowed tokens, as in sampling.

    temperature: of the distribution, as in sampling.
    max_logits: logits to hold at a time, over the devices of fsdp and tensor together; if the predictions need more, they are
    computed in chunks, and again in the backward pass. All logits together would be by far the largest array of an update
    (4,096 tokens of a vocabulary of 151,936 are 2.5 GB), and are never needed at once.
    """
    layout = batch.sequences()
    index = layout.response_index(batch.responses.shape[1], batch.response_lengths)
    hidden = model.hidden(layout.tokens, layout.predict_slots, segment_start=layout.segment_start, remat=remat)
    M, Q = layout.predict_slots.shape
    targets = jnp.zeros((M, Q), jnp.int32).at[index].set(batch.responses, mode="drop")
    chosen: tuple[jax.Array, ...] = hidden, targets
    if batch.allowed is not None:
        words = batch.allowed.shape[-1]
        chosen += (jnp.zeros((M, Q, words), jnp.uint32).at[index].set(batch.allowed, mode="drop"),)

    def logprobs_of_chunk(model: Qwen2, hidden: jax.Array, targets: jax.Array, allowed: jax.Array | None = None) -> Two:
        logps = jax.nn.log_softmax(restrict(model.logits(hidden) / temperature, allowed))
        return gather_logprobs(logps, targets), -(jnp.exp(logps) * logps).sum(-1)

    width = max(1, min(Q, max_logits // (M * model.c.vocab_size)))  # predictions of each sequence at a time
    if width == Q:
        out = logprobs_of_chunk(model, *chosen)
    else:
        chunks = -(-Q // width)

        def split(a: jax.Array) -> jax.Array:
            a = jnp.pad(a, ((0, 0), (0, chunks * width - Q), *((0, 0),) * (a.ndim - 2)))
            return jnp.moveaxis(a.reshape(M, chunks, width, *a.shape[2:]), 1, 0)

        graphdef, weights = nnx.split(model)
        body = jax.checkpoint(lambda weights, *inputs: logprobs_of_chunk(nnx.merge(graphdef, weights), *inputs))
        out = jax.lax.map(lambda inputs: body(weights, *inputs), tuple(split(a) for a in chosen))
        out = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(M, -1)[:, :Q], out)
    logp, entropy = (a.at[index].get(mode="fill", fill_value=0) for a in out)
    return logp, entropy


def make_logprobs(
    model: ModelConfig, temperature: float = 1.0, remat: str = "none"
) -> Callable[[Any, Any, TrainingBatch], Two]:
    """Builds `logprobs(params, reference, batch)`, `token_logprobs` of parameters.

    With `model.lora`, params are adapters and reference the weights that they are bound to; otherwise reference is not read.
    """
    graphdef = network(model)

    def logprobs(params: Any, reference: Any, batch: TrainingBatch) -> Two:
        if model.lora:
            params = lora.bind(reference, params)
        return token_logprobs(nnx.merge(graphdef, params), batch, temperature=temperature, remat=remat)

    return logprobs


def make_policy_loss(
    model: ModelConfig,
    config: LearnerConfig,
    method: Method,
    temperature: float,
    roles: Sequence[str] = (),
    plan_words: int = 0,
) -> Loss:
    """Builds the configured loss + KL to the reference policy - entropy bonus, as numerators: `loss(params, reference, batch)`.

    Params and reference as for `make_logprobs`; with a KL, reference is always read. With several roles, which
    `batch.agents` index, there are statistics for each. plan_words: words of an answer before its action, for losses that
    ask which tokens plan.
    """
    logprobs, plain = make_logprobs(model, temperature, config.remat), network(dataclasses.replace(model, lora=None))
    aggregate, surrogate = loss_table.aggregation(config, method), loss_table.configured(config, method)

    def loss(params: Any, reference: Any, batch: TrainingBatch) -> tuple[jax.Array, losses.Stats, jax.Array]:
        mask = batch.response_mask()
        logp, entropy = logprobs(params, reference, batch)
        planning = mask & (jnp.arange(mask.shape[1]) < plan_words) if plan_words else None
        further = {"entropy": entropy, "planning": planning, "margins": batch.margins}
        _, stats = surrogate(logp, batch.old_logp, batch.advantages, mask, **further)
        total = stats["loss"][0]
        tokens = {"entropy": entropy}
        if config.kl_weight:
            reference_logp, _ = token_logprobs(nnx.merge(plain, reference), batch, temperature=temperature)
            _, kl = losses.kl_loss(logp, jax.lax.stop_gradient(reference_logp), mask, aggregate=aggregate)
            total += config.kl_weight * kl["loss"][0]
            stats["kl"] = kl["kl"]
            tokens["kl"] = losses.kl(logp, reference_logp)
        stats["entropy"] = losses.reduce_tokens(entropy, mask, "token-mean")
        total -= config.entropy_weight * losses.reduce_tokens(entropy, mask, aggregate)[0]
        # Distance between the sampler's and the trainer's log-probabilities; exact only before the first step.
        difference = jnp.where(mask, jnp.abs(logp - batch.old_logp), 0.0)
        if len(roles) > 1:
            others = batch.old_logp, batch.advantages, mask
            slope = jax.grad(lambda logp: surrogate(logp, *others, **further)[1]["loss"][0])(jax.lax.stop_gradient(logp))
            assert batch.agents is not None
            stats |= role_stats(roles, batch.agents, mask, tokens, slope)
        return total, stats, difference.max(initial=0.0)

    return loss


def role_stats(
    roles: Sequence[str], agents: jax.Array, mask: jax.Array, tokens: dict[str, jax.Array], slope: jax.Array
) -> losses.Stats:
    """Computes statistics of N decisions by role: the mean of each array of `tokens`, f32[N, R], and `logp_gradient_share`.

    agents: i32[N], indices into `roles`; mask: bool[N, R]. slope: f32[N, R], the derivative of the policy loss with respect to
    each token's log-probability; a role's share is its part of the sum of squares. It shows which role's tokens the loss
    affects most, and needs no second backward pass through the network.
    """
    stats: losses.Stats = {}
    squares = jnp.where(mask, slope**2, 0.0)
    for index, role in enumerate(roles):
        acts = (agents == index)[:, None]
        stats |= {f"by_role/{name}/{role}": losses.reduce_tokens(of, mask & acts, "token-mean") for name, of in tokens.items()}
        stats[f"by_role/logp_gradient_share/{role}"] = jnp.where(acts, squares, 0.0).sum(), squares.sum()
    return stats


def make_cloning_loss(model: ModelConfig, remat: str = "none") -> Loss:
    """Builds the cross-entropy of the responses: `loss(params, reference, batch)`, parameters as for `make_logprobs`."""
    logprobs = make_logprobs(model, remat=remat)

    def loss(params: Any, reference: Any, batch: TrainingBatch) -> tuple[jax.Array, losses.Stats, jax.Array]:
        logp, _ = logprobs(params, reference, batch)
        part = losses.reduce_tokens(-logp, batch.response_mask(), "token-mean")
        return part[0], {"loss": part}, jnp.float32(0)

    return loss


class EpochState(NamedTuple):
    """The state that an epoch carries from one optimizer step to the next."""

    params: Any
    opt_state: Any
    stats: losses.Stats  # sums over the steps so far
    grad_norm: jax.Array  # f32[], also a sum
    nonfinite_steps: jax.Array  # i32[], steps that were skipped and count in neither
    logp_difference: jax.Array  # f32[], the largest in the first mini-batch


def make_update(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    minibatch_size: int,
    microbatch_size: int,
    per_token: bool = True,
    compute_dtype: str = "float32",
) -> Update:
    """Builds `update(params, opt_state, reference, batch, order, count, lr_scale)`, to be called under `jax.jit`.

    Args:
      loss: `(params, reference, microbatch) -> (numerator, stats, max_difference)`; the numerator is a sum over tokens
        (`per_token`) or over decisions, stats are (numerator, denominator) pairs, max_difference is the largest difference
        between the log-probabilities of sampler and trainer, of interest in the first mini-batch.
      mesh: each device of its `data` axis takes its part of every mini-batch.
      minibatch_size: maximum decisions per optimizer step; an epoch is cut into equal steps.
      microbatch_size: sequences per index of the `data` axis and gradient computation, rounded up to a multiple of `fsdp`.
      compute_dtype: dtype of the copy of the parameters that the loss uses; the parameters themselves and the optimizer keep
        theirs. Gradients are summed in float32.
    `batch` is a TrainingBatch of N decisions. `order` i32[N] lists those to learn from in its first `count` (i32[]) entries;
    `lr_scale` f32[] scales the optimizer's step. Returns (params, opt_state, stats), with every stat a scalar mean over its
    denominator, plus `grad_norm` (mean), `optimizer_steps` and `logp_difference`, the largest of the first mini-batch. A
    mini-batch whose statistics or gradient are not finite changes nothing and is left out of the means; `nonfinite_steps`
    counts such mini-batches. With a count of 0 nothing changes, and every stat is 0.
    """
    sum_gradients = _make_sum_gradients(loss, mesh, minibatch_size, microbatch_size, compute_dtype)

    def epoch(
        params: Any,
        opt_state: Any,
        reference: Any,
        batch: TrainingBatch,
        order: jax.Array,
        count: jax.Array,
        lr_scale: jax.Array,
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        steps = -(-count // minibatch_size)  # none without a decision: momentum and weight decay would move the parameters
        size = -(-count // jnp.maximum(steps, 1))
        weight = batch.response_lengths if per_token else (batch.response_lengths > 0).astype(jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(weight[order])])

        def one_step(j: jax.Array, old: EpochState) -> EpochState:
            begin, stop = j * size, jnp.minimum((j + 1) * size, count)
            gradient, stats, difference = sum_gradients(old.params, reference, batch, order, begin, stop)
            scale = 1.0 / jnp.maximum(before[stop] - before[begin], 1)
            mean = jax.tree.map(lambda g, parameter: (g * scale).astype(parameter.dtype), gradient, old.params)
            new = _step(old, optimizer, mean, stats, lr_scale)
            return new._replace(logp_difference=jnp.where(j == 0, difference, old.logp_difference))

        nothing = _zeros(jax.eval_shape(lambda: sum_gradients(params, reference, batch, order, 0, 0)[1]))
        start = EpochState(params, opt_state, nothing, jnp.float32(0), jnp.int32(0), jnp.float32(0))
        end = jax.lax.fori_loop(0, steps, one_step, start)
        return end.params, end.opt_state, _means(end, steps)

    update: Update = jax.shard_map(epoch, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False)
    return update


def _means(end: EpochState, steps: jax.Array) -> dict[str, jax.Array]:
    """Returns what `update` reports of an epoch: means over the steps that were not skipped, and the counts of both."""
    return {name: losses.divide(part) for name, part in end.stats.items()} | {
        "grad_norm": end.grad_norm / jnp.maximum(steps - end.nonfinite_steps, 1),
        "optimizer_steps": steps,
        "nonfinite_steps": end.nonfinite_steps,
        "logp_difference": end.logp_difference,
    }


def _step(
    old: EpochState, optimizer: optax.GradientTransformation, gradient: Any, stats: losses.Stats, lr_scale: jax.Array
) -> EpochState:
    """Takes an optimizer step, unless the gradient or a statistic is not finite."""
    updates, opt_state = optimizer.update(gradient, old.opt_state, old.params)
    norm = optax.tree.norm(gradient)
    new = old._replace(
        params=optax.apply_updates(old.params, jax.tree.map(lambda u: u * lr_scale, updates)),
        opt_state=opt_state,
        stats=jax.tree.map(jnp.add, old.stats, stats),
        grad_norm=old.grad_norm + norm,
    )
    finite = jnp.isfinite(jnp.stack(jax.tree.leaves((norm, stats)))).all()
    state: EpochState = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return state._replace(nonfinite_steps=old.nonfinite_steps + ~finite)


def _make_sum_gradients(
    loss: Loss, mesh: Mesh, minibatch_size: int, microbatch_size: int, compute_dtype: str
) -> Callable[..., tuple[Any, losses.Stats, jax.Array]]:
    """Builds `sum_gradients(params, reference, batch, order, begin, stop) -> (gradient, stats, max_difference)`.

    It sums, and takes the maximum, over the decisions `order[begin:stop]`, micro-batch by micro-batch on all devices of the
    `data` axis; to be called in a shard_map over that axis.
    """
    devices, M = mesh.shape["data"], _round_up(microbatch_size, mesh.shape["fsdp"])
    data = _data_axis(mesh)

    def sum_gradients(
        params: Any, reference: Any, batch: TrainingBatch, order: jax.Array, begin: jax.Array | int, stop: jax.Array | int
    ) -> tuple[Any, losses.Stats, jax.Array]:
        def numerator(params: Any, microbatch: TrainingBatch) -> tuple[jax.Array, tuple[losses.Stats, jax.Array]]:
            total, stats, max_difference = loss(params, reference, microbatch)
            return total, (stats, max_difference)

        device, compute = jax.lax.axis_index("data"), cast(params, compute_dtype)
        assignment, sequences = assign_to_sequences(batch, order, begin, stop, min(minibatch_size, order.shape[0]))
        grad = _trim_predictions(jax.grad(numerator, has_aux=True), batch.usual_predictions())

        def gradient_of(i: jax.Array | int) -> tuple[Any, tuple[losses.Stats, jax.Array]]:
            _, microbatch = gather_microbatch(batch, assignment, (i * devices + device) * M, M)
            gradient, about = grad(compute, microbatch)
            return gradient, about

        def add(i: jax.Array, carry: tuple[Any, tuple[losses.Stats, jax.Array]]) -> tuple[Any, tuple[losses.Stats, jax.Array]]:
            total, (stats, max_difference) = carry
            new, (new_stats, new_max_difference) = gradient_of(i)
            total, stats = jax.tree.map(jnp.add, (total, stats), (new, new_stats))
            return total, (stats, jnp.maximum(max_difference, new_max_difference))

        zero = (cast(_zeros(params), "float32"), _zeros(jax.eval_shape(lambda: gradient_of(0)[1])))
        gradient, (stats, max_difference) = jax.lax.fori_loop(0, -(-sequences // (M * devices)), add, zero)
        gradient, stats = jax.lax.psum((gradient, stats), data)
        return gradient, stats, jax.lax.pmax(max_difference, data)

    return sum_gradients


def make_map(
    function: Callable[[Any, TrainingBatch], jax.Array], mesh: Mesh, *, microbatch_size: int
) -> Callable[[Any, TrainingBatch, jax.Array, jax.Array], jax.Array]:
    """Builds `mapped(params, batch, order, count) -> f32[N, ...]`, to be called under `jax.jit`.

    It applies `function(params, microbatch) -> f32[decisions in it, ...]` to the decisions `order[:count]` in micro-batches,
    split over the mesh's `data` axis; other decisions get 0. Arguments as in `make_update`.
    """
    devices, M = mesh.shape["data"], _round_up(microbatch_size, mesh.shape["fsdp"])
    data = _data_axis(mesh)

    def mapped(params: Any, batch: TrainingBatch, order: jax.Array, count: jax.Array) -> jax.Array:
        device = jax.lax.axis_index("data")
        trimmed = _trim_predictions(function, batch.usual_predictions())
        assignment, sequences = assign_to_sequences(batch, order, 0, count, order.shape[0])
        some = lambda i: gather_microbatch(batch, assignment, (i * devices + device) * M, M)  # noqa: E731
        shape = jax.eval_shape(lambda: function(params, some(0)[1])).shape

        def one_microbatch(i: jax.Array, out: jax.Array) -> jax.Array:
            index, microbatch = some(i)
            # Unused entries must not write.
            index = jnp.where(microbatch.response_lengths > 0, index, out.shape[0])
            return out.at[index].set(trimmed(params, microbatch), mode="drop")

        out = jax.lax.fori_loop(0, -(-sequences // (M * devices)), one_microbatch, jnp.zeros((order.shape[0], *shape[1:])))
        total: jax.Array = jax.lax.psum(out, data)
        return total

    on_shards: Callable[[Any, TrainingBatch, jax.Array, jax.Array], jax.Array] = jax.shard_map(
        mapped, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    return on_shards


def _trim_predictions(function: Callable[[Any, TrainingBatch], Any], width: int) -> Callable[[Any, TrainingBatch], Any]:
    """Builds `function(params, microbatch)`, with only `width` predictions of each sequence if none needs more.

    All devices run the same one of the two programs, as collectives require.
    """

    def trimmed(params: Any, microbatch: TrainingBatch) -> Any:
        layout = microbatch.layout
        if layout is None or layout.predict_slots.shape[1] == width:
            return function(params, microbatch)
        needed = max_across_devices((layout.offset + microbatch.response_lengths).max())

        def few(params: Any, microbatch: TrainingBatch) -> Any:
            return function(params, microbatch.replace(layout=layout.replace(predict_slots=layout.predict_slots[:, :width])))

        return jax.lax.cond(needed > width, function, few, params, microbatch)

    return trimmed


def _zeros(shapes: Any) -> Any:
    """Makes zeros of these shapes and dtypes."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _data_axis(mesh: Mesh) -> tuple[str, ...]:
    """Lists the axes to sum over. XLA rejects an all-reduce over a manual axis of size 1 beside axes that it splits itself."""
    return ("data",) if mesh.shape["data"] > 1 else ()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
