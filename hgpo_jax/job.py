"""From a configuration to the things that a command works with: mesh, environment, policy, compiled rollout and update."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envs.household import Household
from hgpo_jax import advantages
from hgpo_jax.config import Config, ConfigError
from hgpo_jax.learner import Rows, make_optimizer, make_policy_loss, make_update
from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, Policy, initialize, shardings
from hgpo_jax.policy.tokenizer import ACT, vocabulary_size, word_tokenizer
from hgpo_jax.rollout.compiled import make_rollout
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.tasks import task_keys


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything built once. `policy.params` are freshly initialized; training keeps its own."""

    config: Config
    mesh: Mesh
    env: Household
    policy: Policy
    rollout: Callable  # (params, task_keys, keys, groups, temperature) -> Episodes

    @property
    def batch(self) -> int:
        """Episodes per rollout."""
        return self.config.rollout.prompt_groups * self.config.rollout.group_size

    def episode_inputs(self, iteration: int) -> tuple:
        """What `rollout` takes beside the parameters for one training iteration; equal for equal seed and iteration."""
        settings = self.config.rollout
        groups = jnp.arange(self.batch, dtype=jnp.int32) // settings.group_size
        tasks = task_keys("train", self.config.seed, iteration * settings.prompt_groups + groups)
        return tasks, jax.random.split(self.key(iteration, 0), self.batch), groups, settings.temperature

    def training_episodes(self, params, iteration: int) -> Episodes:
        """One iteration's episodes."""
        return self.rollout(params, *self.episode_inputs(iteration))

    def abstract_episodes(self) -> Episodes:
        """The shapes of `training_episodes`, nothing computed."""
        return jax.eval_shape(self.training_episodes, self.policy.params, 0)

    def key(self, iteration: int, purpose: int):
        """The random key of an iteration for one purpose (0 sampling, 1 shuffling)."""
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), iteration), purpose)


def prepare_devices(config: Config) -> Mesh:
    """Sets up the back end and the mesh, before anything else uses jax.

    On a CPU every core becomes a device: data parallelism over cores uses small matrices better than threads inside
    each operation do.

    Raises:
      ConfigError: a mesh that does not fit the devices or the batch.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not forced:
        with contextlib.suppress(RuntimeError):  # a program that used jax before keeps its devices
            jax.config.update("jax_num_cpu_devices", cores)
    devices, spec = jax.devices(), config.mesh
    episodes = config.rollout.prompt_groups * config.rollout.group_size
    if spec == "auto":
        # As many devices as share the episodes equally.
        count = max(n for n in range(1, len(devices) + 1) if episodes % n == 0)
        devices, spec = devices[:count], f"data={count}"
    try:
        mesh = make_mesh(spec, devices)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if episodes % mesh.shape["data"]:
        raise ConfigError(
            f"mesh={config.mesh}: data={mesh.shape['data']} does not divide the {episodes} episodes of an iteration "
            f"(rollout.prompt_groups x rollout.group_size)"
        )
    return mesh


def build(config: Config) -> Job:
    """Builds a job. Raises ConfigError for what cannot work, before any real computation."""
    mesh = prepare_devices(config)
    jax.set_mesh(mesh)
    jax.config.update("jax_compilation_cache_dir", os.path.join(config.cache_dir, "compiled"))
    try:
        env = Household(**config.env.model_dump(exclude={"name"}))
    except ValueError as error:
        raise ConfigError(f"env.{error}") from None
    tokenizer = word_tokenizer(env.words)
    try:
        model = ModelConfig(vocab_size=vocabulary_size(env.words), **config.policy.model_dump())
    except ValueError as error:
        raise ConfigError(f"policy.{error}") from None
    try:
        params = initialize(model, config.seed, mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    policy = Policy(model, params, tokenizer)
    rollout = make_rollout(
        env, policy.graphdef, mesh, history_length=config.rollout.history_length, chunk=config.rollout.chunk,
        end=tokenizer.eos_token_id, act=tokenizer.convert_tokens_to_ids(ACT),
    )  # fmt: skip
    return Job(config=config, mesh=mesh, env=env, policy=policy, rollout=rollout)


def estimator_options(config: Config) -> dict:
    """The options of the configured method's estimator."""
    values = config.advantage.model_dump() | {"history_length": config.rollout.history_length}
    _, known = advantages.parameters(config.method)
    return {name: values[name] for name in known if values[name] is not None}


