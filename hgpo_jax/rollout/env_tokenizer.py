"""The vocabulary of a small policy for a text environment: the words of the environment's own texts."""

from __future__ import annotations

import functools
import json

from hgpo_jax.config import Config
from hgpo_jax.policy.pictures import VISION_TOKENS
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.policy.tokenizer import PLAIN, text_tokenizer
from hgpo_jax.rollout.chat_prompts import load_template
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.scripted_play import play
from hgpo_jax.rollout.tasks import task_numbers
from hgpo_jax.rollout.workers import opened
from hgpo_jax.utils.errors import ConfigError

# How Qwen's chat templates frame messages, without their system message.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EPISODES = 64  # of scripted and, if there is an expert, noisy play
TEMPLATE = "plain"  # a prompt of only the task, the history, the observation and the commands


def template_of(config: Config, tokenizer) -> str:
    """Returns the template of a text environment's prompts for a policy with this tokenizer."""
    plain = TEMPLATE if getattr(tokenizer, "chat_template", None) == PLAIN else environment(config.env).template
    return config.env.template or plain


def seeing_tokenizer(template: str):
    """Returns a small tokenizer that stands in for a Qwen2.5-VL's: of the words of one template, with its frame around messages
    and its special tokens.
    """
    messages = load_template(template)
    parts = [part.template for part in (messages.first, messages.later)]
    tokenizer = text_tokenizer(line for part in parts for line in part.splitlines(keepends=True))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *VISION_TOKENS]})
    tokenizer.chat_template = CHATML
    return tokenizer


def fresh_tokenizer(config: Config):
    """Returns the tokenizer of a random policy for a text environment: the configured one, or one of the environment's words.

    The latter (`policy.tokenizer.text_tokenizer`) is built once from the prompts and commands of some episodes, and is the same
    for every seed. Raises ValueError, also as a ConfigError, if that cannot be read or played.
    """
    if config.policy.tokenizer:
        return load_tokenizer(config.policy.tokenizer, config.cache_dir)
    fields = config.model_dump(mode="json", include={"env", "rollout", "cache_dir"})
    return _own_tokenizer(json.dumps(fields, sort_keys=True))


@functools.lru_cache(maxsize=2)  # the memory plan and the policy both call it
def _own_tokenizer(fields: str):
    config = Config.model_validate(json.loads(fields))
    entry = environment(config.env)
    assert entry.text is not None  # an environment without a compiled version
    try:
        make_env, _ = entry.text(config)
        with opened(make_env) as env:
            count = len(env) if hasattr(env, "__len__") else None
        template = load_template(config.env.template or TEMPLATE)
        tasks = task_numbers("warm_start", 0, range(EPISODES), count)
        texts: dict[str, None] = {}  # in order of appearance
        commands: set[str] = set()
        episodes = play(
            make_env,
            tasks,
            noise=0.5,
            history_length=config.rollout.history_length,
            seed=0,
            time_limit=config.env.time_limit,
            budgets=config.env.budgets,
        )
        for episode in episodes:
            for turn, command in zip(episode.inputs, episode.commands, strict=True):
                texts |= dict.fromkeys((*template.render(turn).splitlines(keepends=True), command, *turn.commands))
                commands |= {command, *turn.commands}
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.name={config.env.name}: {' '.join(str(error).split())}") from None
    tokenizer = text_tokenizer(texts)
    longest = 1 + max(map(len, tokenizer(sorted(commands), add_special_tokens=False).input_ids), default=0)
    if longest > (limit := config.rollout.response_limit):
        raise ConfigError(f"rollout.response_limit={limit}: the commands take up to {longest} tokens; give as many or more")
    return tokenizer
