"""Builds everything that a command works with from a Config: mesh, policy, environment, rollout, rewards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hgpo_jax.advantages import parameters
from hgpo_jax.config import Config
from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.loss_table import check_loss_numbers
from hgpo_jax.learner.methods import FIRST_SIGNAL, TEAM_REWARD, Method, check_numbers, method_named
from hgpo_jax.policy import LoraConfig, ModelConfig, Policy, initialize, load_policy, lora
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.placement import cast, shardings_like, storage_shardings
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.rollout.backend import backend, make_one
from hgpo_jax.rollout.env_tokenizer import fresh_tokenizer
from hgpo_jax.rollout.environments import Makers, environment
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.rewards import Reward, TextReward, make_reward
from hgpo_jax.rollout.runners import CompiledRunner, TextRunner
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.agent_rollout import AgentRunner
from hgpo_jax.setup import memory
from hgpo_jax.setup.sight import check_sight, tower_is_frozen
from hgpo_jax.setup.validate import check_together, mesh_of_rollouts
from hgpo_jax.utils import distributed
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.heartbeat import phase

Runner = CompiledRunner | TextRunner | AgentRunner
MAX_TRIES = 4  # rollouts of an iteration at most, where a method drops prompt groups with equal rewards


@dataclasses.dataclass(frozen=True)
class PolicySetup:
    """One of a run's policies, and how it is trained.

    name: that of `config/policies.py`.
    settings: the run's configuration with what the policy's roles change in it.
    initial: the initial weights, random unless pretrained ones are configured; training keeps its own copy.
    model: the sizes of the network that samples and learns, with the adapters that LoRA adds to the initial weights.
    rollout_mesh: where rollouts read the parameters; None: where they are learned.
    """

    name: str
    settings: Config
    mesh: Mesh
    initial: Policy
    model: ModelConfig
    rollout_mesh: Mesh | None = None

    def trainable(self, params) -> dict:
        """Returns what training changes: a copy of the weights, or with LoRA adapters that change nothing yet."""
        if self.model.lora:
            return lora.initialize(self.model, self.settings.start_seed, self.mesh)
        return jax.tree.map(jnp.copy, params)

    def rollout_params(self, trained, reference) -> dict:
        """Returns a rollout's parameters: the trained weights, or with LoRA the reference policy's with trained adapters."""
        return self._on_rollout_mesh(self.compute_copy(lora.bind(reference, trained) if self.model.lora else trained))

    def sampling_copy(self, trained) -> dict:
        """Returns what `rollout_params` reads of the trained weights, in memory of its own: an update donates them."""
        copy = jax.tree.map(lambda cast, a: jnp.copy(a) if cast is a else cast, self.compute_copy(trained), trained)
        return self._on_rollout_mesh(copy)

    def _on_rollout_mesh(self, params) -> dict:
        """Moves parameters to the mesh of the rollouts; what is there is not copied."""
        if self.rollout_mesh is None:
            return params
        return jax.device_put(params, shardings_like(params, self.model, self.rollout_mesh))

    def merged_params(self, trained, reference) -> dict:
        """Returns the weights of an equivalent policy without adapters.

        reference: the weights that the adapters adapt, in float32: a shorter type would round small changes away.
        """
        return lora.merge(self.model, reference, trained) if self.model.lora else trained

    def save(self, params, folder: Path) -> None:
        """Writes a policy with these weights to a folder. Raises ValueError if it cannot be written."""
        Policy(self.initial.config, params, self.initial.tokenizer).save(folder)

    def compute_copy(self, params):
        """Casts the parameters to `policy.compute_dtype`, for sampling and the loss; arrays of that type are not copied."""
        dtype = self.settings.policy.compute_dtype
        leaves, structure = jax.tree.flatten(params)
        others = [a for a in leaves if a.dtype != dtype]
        if not others:
            return params
        # An array that passes through jit is copied: with LoRA, the whole reference policy if its adapters have another type.
        cast_ones = iter(_cast(others, dtype))
        return jax.tree.unflatten(structure, [a if a.dtype == dtype else next(cast_ones) for a in leaves])


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything built from a Config: mesh, policies, environment, rollout, rewards.

    mesh: that of the updates and, unless there is a `rollout_mesh`, of the rollouts.
    policies: by name, one unless roles have policies of their own (`config/policies.py`). Parameters are dicts by these names.
    tokenizer: that of policy=; on the host, policies of roles may have others (`PolicySetup.initial`).
    runner: makes rollouts in the configured environment.
    reward: adds the rewards of the configured reward function to the result of a training rollout.
    """

    config: Config
    mesh: Mesh
    policies: dict[str, PolicySetup]
    tokenizer: Any  # of transformers
    runner: Runner
    reward: Reward | None = None
    rollout_mesh: Mesh | None = None

    @property
    def policy(self) -> PolicySetup:
        """The policy of a run with one. Raises KeyError if there are several."""
        return self.policies[SHARED]

    def by_policy(self, call: Callable, *trees: dict[str, Any]) -> dict[str, Any]:
        """Returns by name the results of `call(policy, *trees)`, with each policy's part of the trees."""
        return {name: call(policy, *(tree[name] for tree in trees)) for name, policy in self.policies.items()}

    def on_rollout_mesh(self):
        """Returns a context in which arrays are made, and programs run, on the mesh of the rollouts."""
        return contextlib.nullcontext() if self.rollout_mesh is None else jax.set_mesh(self.rollout_mesh)

    def to_update(self, episodes: Episodes) -> Episodes:
        """Moves episodes from the mesh of the rollouts to that of the updates, on every device of it."""
        if self.rollout_mesh is None:
            return episodes
        return jax.device_put(episodes, NamedSharding(self.mesh, PartitionSpec()))

    def close(self) -> None:
        """Ends the processes of environments and reward functions."""
        self.runner.close()
        if isinstance(self.reward, TextReward):
            self.reward.close()

    @property
    def given_params(self) -> dict[str, dict]:
        """The initial weights."""
        return self.by_policy(lambda policy: policy.initial.params)

    @property
    def batch(self) -> int:
        """Episodes per rollout."""
        return self.config.rollout.prompt_groups * self.config.rollout.group_size

    @property
    def adapted(self) -> bool:
        """Whether any policy trains adapters."""
        return any(policy.model.lora for policy in self.policies.values())

    def rollout_params(self, trained, reference) -> dict[str, dict]:
        """Returns `PolicySetup.rollout_params` of each policy."""
        return self.by_policy(PolicySetup.rollout_params, trained, reference)

    def merged_params(self, trained, reference) -> dict[str, dict]:
        """Returns `PolicySetup.merged_params` of each policy."""
        return self.by_policy(PolicySetup.merged_params, trained, reference)

    def rollout_reference(self, reference) -> dict[str, dict]:
        """Returns what `rollout_params` reads of the reference policies, on the mesh of the rollouts: the weights that adapters
        adapt, one copy of those that several policies share."""
        if self.rollout_mesh is None:
            return reference
        moved: dict[int, dict] = {}

        def of_policy(policy: PolicySetup, params):
            if not policy.model.lora:
                return params
            if id(params) not in moved:
                moved[id(params)] = policy._on_rollout_mesh(params)
            return moved[id(params)]

        return self.by_policy(of_policy, reference)

    def base_rollout_params(self, params) -> dict[str, dict]:
        """Returns a rollout's parameters for weights without adapters."""

        def unchanged(policy: PolicySetup, params):
            return policy.rollout_params(policy.trainable(params) if policy.model.lora else params, params)

        return self.by_policy(unchanged, params)

    def reference_copy(self, params) -> dict[str, dict]:
        """Returns `compute_copy` of the reference policies; with learner.offload, but not with LoRA, in the host's memory."""
        copies: dict[int, dict] = {}  # of weights that the adapters of several policies share

        def copy_of(policy: PolicySetup, params):
            if not policy.settings.learner.offload or policy.model.lora:  # sampling binds adapters to it
                if id(params) not in copies:
                    copies[id(params)] = policy.compute_copy(params)
                return copies[id(params)]
            copy = policy.compute_copy(params)
            return jax.device_put(copy, storage_shardings(copy, policy.model, policy.mesh, offload=True))

        return self.by_policy(copy_of, params)

    @property
    def method(self) -> Method:
        """The method that `method=` names."""
        return method_named(self.config.method)

    def learning_role(self, iteration: int) -> int | None:
        """Returns the index of the role that an iteration trains; None if it trains all roles (`Method.alternate`)."""
        every, roles = self.method.alternate, len(self.runner.roles)
        return iteration // every % roles if every and roles > 1 else None

    def episode_inputs(self, iteration: int, attempt: int = 0) -> tuple:
        """Returns the inputs of a rollout besides the parameters for one training iteration.

        Equal seed, iteration and attempt give equal inputs; further attempts (dynamic sampling) get different tasks. If a role
        other than the first one learns, the members of a prompt group share the random key of their first turn. They then
        differ only in the outcome of one and the same plan.
        """
        settings = self.config.rollout
        groups = jnp.arange(self.batch, dtype=jnp.int32) // settings.group_size
        number = iteration * MAX_TRIES + attempt if self.method.dynamic_sampling else iteration
        tasks = self.runner.select_tasks("train", self.config.seed, number * settings.prompt_groups + groups)
        keys = jax.random.split(self.key(number, 0), self.batch)
        if (role := self.learning_role(iteration)) is not None:  # one shape for all iterations: another would recompile
            keys = jnp.stack([keys[groups * settings.group_size] if role else keys, keys], axis=1)
        return tasks, keys, groups, Decoding(temperature=settings.temperature)

    @property
    def signals(self) -> tuple[str, ...]:
        """The names of the signals in `Episodes.signals`: the environment's, then the reward function's."""
        return (*self.runner.signals, *(self.reward.signals if isinstance(self.reward, TextReward) else ()))

    def abstract_episodes(self) -> Episodes:
        """Returns the shapes of one iteration's episodes without computing anything."""
        params = jax.eval_shape(self.base_rollout_params, self.given_params)
        with self.on_rollout_mesh():
            e = self.runner.abstract_episodes(params, self.episode_inputs(0))
        if not self.signals:
            return e
        return e.replace(signals=jax.ShapeDtypeStruct((*e.mask.shape, len(self.signals)), jnp.float32))

    def key(self, iteration: int, purpose: int):
        """Returns the random key of an iteration for one purpose (0 sampling, 1 shuffling)."""
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), iteration), purpose)


