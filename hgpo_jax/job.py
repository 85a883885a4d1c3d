"""From a configuration to the things that a command works with: mesh, environment, policy and compiled rollout."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from envs.household import Household
from hgpo_jax import memory
from hgpo_jax.config import Config, ConfigError
from hgpo_jax.learner import cast
from hgpo_jax.mesh import make_mesh
from hgpo_jax.methods import METHODS, Method
from hgpo_jax.policy import ModelConfig, Policy, initialize, load_policy
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

    def compute_copy(self, params):
        """The parameters in the type that samples and that the loss sees; the same ones where that is theirs already."""
        dtype = self.config.policy.compute_dtype
        return params if dtype == self.config.policy.dtype else jax.jit(cast, static_argnums=1)(params, dtype)

    @property
    def method(self) -> Method:
        """What `method=` stands for."""
        return METHODS[self.config.method]

    def episode_inputs(self, iteration: int, attempt: int = 0) -> tuple:
        """What `rollout` takes beside the parameters for one training iteration.

        Equal for equal seed, iteration and attempt; further attempts (dynamic sampling) get tasks of their own.
        """
        settings = self.config.rollout
        groups = jnp.arange(self.batch, dtype=jnp.int32) // settings.group_size
        number = iteration * settings.max_tries + attempt if self.method.dynamic_sampling else iteration
        tasks = task_keys("train", self.config.seed, number * settings.prompt_groups + groups)
        return tasks, jax.random.split(self.key(number, 0), self.batch), groups, settings.temperature

    def abstract_episodes(self) -> Episodes:
        """The shapes of one iteration's episodes, nothing computed."""
        return jax.eval_shape(self.rollout, self.policy.params, *self.episode_inputs(0))

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
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if episodes % parts:
        raise ConfigError(
            f"mesh={config.mesh}: data x fsdp = {parts} does not divide the {episodes} episodes of an iteration "
            f"(rollout.prompt_groups x rollout.group_size)"
        )
    return mesh


def check_memory(config: Config, mesh: Mesh) -> None:
    """Raises ConfigError, after printing the plan, where the devices cannot hold what the run needs."""
    try:
        planned = memory.plan(config, mesh, memory.work_of(config, mesh))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    limit, needed = memory.of_device(mesh.devices.flat[0]), memory.peak(planned)
    if limit and needed > memory.USABLE * limit:
        print(memory.table(planned))
        raise ConfigError(
            f"mesh={config.mesh}: {needed / memory.GiB:.1f} GiB on each device, which hold {limit / memory.GiB:.1f}; take "
            "more devices for fsdp or tensor, a smaller learner.microbatch_size or rollout.chunk, or learner.remat=true"
        )


def make_policy(config: Config, env: Household, mesh: Mesh) -> Policy:
    """The configured policy: given weights, or fresh ones for the environment's words. Raises ConfigError."""
    settings = config.policy
    words = word_tokenizer(env.words)
    if not settings.source:
        try:
            model = ModelConfig(vocab_size=vocabulary_size(env.words), **settings.sizes)
        except ValueError as error:
            raise ConfigError(f"policy.{error}") from None
        try:
            params = initialize(model, config.seed, mesh)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return Policy(model, cast(params, settings.dtype), words)
    if config.warm_start == "cloning":
        raise ConfigError("warm_start=cloning: makes weights from nothing; give warm_start=none where policy= gives them")
    try:
        policy = load_policy(settings.source, mesh, settings.dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if policy.tokenizer is None or policy.tokenizer.get_vocab() != words.get_vocab():
        raise ConfigError(
            f"policy.source={settings.source}: its tokenizer does not hold the words of this household; "
            "give a policy that was trained on env.places, env.things and env.tasks as they are here"
        )
    return policy


def build(config: Config) -> Job:
    """Builds a job. Raises ConfigError for what cannot work, before any real computation."""
    mesh = prepare_devices(config)
    jax.set_mesh(mesh)
    jax.config.update("jax_compilation_cache_dir", os.path.join(config.cache_dir, "compiled"))
    try:
        env = Household(**config.env.model_dump(exclude={"name"}))
    except ValueError as error:
        raise ConfigError(f"env.{error}") from None
    check_memory(config, mesh)
    policy = make_policy(config, env, mesh)
    tokenizer = policy.tokenizer
    rollout = make_rollout(
        env, policy.graphdef, mesh, history_length=config.rollout.history_length, chunk=config.rollout.chunk,
        end=tokenizer.eos_token_id, act=tokenizer.convert_tokens_to_ids(ACT),
    )  # fmt: skip
    return Job(config=config, mesh=mesh, env=env, policy=policy, rollout=rollout)
