"""Cross-field validation of a configuration, after its names have been resolved.

What needs devices or sizes is refused later: a mesh by `job.job_mesh` and `policy.mesh.partition`, memory by
`memory.refuse_too_large`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NoReturn

from jax.sharding import AbstractMesh

from hgpo_jax.advantages import NO_ROLES_TO_TELL_APART, parameters
from hgpo_jax.config.learning import LearnerConfig
from hgpo_jax.config.policies import config_of, roles_by_policy
from hgpo_jax.config.roles import RoleConfig, unknown_role
from hgpo_jax.config.schema import Config, EnvConfig, PolicyConfig
from hgpo_jax.config.workers import workers_of
from hgpo_jax.learner import loss_table
from hgpo_jax.learner.methods import METHODS, TEAM_REWARD, Method, method_named
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.rollout.backend import Backend, backend, converses, role_names
from hgpo_jax.rollout.chat_prompts import load_template, template_names
from hgpo_jax.rollout.environments import ENVIRONMENTS, Environment, environment, max_turns
from hgpo_jax.rollout.reward_workers import reward_function
from hgpo_jax.rollout.state_keys import state_key_function
from hgpo_jax.utils.errors import ConfigError, one_line

# Estimators that compare only the episodes of a prompt group: a single one equals its own mean, or has no baseline.
COMPARE_EPISODES = ("adora", "dr_mas", "dvao", "g2rpo", "gbpo", "gdpo", "grpo", "hapo", "hbpo", "reinforce_pp_baseline", "rloo")

# Options that only some estimators have. gamma is not among them: the metrics have a return, too.
READ_BY_SOME = ("normalize", "alpha", "history_length", "lam", "signal_weights")

# Losses whose default clips are far narrower than an update moves the ratio, and the correction that begins it at 1 again.
# Clips of WIDE or more are not narrow.
WIDE = 0.01
NARROW = {"gspo": "sequence", "kpo": "token"}


def check_together(config: Config) -> None:
    """Rejects fields that are valid one by one, but not together. Raises ConfigError."""
    env = config.env
    if env.options and env.name in ENVIRONMENTS:
        name, value = next(iter(env.options.items()))
        raise ConfigError(f"env.options.{name}={value}: env.name={env.name} has fields of its own; write env.{name}={value}")
    method = method_named(config.method)
    entry, rollout_backend = environment(env), backend(config)
    if config.reward.source:
        reward_function(config.reward.source)
    if env.state_key:
        state_key_function(env.state_key)
    if config.log.keep_best and not config.evaluation.every:
        raise ConfigError(f"log.keep_best={config.log.keep_best}: the best by validation; give evaluation.every, too")
    _check_environment(config, entry, rollout_backend)
    _check_store(config)
    if entry.pictures:
        _check_pictures(config, method, rollout_backend)
    if entry.is_seen:
        _check_sight(config, method, rollout_backend)
    if config.warm_start == "cloning":
        _check_cloning(config, entry, rollout_backend)
    if entry.agent and not (config.policy.source or config.policy.tokenizer):
        raise ConfigError(f"policy.source=: env.name={env.name} needs a language model; give policy=, too")
    _check_method(config, method, entry, rollout_backend)
    _check_comparison(config, method)
    if config.roles:
        _check_roles(config, role_names(config), method.critic)
    if config.reward.overlong_cache:
        _check_overlong_cache(config, rollout_backend)
    _check_unread(env, entry, rollout_backend)


def mesh_of_rollouts(config: Config) -> AbstractMesh:
    """Returns the mesh of `rollout.mesh` without devices. Raises ConfigError unless it states its sizes."""
    try:
        return abstract_mesh(config.rollout.mesh)
    except ValueError as error:
        raise ConfigError(f"rollout.{error}") from None


def check_own_turns(env: EnvConfig) -> None:
    """Rejects a limit of turns for a user's own environment, which has its own."""
    if env.max_turns != EnvConfig.model_fields["max_turns"].default and env.name not in ENVIRONMENTS:
        raise ConfigError(
            f"env.max_turns={env.max_turns}: env.name={env.name} has a max_turns of its own; leave it out, or give env.options"
        )


