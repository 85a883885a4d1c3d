"""`python -m hgpo_jax.check`: plays an environment, reports violations of the specification and statistics of its episodes.

    python -m hgpo_jax.check household
    python -m hgpo_jax.check ./my_env.py:MyEnv env.options.size=5 --episodes 200
    python -m hgpo_jax.check alfworld data=$ALFWORLD_DATA policy.tokenizer=FOLDER      with the lengths of prompts in tokens

Every fault is one line that names the member and how to correct it. The exit code is 1 where there are faults; warnings name
what is odd and may be meant so: success and rewards that disagree, states that never recur.

A group of 8 plays each task. Peers at level k, which HGPO compares, are steps of a group with the same last k + 1
observations, k = 0 to rollout.history_length; a player who acts at random has fewer than most policies.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp

from hgpo_jax import config as configuration
from hgpo_jax.check import compiled, text
from hgpo_jax.check.play import GROUP, table, warnings
from hgpo_jax.config import Config, cli
from hgpo_jax.envs.command_line import printable, whole_number
from hgpo_jax.envs.protocol import is_compiled
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.rollout.backend import backend
from hgpo_jax.rollout.chat_prompts import MAX_CHARACTERS_PER_TOKEN, ChatFormat, load_template
from hgpo_jax.rollout.environments import ENVIRONMENTS, Environment, expert_of, made_outside
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.rollout.workers import end
from hgpo_jax.setup.validate import check_own_turns
from hgpo_jax.utils.errors import ConfigError, one_line

# What a check reads of a run's fields.
READ = (
    "env.",
    "data=",
    "seed=",
    "cache_dir=",
    "policy=",
    "policy.source=",
    "policy.tokenizer=",
    "rollout.history_length=",
    "rollout.prompt_groups=",
    "rollout.prompt_limit=",
    "rollout.thinking=",
)


def check(config: Config, episodes: int) -> tuple[list[str], str]:
    """Returns the faults of the configured environment, and a description of its episodes and oddities. Raises ConfigError."""
    name, K = config.env.name, config.rollout.history_length
    about = ENVIRONMENTS.get(name)
    if about is None:
        check_own_turns(config.env)
        make, env = made_outside(config.env)
        about, in_words = Environment(expert=expert_of(env)), is_compiled(env)
    elif about.agent:
        raise ConfigError(f"env.name={name}: is a command that plays by itself; there is nothing to check, run the command")
    else:
        in_words = backend(config) == "compiled"
        if about.pictures and not in_words:
            raise ConfigError(f"env.name={config.env.name}: prompts with pictures are not measured; leave policy.* out")
        build = about.compiled if in_words else about.text
        assert build is not None  # the configuration is checked
        make = functools.partial(build, config) if in_words else build(config)[0]
        env = make()
    groups = -(-episodes // GROUP)
    indices = jnp.arange(groups * GROUP) // GROUP
    if in_words:
        games = about.games(config)["train"] if about.games else None
        tasks = task_keys("train", config.seed, indices)
        if games is not None:
            tasks = jnp.asarray(games[task_numbers("train", config.seed, indices, len(games))])
        report, unit = compiled.check(env, about.expert, tasks, jax.random.key(config.seed), K), "words"
    else:
        with contextlib.ExitStack() as at_end:
            at_end.callback(end, env)

            def made():
                env = make()
                at_end.callback(end, env)
                return env

            count = len(env) if hasattr(env, "__len__") else None
            if count == 0:
                return ["__len__: is 0; let there be tasks, or leave it out where tasks are generated"], ""
            measure, unit = prompt_measure(config, about)
            numbers = task_numbers("train", config.seed, indices, count)
            report = text.check(made, env, numbers, config.seed, K, measure, config.env.state_key)
    if not report.plays:
        return report.faults, ""
    kind = "compiled" if in_words else "text"
    heading = f"{name}: {kind}; {report.speed:,.0f} steps/s; {groups} tasks, {GROUP} episodes each"
    odd = dict.fromkeys(f"warning: {line}" for name, play in report.plays.items() for line in warnings(play, name))
    return report.faults, "\n".join([heading, table(report.plays, K, unit), *odd])


def prompt_measure(config: Config, about: Environment) -> tuple[text.Measure, str]:
    """Returns a function that measures prompts, and the unit: tokens if a tokenizer is configured. Raises ConfigError."""
    rollout, template = config.rollout, config.env.template or about.template
    source = config.policy.tokenizer or config.policy.source
    try:
        if source:
            frame = ChatFrame(load_tokenizer(source, config.cache_dir), thinking=rollout.thinking)
            form = ChatFormat(frame, template, rollout.prompt_limit)
        else:
            messages = load_template(template)
    except (ValueError, OSError) as error:
        raise ConfigError(one_line(f"env.name={config.env.name}: {error}")) from None

    def tokens(inputs):
        prompts = form.build(inputs)
        return [len(prompt.ids) for prompt in prompts], sum(bool(p.pairs_dropped or p.tokens_cut) for p in prompts)

    def characters(inputs):
        answers = [sum(len(past.action) for past in each.chat) if messages.chats else 0 for each in inputs]
        lengths = [sum(map(len, messages.messages(each))) + said for each, said in zip(inputs, answers, strict=True)]
        return lengths, sum(length > rollout.prompt_limit * MAX_CHARACTERS_PER_TOKEN for length in lengths)

    return (tokens, "tokens") if source else (characters, "characters")


def main() -> None:
    p = cli.parser("check", __doc__)
    p.add_argument("name", metavar="ENV", help="env.name: one of ours, package.module:NAME or path/to/file.py:NAME")
    p.add_argument("overrides", nargs="*", metavar="field=value", help="fields of a run, as in env.options.size=5 seed=1")
    p.add_argument("--episodes", type=whole_number, default=100, metavar="N", help="rounded up to groups of 8; default 100")
    args = p.parse_intermixed_args()
    config = configuration.load(None, [f"env.name={args.name}", *args.overrides])
    for override in args.overrides:
        if not override.startswith(READ):
            raise ConfigError(f"{override:.200}: check does not read it, it only plays the environment; leave it out")
    faults, described = check(config, args.episodes)
    if described:
        print(printable(described))
    for fault in faults:
        print(f"fault: {printable(fault)}")
    print(f"{len(faults) or 'no'} fault{'s' if len(faults) != 1 else ''} found in {printable(args.name)}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    cli.run(main)
