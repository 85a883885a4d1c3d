"""Cross-field validation of a configuration, after its names have been resolved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from hgpo_jax.config.learning import LearnerConfig
from hgpo_jax.config.policies import config_of, response_limit, weight_sets
from hgpo_jax.config.roles import RoleConfig, unknown_role
from hgpo_jax.config.schema import Config, EnvConfig
from hgpo_jax.learner.algorithms import METHODS, Method, method_named
from hgpo_jax.rollout.chat_prompts import load_template
from hgpo_jax.rollout.environments import ENVIRONMENTS, Backend, Environment, backend, environment, role_names
from hgpo_jax.rollout.requirements import ONE_ROLE
from hgpo_jax.rollout.reward_functions import reward_function
from hgpo_jax.rollout.state_keys import state_key_function
from hgpo_jax.utils.errors import ConfigError

# Estimators that compare only the episodes of a prompt group: a single one equals its own mean, or has no baseline.
COMPARE_EPISODES = ("dr_mas", "grpo", "reinforce_pp_baseline", "rloo")


def check_together(config: Config) -> None:
    """Rejects fields that are valid one by one, but not together. Raises ConfigError."""
    env = config.env
    if env.options and env.name in ENVIRONMENTS:
        name, value = next(iter(env.options.items()))
        raise ConfigError(f"env.options.{name}={value}: env.name={env.name} has fields of its own; write env.{name}={value}")
    method = method_named(config.method)
    found, played = environment(env), backend(config)
    if config.reward.source:
        reward_function(config.reward.source)
    if env.state_key:
        state_key_function(env.state_key)
    _check_log(config, method, played)
    _check_environment(config, found, played)
    if config.warm_start == "cloning":
        _check_cloning(config, found, played)
    if found.agent and not (config.policy.source or config.policy.tokenizer):
        raise ConfigError(f"policy.source=: env.name={env.name} needs a language model; give policy=, too")
    _check_method(config, method, found, played)
    if config.roles:
        _check_roles(config, role_names(config), method.critic)
    if config.evaluation.min_response:
        _check_shortest_response(config)
    if config.reward.overlong_cache:
        _check_overlong_cache(config, played)
    _check_unread(env, found, played)


def _check_log(config: Config, method: Method, played: Backend) -> None:
    log = config.log
    if log.keep_best and not config.evaluation.every:
        raise ConfigError(f"log.keep_best={log.keep_best}: the best by validation; give evaluation.every, too")
    if log.sample_every and method.dynamic_sampling and played != "compiled":
        raise ConfigError(
            f"log.sample_every={log.sample_every}: method={config.method} mixes several rollouts, whose texts are not kept; "
            "leave it out"
        )


def _check_environment(config: Config, found: Environment, played: Backend) -> None:
    env, compiled, similarity = config.env, played == "compiled", config.advantage.similarity
    if env.compiled and (found.compiled is None or found.text is None):
        raise ConfigError(f"env.compiled=true: env.name={env.name} has no such choice; leave it out")
    if env.max_turns != EnvConfig.model_fields["max_turns"].default and env.name not in ENVIRONMENTS:
        raise ConfigError(
            f"env.max_turns={env.max_turns}: env.name={env.name} has a max_turns of its own; leave it out, or give env.options"
        )
    if similarity is not None and compiled:
        raise ConfigError(f"advantage.similarity={similarity}: env.name={env.name}, compiled, has no texts; leave it out")
    if similarity is not None and env.state_key:
        raise ConfigError(
            f"advantage.similarity={similarity}: env.state_key={env.state_key} decides which states are equal; "
            "leave one of the two out"
        )
    if env.template and compiled:
        raise ConfigError(f"env.template={env.template}: env.name={env.name}, compiled, takes no template; leave it out")
    if "split" in found.options and env.split == "generated" and not (compiled or env.compiled):
        raise ConfigError("env.split=generated: has no files to play on the host; give env.compiled=true, too")
    if config.rollout.ready_fraction < 1 and not compiled and not env.workers:
        raise ConfigError(
            f"rollout.ready_fraction={config.rollout.ready_fraction:g}: needs env.workers; in this process environments step "
            "one by one"
        )


def _check_cloning(config: Config, found: Environment, played: Backend) -> None:
    rank = config.lora.rank
    if found.agent or (played == "compiled" and not found.expert):
        raise ConfigError(f"warm_start=cloning: env.name={config.env.name} has no expert to clone; give warm_start=none")
    if rank and not config.policy.source:
        raise ConfigError(f"lora.rank={rank}: LoRA needs base weights; give policy=, too")
    if rank and config.cloning.optimizer == "muon":
        raise ConfigError(f"cloning.optimizer=muon: needs full-rank weights; with lora.rank={rank} give adamw")
    if config.policy.tokenizer:
        raise ConfigError(
            f"policy.tokenizer={config.policy.tokenizer}: warm_start=cloning is for a small policy with the environment's own "
            "words; leave it out, or give warm_start=none"
        )


def _check_method(config: Config, method: Method, found: Environment, played: Backend) -> None:
    """Checks what a method needs, and options that its loss does not read."""
    learner, name = config.learner, config.method
    if learner.rollout_correction == "token" and method.loss == "gspo":
        raise ConfigError(f"learner.rollout_correction=token: method={name} weighs whole responses; give sequence, or none")
    if config.rollout.group_size == 1 and method.estimator in COMPARE_EPISODES:
        raise ConfigError(f"rollout.group_size=1: method={name} compares a task's episodes with each other; give 2 or more")
    # The environment is made only for a method that needs it: ALFWorld's would load its games.
    if method.parts and not (played == "compiled" and hasattr(found.compiled and found.compiled(config), "answer_parts")):
        raise ConfigError(
            f"method={name}: needs answers with switch, subgoal and action parts, which env.name={config.env.name} does not "
            "have; give env.name=household_subgoals, or one of your own with answer_parts"
        )
    for option, losses in (("aggregate", ("clip",)), ("dual_clip", ("clip",)), ("process_noise", ("kpo",))):
        value, default = getattr(learner, option), LearnerConfig.model_fields[option].default
        if method.loss not in losses and value != default:
            raise ConfigError(f"learner.{option}={value}: method={name} does not read it; leave it at {default}")
    if learner.alternate and len(roles := role_names(config)) < 2:
        raise ConfigError(
            f"learner.alternate={learner.alternate}: env.name={config.env.name} has one role, {roles[0]}; leave it out"
        )


def _check_overlong_cache(config: Config, played: Backend) -> None:
    limit, most = _shortest_limit(config) if played != "compiled" else (0, "")
    why = f"more than {most}; give less"
    if not limit:
        why = f"the answers of env.name={config.env.name}, compiled, have their own length; leave it out"
    if config.reward.overlong_cache > limit:
        raise ConfigError(f"reward.overlong_cache={config.reward.overlong_cache}: {why}")


def _check_unread(env: EnvConfig, found: Environment, played: Backend) -> None:
    """Rejects fields of `env` that the environment does not read, where they are not at their defaults."""
    read = {"name", "options", "compiled", "max_turns", *found.options}
    on_device = played != "host"
    read |= set() if on_device else {"workers", "time_limit"}
    read |= set() if found.agent else {"template"}
    read |= set() if played == "compiled" or found.agent else {"strict"}
    read |= set() if played == "compiled" else {"state_key"}
    for name, info in EnvConfig.model_fields.items():
        value, default = (",".join(v) if isinstance(v, tuple) else v for v in (getattr(env, name), info.default))
        if name not in read and value != default:
            face = ", compiled," if on_device and name in ("strict", "state_key", "workers", "time_limit") else ""
            raise ConfigError(f"env.{name}={value}: env.name={env.name}{face} does not read it; leave it at {default!r}")


def check_given(config: Config, overrides: Sequence[str]) -> None:
    """Rejects an override that has no effect in this configuration. Raises ConfigError.

    A file is not checked: it may hold fields for one of several methods, such as a critic's settings, or overridden ones.
    """
    env, method = ENVIRONMENTS.get(config.env.name), METHODS.get(config.method)  # your own have no entry
    adapters = config.lora.rank or any(role.lora_rank for role in config.roles.values())
    as_text = env is None or backend(config) != "compiled"
    text = as_text, f"env.name={config.env.name}, compiled, is not told as text; leave it out"
    read: dict[str, tuple[Any, str]] = {
        **{f"rollout.{name}": text for name in ("prompt_limit", "response_limit", "stop", "thinking", "date")},
        "critic.": (method and method.critic, f"method={config.method} has no critic; leave it out"),
        "rollout.max_tries": (method and method.dynamic_sampling, f"method={config.method} drops no groups; leave it out"),
        "lora.": (adapters, "there are no adapters; give lora.rank, too"),
        **dict.fromkeys(
            ("reward.mode", "reward.workers", "reward.time_limit"),
            (config.reward.source, "there is no reward function; give reward=, too"),
        ),
        "reward.overlong_penalty": (config.reward.overlong_cache, "no answer is punished; give reward.overlong_cache, too"),
        "env.compiled": (env and env.compiled and env.text, f"env.name={config.env.name} has no such choice; leave it out"),
    }
    for override in overrides:
        name = override.partition("=")[0]
        for begin, (applies, why) in read.items():
            if name.startswith(begin) and name != "lora.rank" and not applies:
                raise ConfigError(f"{override:.200}: {why}")


def _check_shortest_response(config: Config) -> None:
    """Raises ConfigError if `evaluation.min_response` leaves no room for the end of a response: no action would be found."""
    if backend(config) == "compiled":
        made = environment(config.env).compiled
        assert made is not None
        limit = made(config).action_length + 1
        most = str(limit)
    else:
        limit, most = _shortest_limit(config)
    if config.evaluation.min_response >= limit:
        raise ConfigError(
            f"evaluation.min_response={config.evaluation.min_response}: a response has {most} tokens at most, and needs one to "
            "end with; give less"
        )


def _shortest_limit(config: Config) -> tuple[int, str]:
    """Returns the smallest maximum number of response tokens of any role in a text environment, and the field that sets it."""
    limit, field = min(response_limit(config, role) for role in (role_names(config) if config.roles else ONE_ROLE))
    return limit, f"{field}={limit}"


def _check_roles(config: Config, known: tuple[str, ...], critic: bool) -> None:
    """Raises ConfigError for settings of roles that an environment with the roles `known` does not have."""
    policies = weight_sets(config, known)
    for role, settings in config.roles.items():
        if role not in known:
            raise ConfigError(unknown_role(config.env.name, role, settings, known))
        try:
            load_template(settings.template or "text")
        except (ValueError, OSError) as error:
            why = str(error).removeprefix(f"template={settings.template}: ")
            raise ConfigError(f"roles.{role}.template={settings.template}: {why}") from None
        _check_role(config, role, settings, shares=(role,) not in policies.values(), critic=critic)


def _check_role(config: Config, role: str, settings: RoleConfig, shares: bool, critic: bool) -> None:
    """Raises ConfigError for settings of one role. shares: its policy with other roles. critic: the method has one."""
    compiled = backend(config) == "compiled"
    own = config_of(config, (role,))
    adapters = config.warm_start == "cloning" and settings.lora_rank

    def refuse(name: str, value: object, why: str) -> NoReturn:
        raise ConfigError(f"roles.{role}.{name}={value}: {why}")

    if settings.template and compiled:
        refuse("template", settings.template, f"env.name={config.env.name}, compiled, takes no template; leave it out")
    if settings.response_limit and compiled:
        why = f"the answers of env.name={config.env.name}, compiled, have their own length; leave it out"
        refuse("response_limit", settings.response_limit, why)
    if adapters and not own.policy.source:
        refuse("lora_rank", settings.lora_rank, "LoRA needs base weights; give policy=, too")
    if adapters and config.cloning.optimizer == "muon":
        refuse("lora_rank", settings.lora_rank, "cloning.optimizer=muon needs full-rank weights; give adamw")
    if critic and settings.has_weights:
        name, value = next(iter(settings.model_dump(include={"policy", "lora_rank"}, exclude_defaults=True).items()))
        why = f"method={config.method} has one critic, for a policy that all roles share; leave it out, or take a method "
        refuse(name, value, why + "without a critic")
    if settings.optimizer and shares:
        name, value = next(iter(settings.optimizer.items()))
        refuse(name, value, f"it shares its policy, whose optimizer is learner.*; give roles.{role}.policy=own, too")