def _check_environment(config: Config, entry: Environment, rollout_backend: Backend) -> None:
    env, compiled, similarity = config.env, rollout_backend == "compiled", config.advantage.similarity
    if env.compiled and (entry.compiled is None or entry.text is None):
        raise ConfigError(f"env.compiled=true: env.name={env.name} has no such choice; leave it out")
    check_own_turns(env)
    if similarity is not None and compiled:
        raise ConfigError(f"advantage.similarity={similarity}: env.name={env.name}, compiled, has no texts; leave it out")
    if similarity is not None and env.state_key:
        raise ConfigError(
            f"advantage.similarity={similarity}: env.state_key={env.state_key} decides which states are equal; "
            "leave one of the two out"
        )
    if env.template and compiled:
        raise ConfigError(f"env.template={env.template}: env.name={env.name}, compiled, takes no template; leave it out")
    _check_template(env, entry)
    if "split" in entry.options and env.split == "generated" and not (compiled or env.compiled):
        raise ConfigError("env.split=generated: has no files to play on the host; give env.compiled=true, too")
    if config.rollout.constrain == "admissible" and (entry.agent or entry.free_text):
        raise ConfigError(f"rollout.constrain=admissible: env.name={env.name} does not list all that may be said; leave it out")
    if config.rollout.constrain == "admissible" and rollout_backend == "compiled_text":
        mend = "leave it out" if entry.pictures else "give env.compiled=false, or leave it out"
        where = "is played as text on the device, where answers are free"
        raise ConfigError(f"rollout.constrain=admissible: env.name={env.name} {where}; {mend}")
    if config.rollout.mesh and not config.rollout.overlap:
        raise ConfigError(f"rollout.mesh={config.rollout.mesh}: needs rollout.overlap=1, else half would be idle")
    if config.rollout.mesh:
        mesh_of_rollouts(config)
    if config.rollout.overlap and config.learner.offload:
        raise ConfigError(
            f"rollout.overlap={config.rollout.overlap}: with learner.offload=true the update's arrays would be on the devices "
            "while episodes are sampled, and nothing saved; leave one of the two out"
        )
    _check_keep(config)
    if env.budgets:
        _check_budgets(config, entry, rollout_backend)
    if workers_of(env.workers).ray and importlib.util.find_spec("ray") is None:
        raise ConfigError(f"env.workers={env.workers}: ray is not installed; pip install 'hgpo_jax[ray]'")
    if config.rollout.ready_fraction < 1 and not compiled and not env.workers:
        raise ConfigError(
            f"rollout.ready_fraction={config.rollout.ready_fraction:g}: needs env.workers; in this process environments step "
            "one by one"
        )


def _check_template(env: EnvConfig, entry: Environment) -> None:
    """Checks that a template does not ask for a listed action where an environment reads whole responses."""
    if not env.template:
        return
    try:
        template = load_template(env.template)
    except (ValueError, OSError) as error:
        said = str(error).removeprefix(f"template={env.template}: ")
        raise ConfigError(one_line(f"env.template={env.template}: {said}")) from None
    if not entry.free_text or not load_template(entry.template).bare:
        return
    if not template.bare and "commands" in template.slots:
        chats = [name for name in template_names() if name == f"{entry.template}_conversation"]
        mend = f"leave it out, or give {chats[0]} for a chat" if chats else "leave it out"
        raise ConfigError(f"env.template={env.template}: env.name={env.name} lists no actions to choose from; {mend}")


def example_budgets(turns: int) -> str:
    """Returns two values of env.budgets for episodes of so many turns."""
    return f"{max(1, turns // 4)},{max(1, turns // 2)}"


