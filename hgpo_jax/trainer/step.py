"""One iteration of training: sample episodes, estimate advantages, update policy and critic."""

from __future__ import annotations

import functools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax import advantages
from hgpo_jax.advantages.hiper import segment_begins
from hgpo_jax.config import Config
from hgpo_jax.config.policies import SHARED, members
from hgpo_jax.learner import conversations, losses
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.critic import initialize_critic, make_value_loss, make_values, targets, values_of_episodes
from hgpo_jax.learner.logprobs import make_logprobs
from hgpo_jax.learner.loss_table import WHOLE_RESPONSES, aggregation, name_of, parameters
from hgpo_jax.learner.methods import estimate_episodes
from hgpo_jax.learner.objective import make_policy_loss
from hgpo_jax.learner.optimizer import frozen_parts, make_optimizer
from hgpo_jax.learner.update import make_map, make_update
from hgpo_jax.policy.placement import cast, storage_shardings
from hgpo_jax.rollout.backend import converses
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.rewards import overlong
from hgpo_jax.rollout.runners import CompiledRunner
from hgpo_jax.rollout.state_keys import regroup
from hgpo_jax.setup.job import Job, PolicySetup
from hgpo_jax.trainer.dynamic_sampling import sample_informative
from hgpo_jax.trainer.metrics import advantage_metrics, role_advantages, rollout_sums
from hgpo_jax.utils.errors import RunError


def sample(job: Job, params, iteration: int) -> tuple[RolloutResult, list[dict], dict[str, float]]:
    """Samples the episodes to learn from; does not wait for a compiled rollout unless it is a team's.

    params: `Job.rollout_params`.

    Returns: the episodes with their report, the `metrics.rollout_sums` of each rollout, and further metrics. There is no report
    with dynamic sampling (`dynamic_sampling.py`).

    Raises RunError if every episode of a host rollout failed (for a compiled one `Alarms` raises it, because it waits for the
    metrics), and if roles learn in turns and a role other than the first one acts first.
    """
    with job.on_rollout_mesh():
        result, sums, counts = _sample(job, params, iteration)
    return RolloutResult(job.to_update(result.episodes), result.report), sums, counts


def _sample(job: Job, params, iteration: int) -> tuple[RolloutResult, list[dict], dict[str, float]]:
    settings = job.config.rollout
    if not job.method.dynamic_sampling:
        result, of_one = _rewarded_rollout(job, params, iteration)
        counts = result.report.counts if result.report else {}
        return RolloutResult(punish_overlong(job, result.episodes), result.report), [of_one], counts
    reports = []

    def rollout(attempt: int) -> tuple[RolloutResult, dict]:
        result, of_one = _rewarded_rollout(job, params, iteration, attempt)
        reports.append(result.report.counts if result.report else {})
        return result, of_one

    batch, sums, filled = sample_informative(rollout, settings.prompt_groups, settings.group_size)
    further = {name: _over_rollouts(name, [counts[name] for counts in reports]) for name in reports[0]}
    return RolloutResult(punish_overlong(job, batch), None), sums, {"rollouts": len(sums), "kept_groups": filled} | further


def _over_rollouts(name: str, values: list[float]) -> float:
    """Returns a count of several rollouts: of longest ones the maximum, of shares the mean, of others the sum."""
    if name.startswith("longest"):
        return max(values)
    shares = name.startswith("failed/") or name in ("branches", "slot_use", "reused_share")
    return sum(values) / (len(values) if shares else 1)


