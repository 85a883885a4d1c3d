"""Builds a Job from a Config: policies, environment, rollout, rewards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from hgpo_jax.advantages import parameters
from hgpo_jax.config import Config
from hgpo_jax.envs.protocol import TextExpert
from hgpo_jax.learner.loss_table import check_loss_numbers
from hgpo_jax.learner.methods import FIRST_SIGNAL, SIGNALS_ARE_REWARDS, TEAM_REWARD, check_numbers, method_named
from hgpo_jax.policy import LoraConfig, ModelConfig, Policy, initialize, load_policy
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.rollout.backend import backend
from hgpo_jax.rollout.env_tokenizer import fresh_tokenizer
from hgpo_jax.rollout.environments import Makers, environment
from hgpo_jax.rollout.rewards import make_reward
from hgpo_jax.rollout.runners import CompiledRunner, TextRunner
from hgpo_jax.rollout.turn_budgets import BUDGET
from hgpo_jax.serving.agent_rollout import AgentRunner
from hgpo_jax.setup import memory
from hgpo_jax.setup.devices import prepare_devices
from hgpo_jax.setup.job import Job, PolicySetup, Runner
from hgpo_jax.setup.sight import check_sight, shown, tower_is_frozen
from hgpo_jax.setup.validate import check_together, example_budgets
from hgpo_jax.utils.compiled_programs import keep_compiled
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.heartbeat import phase


def check_memory(config: Config, mesh: Mesh, rollout_mesh: Mesh | None = None, trains: bool = True) -> ModelConfig:
    """Returns the policy's sizes. Raises ConfigError if they are invalid or, after printing the memory plan, too large.

    trains: as for `build`.
    """
    beside = {}
    try:
        workload = memory.workload_of(config, mesh)
        if rollout_mesh is None:
            phases = memory.bytes_of_run(config, mesh)
        else:
            phases, beside[f"rollout.mesh={config.rollout.mesh}"] = memory.bytes_apart(config, mesh, rollout_mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not trains:
        phases = memory.of_playing(phases)
    elif mesh.local_devices[0].platform == "cpu":
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
    check_sight(config, policy.config, shown(config), None if words else policy.tokenizer)
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
            reads = None if backend(config) == "compiled" else initial.tokenizer
            check_sight(policy_config, initial.config, shown(config), reads)
        model = adapted_model(policy_config, initial)
        policies[name] = PolicySetup(name, policy_config, mesh, initial, model, rollout_mesh)
    return policies


def same_tokenizer(a, b) -> bool:
    """Whether two tokenizers, or None, have the same words and frame messages alike."""
    template = lambda tokenizer: getattr(tokenizer, "chat_template", None)  # noqa: E731
    return None not in (a, b) and a.get_vocab() == b.get_vocab() and template(a) == template(b)


@phase("reading or indexing the environment's files", says_end=False)
def text_makers(config: Config) -> Makers | None:
    """Returns the text-environment factories, or None if the policy plays in word tokens. Raises ConfigError."""
    entry = environment(config.env)
    return None if backend(config) == "compiled" or entry.text is None else entry.text(config)


def check_expert(config: Config, makers: Makers | None) -> None:
    """Raises ConfigError if pretrained weights are to clone the play of a text environment that has no player."""
    pretrained = any(each.policy.source for each in memory.configs_by_policy(config).values())
    if makers and config.warm_start == "cloning" and pretrained and not isinstance(makers[0](), TextExpert):
        raise ConfigError(
            f"warm_start=cloning: env.name={config.env.name} has no expert(history_length) whose play pretrained "
            "weights could learn; give warm_start=none"
        )


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
def build(config: Config, mesh: Mesh | None = None, rollout_mesh: Mesh | None = None, *, trains: bool = True) -> Job:
    """Builds a job, on `prepare_devices(config)` if no mesh is given. rollout_mesh: `Job.rollout_mesh`.

    trains: whether it will learn, or only play, for which there need be less memory.

    Raises ConfigError for a configuration that cannot work, before any real computation.
    """
    check_together(config)
    mesh = mesh or prepare_devices(config)
    check_numbers(config.method)
    check_loss_numbers(config.learner, method_named(config.method))
    jax.set_mesh(mesh)
    keep_compiled(config.cache_dir)
    makers = text_makers(config)  # first, so that missing files are reported before weights are read
    check_expert(config, makers)
    policy = make_policy(config, check_memory(config, mesh, rollout_mesh, trains), mesh)
    policies = make_policies(config, policy, mesh, rollout_mesh)
    models = {name: setup.model for name, setup in policies.items()}
    tokenizers = {name: setup.initial.tokenizer for name, setup in policies.items()}
    runner = make_runner(config, makers, models, tokenizers, rollout_mesh or mesh)
    job = Job(config, mesh, policies, policy.tokenizer, runner, rollout_mesh=rollout_mesh)
    if config.reward.source:
        job = dataclasses.replace(job, reward=make_reward(config, job.abstract_episodes()))
    check_signals(config, job.runner.signals, job.signals)
    return job


def check_signals(config: Config, own: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raises ConfigError if a run's signals have equal names, or are not those that its method needs.

    own: names of the environment's. names: those of the reward function's, too.
    """
    weights, method = config.advantage.signal_weights, method_named(config.method)
    if config.env.budgets and own.count(BUDGET) > 1:
        given = ",".join(map(str, config.env.budgets))
        raise ConfigError(f"env.budgets={given}: env.name={config.env.name} has a signal {BUDGET} of its own; leave it out")
    if config.env.budgets and method.estimator in SIGNALS_ARE_REWARDS:
        given = ",".join(map(str, config.env.budgets))
        why = f"method={config.method} would take an episode's budget for a reward; leave one of the two out"
        raise ConfigError(f"env.budgets={given}: {why}")
    if len(set(names)) < len(names):
        raise ConfigError(
            f"reward.source={config.reward.source}: signals are {', '.join(names)}, of which env.name={config.env.name} has "
            f"{', '.join(own)}; give each another name"
        )
    first = FIRST_SIGNAL.get(method.estimator)
    if "signals" in parameters(method.estimator)[0] and not names:
        mend = "declare them, as hgpo_jax/rollout/signals.py says"
        if first == BUDGET:
            mend = f"give env.budgets, for instance {example_budgets(config.env.max_turns)}"
        elif "milestones" in environment(config.env).options:
            mend = "give env.milestones=true"
        raise ConfigError(
            f"method={config.method}: needs signals, and neither env.name={config.env.name} nor a reward function has any; "
            f"{mend}"
        )
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