def _check_budgets(config: Config, entry: Environment, rollout_backend: Backend) -> None:
    """Checks whether prompts can state budgets, episodes exceed them, and prompt groups have each as often."""
    env, size = config.env, config.rollout.group_size
    given = f"env.budgets={','.join(map(str, env.budgets))}"
    if entry.agent or rollout_backend != "host":
        mend = f"give env.name={env.name}_text" if f"{env.name}_text" in ENVIRONMENTS else "leave it out"
        mend = "give env.compiled=false" if rollout_backend == "compiled_text" and not entry.pictures else mend
        raise ConfigError(f"{given}: env.name={env.name} is not played as text on the host; {mend}")
    if max(env.budgets) > (turns := max_turns(env)):
        raise ConfigError(f"{given}: an episode ends after {turns} turns; give no more")
    if max(env.budgets) == turns and method_named(config.method).estimator == "hbpo":
        mend = f"give smaller ones, for instance {example_budgets(turns)}"
        raise ConfigError(f"{given}: method={config.method} gives no score for a success within all {turns} turns; {mend}")
    if size % len(env.budgets):
        raise ConfigError(f"{given}: rollout.group_size={size} is no multiple of {len(env.budgets)}, their number; give one")


def _check_keep(config: Config) -> None:
    """Checks whether unfinished episodes can go on in the next rollout."""
    given, method = f"rollout.keep={config.rollout.keep}", method_named(config.method)
    if not config.rollout.reread:
        _check_reread(config)
    if config.rollout.keep == 1:
        return
    if environment(config.env).agent or backend(config) != "host":
        raise ConfigError(f"{given}: env.name={config.env.name} is not played as text on the host; leave it out")
    if method.dynamic_sampling or method.alternate:
        why = "samples until it has enough" if method.dynamic_sampling else "trains the roles in turns"
        raise ConfigError(f"{given}: method={config.method} {why}; leave one of the two out")


def _check_reread(config: Config) -> None:
    """Checks whether answers can go on from what earlier weights computed."""
    given = "rollout.reread=false"
    if config.rollout.keep == 1:
        raise ConfigError(f"{given}: no answer is interrupted with rollout.keep=1; leave it out")
    if config.rollout.constrain == "admissible":
        raise ConfigError(
            f"{given}: with rollout.constrain=admissible an interrupted answer begins anew; leave one of the two out"
        )
    if converses(config):
        why = f"whole chats of env.template={config.env.template} would stay as earlier weights read them"
        raise ConfigError(f"{given}: {why}; leave it out")


def _check_store(config: Config) -> None:
    if config.rollout.store and not converses(config):
        why = f"no prompt of env.name={config.env.name} goes on from an earlier one; leave it at 0"
        raise ConfigError(f"rollout.store={config.rollout.store}: {why}")


def _check_pictures(config: Config, method: Method, rollout_backend: Backend) -> None:
    history, name, env = config.rollout.history_length, config.env.name, config.env
    if config.policy.tokenizer and not config.policy.source:
        why = f"random weights read env.name={name} in its own words; leave it out, or give policy=, too"
        raise ConfigError(f"policy.tokenizer={config.policy.tokenizer}: {why}")
    if rollout_backend == "host":
        given = f"env.workers={env.workers}" if env.workers else f"env.template={env.template}"
        given = "env.compiled=false" if env.compiled is False else given
        raise ConfigError(f"{given}: pictures of env.name={name} are seen on the device alone, one a prompt; leave it out")
    if history and rollout_backend == "compiled":
        why = f"a prompt of env.name={name} shows one picture, and no past turns; give 0"
        raise ConfigError(f"rollout.history_length={history}: {why}")