def _rewarded_rollout(job: Job, params, iteration: int, attempt: int = 0) -> tuple[RolloutResult, dict]:
    """Runs a rollout with the configured rewards; returns it and its sums."""
    if job.partial:
        result = job.partial(params, iteration)
    else:
        result = job.runner.rollout(params, *job.episode_inputs(iteration, attempt))
    if job.learning_role(iteration) is not None:
        begun, agents = result.episodes.mask[:, 0], result.episodes.agents[:, 0]
        first = int(jnp.where(begun, agents, 0).max())  # over the episodes of all processes
        if first:  # the turn that a prompt group shares would be one of the turns to learn from
            raise RunError(
                f"method={job.config.method}: of roles that learn in turns the first, {job.runner.roles[0]}, must act first, "
                f"but {job.runner.roles[first]} did; list the environment's roles in another order"
            )
    rewards: dict = {}
    if job.reward:
        result, rewards = job.reward(result)
    if job.config.reward.overlong_cache:
        rewards["reward/overlong"] = overlong(job.config, result.episodes).sum()
    if job.config.env.state_key or job.config.advantage.similarity is not None:
        result = regroup(result, job.config)
    if result.report and not result.episodes.mask.any():
        failures = result.report.failures
        raise RunError(
            f"iteration {iteration + 1}: all {len(failures)} episodes failed, in the first one: {failures[min(failures)]}"
        )
    signals = {f"signal/{name}": values.sum() for name, values in result.episodes.signals_by_name(job.signals).items()}
    unknown = result.report and (result.episodes.mask[:, 0] & ~result.episodes.judged).any()
    if unknown and "success" in advantages.parameters(job.method.estimator)[0]:
        raise RunError(f"method={job.config.method}: needs to know which episodes are won, and the environment does not say it")
    return result, rollout_sums(result.episodes, job.config.advantage.gamma, job.runner.roles) | rewards | signals


def punish_overlong(job: Job, e: Episodes) -> Episodes:
    """Applies `rewards.overlong`; after dynamic sampling, which selects by success, not by length, as in the DAPO paper."""
    if not job.config.reward.overlong_cache:
        return e
    return e.replace(rewards=e.rewards + overlong(job.config, e))


class TrainState(struct.PyTreeNode):
    """Everything that an iteration changes; a checkpoint holds it and nothing else.

    params: {name of a policy: its weights or, with LoRA, its adapters}.
    opt_state: {name of a policy: its optimizer's state}.
    critic: the same two for the critic; None for a method without one.
    sampler: with `rollout.overlap`, {name of a policy: `PolicySetup.sampling_copy` of its params before the last update}, with
      which the next episodes are sampled; else None.
    partial: with `rollout.keep`, `PartialRollout.snapshot` after the last rollout that was learned from; else None.
    """

    params: dict[str, dict]
    opt_state: dict[str, Any]
    critic: CriticState | None = None
    sampler: dict[str, dict] | None = None
    partial: dict[str, np.ndarray] | None = None

    def to_checkpoint(self) -> dict[str, Any]:
        """Returns the dicts that a checkpoint file holds, the same since the first release: of one policy without a name."""
        others = {"critic": {"params": self.critic.params, "opt_state": self.critic.opt_state}} if self.critic else {}
        others |= {"partial": self.partial} if self.partial else {}
        trees = {"params": self.params, "opt_state": self.opt_state} | ({"sampler": self.sampler} if self.sampler else {})
        return {name: tree.get(SHARED, tree) for name, tree in trees.items()} | others

    def from_checkpoint(self, saved: dict[str, Any]) -> TrainState:
        """Returns the state of the dicts of `to_checkpoint`; this one has the same policies."""
        critic = CriticState(**saved["critic"]) if "critic" in saved else None
        trees = {name: tree for name, tree in saved.items() if name not in ("critic", "partial")}
        if SHARED in self.params:
            trees = {name: {SHARED: tree} for name, tree in trees.items()}
        return TrainState(**trees, critic=critic, partial=saved.get("partial"))


class CriticState(struct.PyTreeNode):
    """The critic's weights and its optimizer's state."""

    params: dict
    opt_state: Any