_cast = jax.jit(cast, static_argnums=1)


@phase("opening the devices")
def open_devices(multiprocess: bool = False) -> None:
    """Sets up the backend before anything else uses jax, together with other processes if there are several.

    On a CPU every core becomes a device: for small matrices, data parallelism over cores is faster than threads inside each
    operation. Raises ConfigError if the processes do not find each other.
    """
    if multiprocess:
        distributed.join()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not forced:
        with contextlib.suppress(RuntimeError):  # a program that has used jax before keeps its devices
            jax.config.update("jax_num_cpu_devices", cores)
    distributed.mute_other_processes()


def prepare_devices(config: Config, multiprocess: bool = False) -> Mesh:
    """Opens the devices and returns the mesh. Raises ConfigError, also if the mesh does not fit the devices or the batch."""
    open_devices(multiprocess)
    return job_mesh(config)


def job_meshes(config: Config) -> tuple[Mesh, Mesh | None]:
    """Returns the mesh of the updates and, with `rollout.mesh`, that of the rollouts, which has the last devices.

    Raises ConfigError as `job_mesh`.
    """
    if not config.rollout.mesh:
        return job_mesh(config), None
    devices, spec = jax.devices(), config.rollout.mesh
    if jax.process_count() > 1:
        raise ConfigError(f"rollout.mesh={spec}: works in a single process; leave it out")
    count = mesh_of_rollouts(config).size
    if count >= len(devices):
        raise ConfigError(f"rollout.mesh={spec}: leaves the update none of {len(devices)} devices; give smaller sizes")
    rollout_mesh = make_mesh(spec, devices[-count:])
    check_shards(f"rollout.mesh={spec}", config, rollout_mesh)
    try:
        return job_mesh(config, devices[:-count]), rollout_mesh
    except ConfigError as error:
        raise ConfigError(f"{error} (rollout.mesh={spec} takes {count})") from None