def _check_sight(config: Config, method: Method, rollout_backend: Backend) -> None:
    """Raises ConfigError for what no policy that sees pictures can do."""
    name = config.env.name
    if rollout_backend == "host" and not config.policy.source:
        raise ConfigError(f"policy.source=: env.name={name} shows pictures; give policy=, a qwen2_5_vl")
    if rollout_backend == "host" and any(role.policy for role in config.roles.values()):
        raise ConfigError(f"roles: env.name={name} shows pictures, which one policy sees; leave the roles' policies out")
    if config.warm_start == "cloning" and rollout_backend != "compiled":
        raise ConfigError(f"warm_start=cloning: a language model clones texts, and env.name={name} shows pictures; give none")
    if method.critic:
        raise ConfigError(f"method={config.method}: its critic sees no pictures, which env.name={name} shows; give one without")


def _check_cloning(config: Config, entry: Environment, rollout_backend: Backend) -> None:
    rank = config.lora.rank
    if entry.agent or (rollout_backend == "compiled" and not entry.expert):
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


def _check_method(config: Config, method: Method, entry: Environment, rollout_backend: Backend) -> None:
    """Checks what a method needs, and its loss."""
    name = config.method
    if config.rollout.group_size == 1 and method.estimator in COMPARE_EPISODES:
        raise ConfigError(f"rollout.group_size=1: method={name} compares a task's episodes with each other; give 2 or more")
    _check_loss(config, method)
    loss = loss_table.name_of(config.learner, method)
    plans = "planning" in loss_table.parameters(loss)[0]
    needing = f"method={name}" if method.parts else f"learner.loss={loss}" if plans else ""
    # The environment is made only for what needs its parts: ALFWorld's would load its games.
    if needing and not (rollout_backend == "compiled" and hasattr(entry.compiled and entry.compiled(config), "answer_parts")):
        raise ConfigError(
            f"{needing}: needs answers with switch, subgoal and action parts, which env.name={config.env.name} does not "
            "have; give env.name=household_subgoals, or one of your own with answer_parts"
        )


def _check_comparison(config: Config, method: Method) -> None:
    """Checks which episodes and turns a method is to compare."""
    name, keep, by_role = config.method, config.advantage.keep, config.advantage.by_role
    if keep != "all" and method.critic:
        raise ConfigError(f"advantage.keep={keep}: the critic of method={name} learns from all episodes; leave it out")
    if keep != "all" and config.rollout.group_size == 1:
        raise ConfigError(
            f"advantage.keep={keep}: with rollout.group_size=1 it drops every episode, since none of the same task scores "
            "otherwise; leave it out"
        )
    if keep == "informative" and method.dynamic_sampling:
        raise ConfigError(f"advantage.keep=informative: method={name} keeps no other episodes anyway; leave it out")
    statistics = config.advantage.statistics
    if statistics != "per_step" and "statistics" not in parameters(method.estimator)[1]:
        raise ConfigError(f"advantage.statistics={statistics}: method={name} compares no whole episodes; leave it out")
    if by_role and method.estimator in NO_ROLES_TO_TELL_APART:
        raise ConfigError(f"advantage.by_role=true: method={name} compares no turns of different roles; leave it out")
    if by_role and len(role_names(config)) == 1:
        raise ConfigError(f"advantage.by_role=true: env.name={config.env.name} has one role; leave it out")