def make_train_step(job: Job):
    """Builds the training half of an iteration.

    Returns: (`train_step(state, reference, episodes, key, lr_scale, role=None) -> (state, metrics)`, jitted, with the state
    donated, which comes and goes without `sampler` and `partial`; `init(params) -> TrainState` from the initial weights). With
    `learner.offload`, everything but `state.params` is stored in the host's memory between calls. With a role, i32[], the
    policy learns from the turns of that role: the advantages of the others count as 0, so that only the KL and the entropy
    bonus act on them.
    """
    optimizers, updates = {}, {}
    for name, policy in job.policies.items():
        optimizers[name], updates[name] = _make_policy_update(job, policy)
    update_policies = _make_shared_update(updates) if SHARED in updates else _make_separate_updates(updates, job.runner.roles)
    if job.method.critic:
        critic_optimizer, predict_values, update_critic = _make_critic(job)
    init = functools.partial(_initial_state, job, optimizers, critic_optimizer if job.method.critic else None)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, reference, episodes: Episodes, key, lr_scale, role=None):
        state = _move_state(job, state, store=False)
        reference = job.by_policy(functools.partial(_move, store=False), reference)
        batch = training_batch(episodes)
        if len(job.runner.roles) > 1:
            batch = batch.replace(agents=_flat(episodes.agents))
        if converses(job.config):
            batch = batch.replace(chain=_flat(conversations.chains(episodes)))
        happened = _flat(episodes.mask)
        unfinished = _unfinished(job, batch, episodes)
        order, count = _shuffle(key, happened, batch.chain)

        final_values = None
        if state.critic:
            predict = functools.partial(predict_values, state.critic.params)
            values, final_values = values_of_episodes(predict, batch, episodes, order, count)
            batch = batch.replace(values=values)
        estimate = _estimate(job, episodes, batch.values, final_values)
        by_token = _by_token(job, estimate, episodes.responses.shape[-1])
        batch = batch.replace(advantages=_flat(_of_learning_role(by_token, episodes, role)))
        if "margins" in parameters(name_of(job.config.learner, job.method))[0]:
            margins = by_token if estimate.margins is None else estimate.margins
            batch = batch.replace(margins=_flat(_of_learning_role(margins, episodes, role)))

        kept = happened if estimate.keep is None else _flat(estimate.keep)
        learned = kept & ~unfinished if job.config.learner.unfinished == "mask" else kept
        params, opt_state, metrics = update_policies(state, reference, batch, learned, key, lr_scale, role)
        critic = state.critic
        if critic:
            batch = _with_targets(job, batch, episodes, estimate)
            critic, critic_metrics = update_critic(critic, batch, order, count, lr_scale)
            metrics["nonfinite_steps"] += critic_metrics.pop("nonfinite_steps")
            metrics |= critic_metrics
        metrics["unfinished_share"] = unfinished.sum() / jnp.maximum(count, 1)
        if batch.chain is not None:
            metrics |= conversations.statistics(batch)
        metrics |= advantage_metrics(episodes.mask, estimate)
        metrics |= role_advantages(episodes, estimate.advantages, job.runner.roles)
        return _move_state(job, TrainState(params, opt_state, critic), store=True), metrics

    return train_step, init


def _unfinished(job: Job, batch: TrainingBatch, e: Episodes) -> jax.Array:
    """Marks the decisions whose answer was cut at its limit, bool[N]."""
    if e.finished is None:
        return batch.unfinished(job.runner.end_tokens)
    return _flat(e.mask & ~e.finished)


def _initial_state(job: Job, optimizers, critic_optimizer, params) -> TrainState:
    """Makes the state before the first update. optimizers: of each policy; critic_optimizer: None without a critic."""
    trained = job.by_policy(PolicySetup.trainable, params)
    opt_state = job.by_policy(lambda policy, o, trained: _create_stored(policy, o.init, trained), optimizers, trained)
    sampler = job.by_policy(PolicySetup.sampling_copy, trained) if job.config.rollout.overlap else None
    partial = job.partial.snapshot() if job.partial else None
    if critic_optimizer is None:
        return TrainState(trained, opt_state, sampler=sampler, partial=partial)
    create = functools.partial(initialize_critic, heads=(3,) if job.method.parts else ())
    critic = _create_stored(job.policy, create, params[SHARED])
    stored = CriticState(critic, _create_stored(job.policy, critic_optimizer.init, critic))
    return TrainState(trained, opt_state, stored, sampler, partial)