def make_learn(job: Job):
    """Builds the training half of an iteration.

    Returns: (`learn(params, opt_state, reference, episodes, key, lr_share) -> (params, opt_state, metrics)`, jitted, with
    the first two donated; `init(params) -> opt_state`).
    """
    config = job.config
    optimizer = make_optimizer(config.learner)
    update = make_update(
        make_policy_loss(job.policy.graphdef, config.learner, config.rollout.temperature), optimizer, job.mesh,
        minibatch_size=config.learner.minibatch_size, microbatch_size=config.learner.microbatch_size,
        per_token=config.learner.aggregate == "token-mean",
    )  # fmt: skip
    options = estimator_options(config)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def learn(params, opt_state, reference, episodes: Episodes, key, lr_share):
        e = episodes
        estimate = advantages.estimate(
            config.method,
            rewards=e.rewards,
            mask=e.mask,
            states=e.states,
            groups=e.groups,
            invalid=e.invalid,
            **options,
        )
        flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
        rows = Rows(
            prompts=flat(e.prompts),
            prompt_lengths=flat(e.prompt_lengths),
            responses=flat(e.responses),
            response_lengths=flat(e.response_lengths),
            old_logp=flat(e.logp),
            advantages=flat(estimate.advantages),
        )
        happened = flat(e.mask)
        order = jnp.argsort(jax.random.uniform(key, happened.shape) + 2.0 * ~happened)
        params, opt_state, stats = update(params, opt_state, reference, rows, order, happened.sum(), lr_share)
        stats["logp_difference"] = stats.pop("worst")
        return params, opt_state, stats | _batch_metrics(e, estimate, config.advantage.gamma)

    return learn, _make_init(optimizer, job)


def _make_init(optimizer, job: Job):
    """`init(params)` with the optimizer's moments placed like their parameters."""
    place = {
        jax.tree_util.keystr(p): s
        for p, s in jax.tree_util.tree_leaves_with_path(shardings(job.policy.config, job.mesh))
    }
    everywhere = NamedSharding(job.mesh, PartitionSpec())

    def sharding_of(path, _):
        name = jax.tree_util.keystr(path)
        return next((s for suffix, s in place.items() if name.endswith(suffix)), everywhere)

    shapes = jax.eval_shape(optimizer.init, job.policy.params)
    return jax.jit(optimizer.init, out_shardings=jax.tree_util.tree_map_with_path(sharding_of, shapes))


def _batch_metrics(e: Episodes, estimate, gamma: float) -> dict:
    """Scalars that describe a batch of episodes and its advantages."""
    steps = jnp.maximum(e.mask.sum(), 1)
    metrics = {
        "success": e.success.mean(),
        "return": (e.rewards * gamma ** jnp.arange(e.rewards.shape[1])).sum(1).mean(),
        "turns": e.mask.sum(1).mean(),
        "invalid": (e.invalid & e.mask).sum() / steps,
        "steps": e.mask.sum(),
        "tokens": (e.prompt_lengths + e.response_lengths).sum(where=e.mask),
        "advantage_abs": jnp.abs(estimate.advantages).sum() / steps,
        "advantage_zero": ((estimate.advantages == 0) & e.mask).sum() / steps,
    }
    for column, level in enumerate(estimate.levels):
        metrics[f"peers/level{level}"] = ((estimate.level_sizes[..., column] > 1) & e.mask).sum() / steps
    return metrics | {name: value for name, value in estimate.stats.items() if value.ndim == 0}