def _check_loss(config: Config, method: Method) -> None:
    """Checks the loss of a method, and fields that it does not read."""
    learner, loss = config.learner, loss_table.name_of(config.learner, method)
    loss_table.check_loss(learner, method)
    of = f"learner.loss={loss}" if learner.loss else f"method={config.method}"
    if loss in loss_table.WHOLE_RESPONSES and (by_token := learner.rollout_correction) in ("token", "mask"):
        raise ConfigError(f"learner.rollout_correction={by_token}: {of} weighs whole responses; give sequence, or none")
    if loss == "egpo" and (weights := learner.rollout_correction) in ("token", "sequence"):
        raise ConfigError(f"learner.rollout_correction={weights}: {of} adds a bonus that it does not weigh; give mask, or none")
    if loss in loss_table.WHOLE_RESPONSES and method.parts:
        raise ConfigError(f"{of}: weighs whole responses; the parts of an answer of method={config.method} differ")
    behind = {"overlap": config.rollout.overlap, "keep": config.rollout.keep - 1}
    older = next((f"rollout.{name}={getattr(config.rollout, name)}" for name, more in behind.items() if more), "")
    options = loss_table.options(learner, method)
    narrow = loss in NARROW and min(options["clip_low"], options["clip_high"]) < WIDE
    if older and learner.rollout_correction == "none" and narrow:
        raise ConfigError(
            f"{older}: {of} clips ratios that one update already exceeds; give learner.rollout_correction={NARROW[loss]}, too"
        )
    if config.rollout.constrain == "admissible" and loss == "hapo":
        raise ConfigError(
            f"rollout.constrain=admissible: {of} compares how uncertain tokens are, and many have no choice; leave one of the "
            "two out"
        )
    for field in loss_table.FIELDS:
        value, default = getattr(learner, field), LearnerConfig.model_fields[field].default
        if field not in options and value != default:
            end = "leave it out" if default is None else f"leave it at {default}"
            raise ConfigError(f"learner.{field}={value}: {of} does not read it; {end}")


def _check_overlong_cache(config: Config, rollout_backend: Backend) -> None:
    limit = config.rollout.response_limit
    why = f"more than rollout.response_limit={limit}; give less"
    if rollout_backend == "compiled":
        why = f"the answers of env.name={config.env.name}, compiled, have their own length; leave it out"
    if rollout_backend == "compiled" or config.reward.overlong_cache > limit:
        raise ConfigError(f"reward.overlong_cache={config.reward.overlong_cache}: {why}")


def _check_unread(env: EnvConfig, entry: Environment, rollout_backend: Backend) -> None:
    """Rejects fields of `env` that the environment does not read, where they are not at their defaults."""
    fields = {"name", "options", "compiled", "max_turns", *entry.options}
    on_device = rollout_backend != "host"
    fields |= set() if on_device else {"workers", "time_limit"}
    fields |= set() if entry.agent else {"template"}
    fields |= set() if rollout_backend == "compiled" or entry.agent else {"strict"}
    fields |= set() if rollout_backend == "compiled" else {"state_key"}
    fields |= set() if on_device or entry.agent else {"budgets"}
    for name, info in EnvConfig.model_fields.items():
        value, default = (",".join(map(str, v)) if isinstance(v, tuple) else v for v in (getattr(env, name), info.default))
        if name not in fields and value != default:
            face = ", compiled," if on_device and name in ("strict", "state_key", "workers", "time_limit") else ""
            raise ConfigError(f"env.{name}={value}: env.name={env.name}{face} does not read it; leave it at {default!r}")