def _of_learning_role(values: jax.Array, e: Episodes, role) -> jax.Array:
    """Returns what to learn from, f32[B, T] or by token f32[B, T, R]: 0 in turns of roles that do not learn."""
    if role is None:
        return values
    learns = e.agents == role
    return jnp.where(learns.reshape(learns.shape + (1,) * (values.ndim - 2)), values, 0.0)


def _make_shared_update(updates: dict):
    """Builds the update of the policy that all roles share, as `_make_separate_updates` does."""

    def update(state: TrainState, reference, batch: TrainingBatch, learned, key, lr_scale, role):
        old = state.params[SHARED], state.opt_state[SHARED], reference[SHARED]
        params, opt_state, metrics = updates[SHARED](*old, batch, *_shuffle(key, learned, batch.chain), lr_scale)
        return {SHARED: params}, {SHARED: opt_state}, metrics

    return update


def _make_separate_updates(updates: dict, roles: Sequence[str]):
    """Builds `update(state, reference, batch, learned, key, lr_scale, role) -> (params, opt_state, metrics)`.

    It updates each policy on the decisions of its own roles.

    learned: bool[N], the decisions to learn from. A policy without any stays unchanged, and so does, with a learning role, a
    policy that this role does not use.
    """

    def update(state: TrainState, reference, batch: TrainingBatch, learned, key, lr_scale, role):
        assert batch.agents is not None
        params, opt_state, stats, counts = {}, {}, {}, {}
        for number, (name, update_policy) in enumerate(updates.items()):
            is_member = jnp.array(members(name, roles))
            order, count = _shuffle(jax.random.fold_in(key, number), learned & is_member[batch.agents], batch.chain)
            counts[name] = count if role is None else jnp.where(is_member[role], count, 0)
            old = state.params[name], state.opt_state[name]
            learn = functools.partial(update_policy, *old, reference[name], batch, order, counts[name], lr_scale)
            *_, shapes = jax.eval_shape(learn)
            nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            params[name], opt_state[name], stats[name] = jax.lax.cond(
                counts[name] > 0, learn, lambda old=old, nothing=nothing: (*old, nothing)
            )
        return params, opt_state, _metrics_of_policies(stats, counts, roles)

    return update


def _metrics_of_policies(stats: dict[str, dict], counts: dict[str, jax.Array], roles: Sequence[str]) -> dict:
    """Combines the statistics of several policies' updates.

    They are means over the policies, weighted by their decisions; but numbers of steps are added, and `logp_difference` is the
    largest. The metrics of a role are those of its policy.
    """
    total, metrics = jnp.maximum(sum(counts.values()), 1), {}
    for part in next(iter(stats.values())):
        values = {name: of_policy[part] for name, of_policy in stats.items()}
        if part.startswith("by_role/"):
            name = next(name for name in stats if any(members(name, [part.rpartition("/")[2]])))
            alone = sum(members(name, roles)) == 1 and part.startswith("by_role/logp_gradient_share/")
            metrics[part] = jnp.where((counts[name] > 0) & (not alone), values[name], jnp.nan)
        elif part in ("optimizer_steps", "nonfinite_steps"):
            metrics[part] = sum(values.values())
        elif part == "logp_difference":
            metrics[part] = functools.reduce(jnp.maximum, values.values())
        else:
            metrics[part] = sum(counts[name] * value for name, value in values.items()) / total
    for name, of_policy in stats.items():
        norm = jnp.where(counts[name] > 0, of_policy["grad_norm"], jnp.nan)
        metrics |= {f"by_role/grad_norm/{role}": norm for role in name.split("+")}
    return metrics


def training_batch(e: Episodes) -> TrainingBatch:
    """Returns the N = B x T turns of episodes as decisions, including those that did not happen; advantages are 0."""
    return TrainingBatch(
        prompts=_flat(e.prompts),
        prompt_lengths=_flat(e.prompt_lengths),
        responses=_flat(e.responses),
        response_lengths=_flat(e.response_lengths),
        old_logp=_flat(e.logp),
        advantages=jnp.zeros(e.mask.size),
        allowed=None if e.allowed is None else _flat(e.allowed),
        pictures=None if e.pictures is None else _flat(e.pictures),
    )