@phase("opening the devices")
def job_mesh(config: Config, devices: list | None = None) -> Mesh:
    """Returns the configured mesh over the open devices, or these. Raises ConfigError if it does not fit them or the batch."""
    devices, spec = devices or jax.devices(), config.mesh
    episodes = config.rollout.prompt_groups * config.rollout.group_size
    if spec == "auto":
        # The largest number of devices that can share the episodes equally.
        count = max(n for n in range(1, len(devices) + 1) if episodes % n == 0)
        if count < len(devices) and jax.process_count() > 1:
            raise ConfigError(
                f"mesh=auto: the {len(devices)} devices of {jax.process_count()} processes do not share {episodes} episodes "
                "equally; change rollout.prompt_groups or rollout.group_size, or give mesh="
            )
        devices, spec = devices[:count], f"data={count}"
    try:
        mesh = make_mesh(spec, devices)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_shards(f"mesh={config.mesh}", config, mesh)
    return mesh


def check_shards(given: str, config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises ConfigError if a mesh does not divide the episodes of an iteration."""
    episodes, shards = config.rollout.prompt_groups * config.rollout.group_size, mesh.shape["data"] * mesh.shape["fsdp"]
    if episodes % shards:
        raise ConfigError(
            f"{given}: data x fsdp = {shards} does not divide the {episodes} episodes of an iteration "
            f"(rollout.prompt_groups x rollout.group_size)"
        )


def check_memory(config: Config, mesh: Mesh, rollout_mesh: Mesh | None = None) -> ModelConfig:
    """Returns the policy's sizes. Raises ConfigError if they are invalid or, after printing the memory plan, too large."""
    beside = {}
    try:
        workload = memory.workload_of(config, mesh)
        if rollout_mesh is None:
            phases = memory.bytes_of_run(config, mesh)
        else:
            phases, beside[f"rollout.mesh={config.rollout.mesh}"] = memory.bytes_apart(config, mesh, rollout_mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if mesh.local_devices[0].platform == "cpu":
        memory.add_checkpoint(phases)
    if limit := memory.device_limit([*mesh.local_devices, *(rollout_mesh.local_devices if rollout_mesh else ())]):
        for given, part in {f"mesh={config.mesh}": phases, **beside}.items():
            memory.refuse_too_large(given, part, memory.peak(part), limit)
    return workload.model


def make_policy(config: Config, model: ModelConfig, mesh: Mesh) -> Policy:
    """Loads pretrained weights, or makes random ones for an environment's or a tokenizer's words. Raises ConfigError."""
    settings = config.policy
    entry = environment(config.env)
    env = entry.compiled(config) if entry.compiled and backend(config) == "compiled" else None
    words = None if env is None else word_tokenizer(env.words)
    if not settings.source:
        params = initialize(model, config.start_seed, mesh)
        return Policy(model, params, words or fresh_tokenizer(config))
    try:
        policy = load_policy(settings.source, mesh, cache_dir=config.cache_dir)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if policy.tokenizer is None or (words and policy.tokenizer.get_vocab() != words.get_vocab()):
        raise ConfigError(
            f"policy.source={settings.source}: its tokenizer does not hold the words of this {config.env.name}; "
            "give a policy that was trained on the same env.*"
            if words
            else f"policy.source={settings.source}: holds no tokenizer; add tokenizer.json and tokenizer_config.json"
        )
    check_sight(config, policy.config, env)
    return policy


def adapted_model(config: Config, policy: Policy) -> ModelConfig:
    """Returns the policy's sizes with the configured adapters, and whether its vision tower learns."""
    lora = LoraConfig(**config.lora.model_dump()) if config.lora.rank else None
    return dataclasses.replace(policy.config, lora=lora, vision_frozen=tower_is_frozen(config, policy.config))


def make_policies(config: Config, shared: Policy, mesh: Mesh, rollout_mesh: Mesh | None) -> dict[str, PolicySetup]:
    """Returns the policies of a run by name. shared: that of policy=, which one or more of them begin from.

    Raises ConfigError for a policy that cannot be read, or has a different tokenizer where all roles need the same.
    """
    policies: dict[str, PolicySetup] = {}
    shown = make_one(config) if environment(config.env).pictures else None
    by_source: dict[str, Policy] = {}  # adapters of several roles share one copy of the weights
    for name, policy_config in memory.configs_by_policy(config).items():
        initial, source = shared, policy_config.policy.source
        if policy_config.policy != config.policy:
            try:
                initial = by_source[source] = by_source.get(source) or load_policy(source, mesh, cache_dir=config.cache_dir)
            except ValueError as error:
                raise ConfigError(f"roles.{name}.policy={source}: {error}") from None
            if backend(config) != "host" and not same_tokenizer(initial.tokenizer, shared.tokenizer):
                raise ConfigError(
                    f"roles.{name}.policy={source}: has another tokenizer than policy.source={config.policy.source}, and "
                    f"env.name={config.env.name} is not played as text on the host; give one of the same family"
                )
            if initial.tokenizer is None:
                raise ConfigError(
                    f"roles.{name}.policy={source}: holds no tokenizer; add tokenizer.json and tokenizer_config.json"
                )
            check_sight(policy_config, initial.config, shown)
        model = adapted_model(policy_config, initial)
        policies[name] = PolicySetup(name, policy_config, mesh, initial, model, rollout_mesh)
    return policies


def same_tokenizer(a, b) -> bool:
    """Whether two tokenizers, or None, have the same words and frame messages alike."""
    template = lambda tokenizer: getattr(tokenizer, "chat_template", None)  # noqa: E731
    return None not in (a, b) and a.get_vocab() == b.get_vocab() and template(a) == template(b)


def text_makers(config: Config) -> Makers | None:
    """Returns the text-environment factories, or None if the policy plays in word tokens. Raises ConfigError."""
    entry = environment(config.env)
    return None if backend(config) == "compiled" or entry.text is None else entry.text(config)


@phase("preparing the environment")
def make_runner(
    config: Config, makers: Makers | None, models: dict[str, ModelConfig], tokenizers: dict[str, Any], mesh: Mesh
) -> Runner:
    """Makes the runner of the configured environment from its `text_makers`; models and tokenizers are by policy. Raises
    ConfigError."""
    entry, tokenizer = environment(config.env), next(iter(tokenizers.values()))
    if entry.agent:
        return AgentRunner(config, models, tokenizer, mesh)
    if makers:
        return TextRunner(config, entry, *makers, models, tokenizers, mesh)
    assert entry.compiled is not None  # an environment without a text version
    games = entry.games(config) if entry.games else None
    return CompiledRunner(config, entry.compiled(config), models, tokenizer, mesh, games)


def work_of(config: Config) -> str:
    """Returns the fields that decide about how long a job's phases take (`Heartbeat.remember`)."""
    whole = dict.fromkeys(("method", "mesh", "env", "policy", "lora", "rollout"), True)
    return config.model_dump_json(include={**whole, "learner": {"microbatch_size", "remat", "offload"}})


@phase("preparing policy and environment", says_end=False)
def build(config: Config, mesh: Mesh | None = None, rollout_mesh: Mesh | None = None) -> Job:
    """Builds a job, on `prepare_devices(config)` if no mesh is given. rollout_mesh: `Job.rollout_mesh`.

    Raises ConfigError for a configuration that cannot work, before any real computation.
    """
    check_together(config)
    mesh = mesh or prepare_devices(config)
    check_numbers(config.method)
    check_loss_numbers(config.learner, method_named(config.method))
    jax.set_mesh(mesh)
    compiled = Path(config.cache_dir, "compiled")
    if any(path.exists() and not path.is_dir() for path in (compiled, *compiled.parents)):
        raise ConfigError(f"cache_dir={config.cache_dir}: part of the path is a file; choose another folder")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):  # the user's setting of jax's own variable wins
        jax.config.update("jax_compilation_cache_dir", str(compiled))
    makers = text_makers(config)  # first, so that missing files are reported before weights are read
    policy = make_policy(config, check_memory(config, mesh, rollout_mesh), mesh)
    policies = make_policies(config, policy, mesh, rollout_mesh)
    models = {name: setup.model for name, setup in policies.items()}
    tokenizers = {name: setup.initial.tokenizer for name, setup in policies.items()}
    runner = make_runner(config, makers, models, tokenizers, rollout_mesh or mesh)
    pretrained = any(setup.settings.policy.source for setup in policies.values())
    if config.warm_start == "cloning" and pretrained and not runner.has_expert():
        raise ConfigError(
            f"warm_start=cloning: env.name={config.env.name} has no expert(history_length) whose play pretrained "
            "weights could learn; give warm_start=none"
        )
    job = Job(config, mesh, policies, policy.tokenizer, runner, rollout_mesh=rollout_mesh)
    if config.reward.source:
        job = dataclasses.replace(job, reward=make_reward(config, job.abstract_episodes()))
    check_signals(job)
    return job


def check_signals(job: Job) -> None:
    """Raises ConfigError if a run's signals have equal names, or are not those that its method needs."""
    config, names, weights = job.config, job.signals, job.config.advantage.signal_weights
    if len(set(names)) < len(names):
        raise ConfigError(
            f"reward.source={config.reward.source}: signals are {', '.join(names)}, of which env.name={config.env.name} has "
            f"{', '.join(job.runner.signals)}; give each another name"
        )
    if "signals" in parameters(job.method.estimator)[0] and not names:
        mend = "declare them, as hgpo_jax/rollout/signals.py says"
        if "milestones" in environment(config.env).options:
            mend = "give env.milestones=true"
        raise ConfigError(
            f"method={config.method}: needs signals, and neither env.name={config.env.name} nor a reward function has any; "
            f"{mend}"
        )
    first = FIRST_SIGNAL.get(job.method.estimator)
    if first and names[0] != first:
        raise ConfigError(f"method={config.method}: the first of the signals {', '.join(names)} must be called {first}")
    for role, settings in config.roles.items():
        if settings.reward and TEAM_REWARD in names:
            raise ConfigError(f"roles.{role}.reward: {TEAM_REWARD} is the team's, and a signal has this name, too; rename that")
        for name in set(settings.reward) - {*names, TEAM_REWARD}:
            raise ConfigError(
                f"roles.{role}.reward={','.join(settings.reward)}: there is no signal {name}; "
                f"give {', '.join((TEAM_REWARD, *names))}, or some of them"
            )
    if weights and len(weights) != len(names):
        given = ",".join(map(str, weights))
        raise ConfigError(f"advantage.signal_weights={given}: give one for each signal: {', '.join(names) or 'there is none'}")