def check_overrides(config: Config, overrides: Sequence[str]) -> None:
    """Rejects an override that has no effect in this configuration. Raises ConfigError.

    A file is not checked: it may hold fields for one of several methods, such as a critic's settings, or overridden ones.
    """
    env, method = ENVIRONMENTS.get(config.env.name), METHODS.get(config.method)  # your own have no entry
    adapters = config.lora.rank or any(role.lora_rank for role in config.roles.values())
    as_text = env is None or backend(config) != "compiled"
    text = as_text, f"env.name={config.env.name}, compiled, is not told as text; leave it out"
    conditions: dict[str, tuple[Any, str]] = {
        **{f"rollout.{name}": text for name in ("prompt_limit", "response_limit", "stop", "thinking")},
        "critic.": (method and method.critic, f"method={config.method} has no critic; leave it out"),
        "lora.": (adapters, "there are no adapters; give lora.rank, too"),
        "learner.mask_": (
            config.learner.rollout_correction == "mask",
            "nothing is masked; give learner.rollout_correction=mask",
        ),
        "policy.vision_": (env and env.is_seen, f"env.name={config.env.name} shows no pictures; leave it out"),
        **{
            f"policy.{size}": (not config.policy.source, "policy.source has sizes of its own; leave it out")
            for size in PolicyConfig().sizes
        },
        **{
            f"reward.{name}": (config.reward.source, "there is no reward function; give reward.source, too")
            for name in ("workers", "time_limit")
        },
        "rollout.prompt_widths": (
            env and backend(config) == "compiled_text",  # one's own never is
            f"env.name={config.env.name} is not played as text on the device; leave it out",
        ),
        "rollout.ready_fraction": (as_text, f"env.name={config.env.name}, compiled, steps all episodes at once; leave it out"),
        "env.generated": (config.env.split == "generated", "is read with env.split=generated alone; leave it out"),
        "env.passages": (
            not (config.env.data or config.env.retriever),
            "is the size of the generated world, and env.data or env.retriever has others; leave it out",
        ),
        "env.compiled": (env and env.compiled and env.text, f"env.name={config.env.name} has no such choice; leave it out"),
    }
    if method:
        reads = parameters(method.estimator)[1]
        why = f"method={config.method} does not read it; leave it out"
        conditions |= {f"advantage.{name}": (name in reads, why) for name in READ_BY_SOME}
    for override in overrides:
        name = override.partition("=")[0]
        for begin, (applies, why) in conditions.items():
            if name.startswith(begin) and name != "lora.rank" and not applies:
                raise ConfigError(f"{override:.200}: {why}")


def _check_roles(config: Config, names: tuple[str, ...], critic: bool) -> None:
    """Raises ConfigError for settings of roles that an environment with the roles `names` does not have."""
    policies = roles_by_policy(config, names)
    for role, settings in config.roles.items():
        if role not in names:
            raise ConfigError(unknown_role(config.env.name, role, settings, names))
        _check_role(config, role, settings, shares=role not in policies, critic=critic)


def _no_own_reward(config: Config, settings: RoleConfig) -> str:
    """Says why a role cannot have this reward of its own; "" if it can."""
    method = method_named(config.method)
    needed = parameters(method.estimator)[0]
    if method.critic:
        return f"method={config.method} has one critic, which learns from the team's reward"
    if read := [name for name in ("signals", "success") if name in needed]:
        return f"method={config.method} compares {read[0]}, the same for all roles"
    if method.dynamic_sampling:
        return f"method={config.method} chooses prompt groups by the team's reward"
    if config.reward.overlong_cache and TEAM_REWARD not in settings.reward:
        return f"reward.overlong_cache={config.reward.overlong_cache} lowers the team's reward alone"
    return "a signal is named twice" if len(set(settings.reward)) < len(settings.reward) else ""


def _check_role(config: Config, role: str, settings: RoleConfig, shares: bool, critic: bool) -> None:
    """Raises ConfigError for settings of one role. shares: its policy with other roles. critic: the method has one."""
    role_config = config_of(config, role)
    adapters = config.warm_start == "cloning" and settings.lora_rank

    def refuse(name: str, value: object, why: str) -> NoReturn:
        raise ConfigError(f"roles.{role}.{name}={value}: {why}")

    if adapters and not role_config.policy.source:
        refuse("lora_rank", settings.lora_rank, "LoRA needs base weights; give policy=, too")
    if adapters and config.cloning.optimizer == "muon":
        refuse("lora_rank", settings.lora_rank, "cloning.optimizer=muon needs full-rank weights; give adamw")
    if critic and settings.has_weights:
        name, value = next(iter(settings.model_dump(include={"policy", "lora_rank"}, exclude_defaults=True).items()))
        why = f"method={config.method} has one critic, for a policy that all roles share; leave it out, or take a method "
        refuse(name, value, why + "without a critic")
    if settings.reward and (why := _no_own_reward(config, settings)):
        refuse("reward", ",".join(settings.reward), f"{why}; leave it out")
    if settings.lr is not None and shares:
        refuse("lr", settings.lr, f"it shares its policy, whose rate is learner.lr; give roles.{role}.policy=own, too")