def _flat(a):
    """Reshapes [B, T, ...] to [B x T, ...]."""
    return a.reshape(-1, *a.shape[2:])


def _shuffle(key, happened, chain):
    """Shuffles decisions; returns indices i32[N], those that happened (bool[N]) first, and their number i32[].

    chain: i32[N] or None, as in `TrainingBatch`; its decisions follow each other, so that a boundary of mini-batches cuts at
    most one chain in two.
    """
    place = jax.random.uniform(key, happened.shape)
    if chain is not None:
        place = place[chain]
    return jnp.argsort(place + 2.0 * ~happened), happened.sum()


def _estimate(job: Job, e: Episodes, values, final_values) -> advantages.Estimate:
    """Returns the method's advantages.

    values: f32[N, ...] from the critic, and final_values: f32[B, ...], as `values_of_episodes` returns them.
    """
    name = job.method.estimator
    arrays: dict[str, Any] = {}
    if job.method.parts:
        by_part = jnp.moveaxis(values.reshape(*e.mask.shape, 3), -1, 0)
        arrays = dict(zip(("term_values", "high_values", "low_values"), by_part, strict=True))
        arrays |= {"switches": _planning(job).switches(e), "final_values": final_values[:, 1]}
    elif job.method.critic:
        arrays = {"values": values.reshape(e.mask.shape), "final_values": final_values}
    return estimate_episodes(job.config, e, name, **arrays)


def _planning(job: Job) -> CompiledRunner:
    """Returns the runner of a method whose answers have parts; `check_together` rejects all but compiled ones."""
    return typing.cast(CompiledRunner, job.runner)


def _by_token(job: Job, estimate: advantages.Estimate, slots: int) -> jax.Array:
    """Spreads advantages over tokens: f32[B, T]; if an answer has parts f32[B, T, R], and the end belongs to the action."""
    if estimate.part_advantages is None:
        return estimate.advantages
    switch, subgoal, _ = _planning(job).answer_parts
    return estimate.part_advantages[..., np.repeat(np.arange(3), (switch, subgoal, slots - switch - subgoal))]


def _with_targets(job: Job, batch: TrainingBatch, e: Episodes, estimate: advantages.Estimate) -> TrainingBatch:
    """Adds the critic's targets to the decisions."""
    if estimate.part_returns is None:
        return batch.replace(returns=_flat(estimate.returns))
    every = jnp.ones(e.mask.shape, bool)
    has_target = jnp.stack([every, segment_begins(_planning(job).switches(e), e.mask), every], axis=-1)
    return batch.replace(returns=_flat(estimate.part_returns), has_target=_flat(has_target))


def _update_sizes(config: Config) -> dict:
    """Returns the options of `make_update` that policy and critic share."""
    return {
        "minibatch_size": config.learner.minibatch_size,
        "microbatch_size": config.learner.microbatch_size,
        "compute_dtype": config.policy.compute_dtype,
    }


def _make_policy_update(job: Job, policy: PolicySetup):
    """Returns (optimizer, the policy's `make_update`, preceded by `learner.rollout_correction`)."""
    config, method, learner = policy.settings, job.method, policy.settings.learner
    optimizer = make_optimizer(
        learner.lr,
        learner.warmup_steps,
        learner.grad_clip,
        weight_decay=learner.weight_decay,
        frozen=frozen_parts(policy.model),
    )
    plans = "planning" in parameters(name_of(learner, method))[0]
    plan_words = sum(_planning(job).answer_parts[:2]) if plans else 0
    loss = make_policy_loss(policy.model, learner, method, config.rollout.temperature, job.runner.roles, plan_words)
    per_token = aggregation(config.learner, method) == "token-mean"
    update = make_update(loss, optimizer, job.mesh, **_update_sizes(config), per_token=per_token)
    level = config.learner.rollout_correction
    if level == "none":
        return optimizer, update
    logprobs = make_logprobs(policy.model, config.rollout.temperature)
    mapped = make_map(
        lambda params, batch: logprobs(params[0], params[1], batch)[0], job.mesh, microbatch_size=config.learner.microbatch_size
    )

    def corrected_update(params, opt_state, reference, batch: TrainingBatch, order, count, lr_scale):
        old_logp = mapped((cast(params, config.policy.compute_dtype), reference), batch, order, count)
        learned = jnp.zeros(order.shape, bool).at[order].set(jnp.arange(order.shape[0]) < count)
        mask = batch.response_mask() & learned[:, None]
        if level == "mask":
            limits = {"response_limit": learner.mask_response, "token_limit": learner.mask_token}
            weights, correction = losses.mismatch_mask(old_logp, batch.old_logp, mask, **limits)
        else:
            weights, correction = losses.rollout_correction(old_logp, batch.old_logp, mask, level=level)
        if name_of(learner, method) in WHOLE_RESPONSES:  # as `check_together` ensures, advantages and weights do, too
            weighted = batch.advantages * weights[:, 0]
        else:
            weighted = (batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None]) * weights
        difference = jnp.where(mask, jnp.abs(old_logp - batch.old_logp), 0.0).max(initial=0.0)
        batch = batch.replace(old_logp=batch.old_logp if level == "mask" else old_logp, advantages=weighted)
        params, opt_state, stats = update(params, opt_state, reference, batch, order, count, lr_scale)
        stats |= {f"correction/{name}": value for name, value in correction.items()} | {"logp_difference": difference}
        return params, opt_state, stats

    return optimizer, corrected_update


def _make_critic(job: Job):
    """Returns (optimizer, `predict(params, batch, order, count) -> f32[N, ...]`,
    `update(state, batch, order, count, lr_scale)`)."""
    config, critic = job.config, job.config.critic
    optimizer = make_optimizer(critic.lr, critic.warmup_steps, critic.grad_clip)
    plan_words = sum(_planning(job).answer_parts[:2]) if job.method.parts else 0
    values = make_values(job.policy.initial.config, config.learner.remat, plan_words)
    mapped = make_map(values, job.mesh, microbatch_size=config.learner.microbatch_size)
    loss = make_value_loss(values, critic.value_clip)
    step = make_update(loss, optimizer, job.mesh, **_update_sizes(config), per_token=False)

    def predict(params, batch: TrainingBatch, order, count):
        return mapped(cast(params, config.policy.compute_dtype), batch, order, count)

    def update(state: CriticState, batch: TrainingBatch, order, count, lr_scale):
        params, opt_state, stats = step(state.params, state.opt_state, None, batch, order, count, lr_scale)
        assert batch.returns is not None
        variance = jnp.var(batch.returns, where=targets(batch))
        return CriticState(params, opt_state), {
            "critic/loss": stats["loss"],
            "critic/grad_norm": stats["grad_norm"],
            "critic/value_clip_fraction": stats["value_clip_fraction"],
            "critic/explained": 1 - stats["squared_error"] / jnp.maximum(variance, 1e-8),
            "nonfinite_steps": stats["nonfinite_steps"],
        }

    return optimizer, predict, update


def _create_stored(policy: PolicySetup, create, params):
    """Computes and places `create(params)`: arrays that match one of the policy's are sharded like it, others replicated."""
    shapes = jax.eval_shape(create, params)
    shardings = storage_shardings(shapes, policy.model, policy.mesh, offload=policy.settings.learner.offload)
    return jax.jit(create, out_shardings=shardings)(params)


def _move(policy: PolicySetup, tree, *, store: bool):
    """With `learner.offload`, moves arrays of a policy or its critic to the host's memory, or back to the devices."""
    if not policy.settings.learner.offload:
        return tree
    return jax.device_put(tree, storage_shardings(tree, policy.model, policy.mesh, offload=store))


def _move_state(job: Job, state: TrainState, *, store: bool) -> TrainState:
    """With `learner.offload`, moves all of the state but `params` to the host's memory, or all of it back to the devices."""
    move = functools.partial(_move, store=store)
    params = state.params if store else job.by_policy(move, state.params)
    return TrainState(params, job.by_policy(move, state.opt_state), state.critic and move(job.policy, state.critic))
