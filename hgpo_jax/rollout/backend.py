"""Where the configured episodes are played, and in which form the policy reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from hgpo_jax.config import Config
from hgpo_jax.rollout.chat_prompts import load_template
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.requirements import ONE_ROLE, roles_of
from hgpo_jax.rollout.workers import opened

# Where episodes are played. `compiled`: in one program with the policy, whose tokens are the environment's own words;
# `compiled_text`: in one program with a language model, which reads text; `host`: as text, in Python.
Backend = Literal["compiled", "compiled_text", "host"]


def backend(config: Config) -> Backend:
    """Decides where the configured environment is played, and in which form the policy reads it.

    An environment that is both compiled and text is text for a policy that reads text. It is played on the device unless
    `env.workers` or `env.compiled=false` ask for the host. With random weights it is played on the device only on demand
    (`env.compiled=true`), because the output of such a policy cannot be reproduced there.
    """
    entry = environment(config.env)
    if entry.compiled is None or entry.text is None:
        return "compiled" if entry.compiled else "host"
    if config.env.compiled is not False and not (config.policy.tokenizer or _reads_text(config.policy.source)):
        return "compiled"
    if config.env.compiled is None:
        return "compiled_text" if config.policy.source and not config.env.workers and not converses(config) else "host"
    return "compiled_text" if config.env.compiled else "host"


def converses(config: Config) -> bool:
    """Whether prompts may begin with earlier turns, token by token: those of agents and of a chat (`Template.chats`)."""
    if environment(config.env).agent:
        return True
    try:
        return bool(config.env.template) and load_template(config.env.template).chats
    except ValueError:  # refused where it is used
        return False


def _reads_text(source: str) -> bool:
    """Whether the policy in this folder reads text: all do but small ones with a compiled environment's words, which have no
    chat template."""
    folder = Path(source)
    if not source or not (folder / "tokenizer.json").is_file():
        return bool(source)
    about = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (about.is_file() and b'"chat_template"' in about.read_bytes())


def role_names(config: Config) -> tuple[str, ...]:
    """Returns the role names of the configured environment, which is made to find out. Raises the errors of making it."""
    with one_environment(config) as env:
        return roles_of(env) if env else ONE_ROLE


@contextlib.contextmanager
def one_environment(config: Config) -> Iterator[Any]:
    """Yields the configured environment, in the form in which it is played; None for agents. Raises the errors of making it."""
    entry = environment(config.env)
    if backend(config) == "compiled":
        assert entry.compiled is not None
        yield entry.compiled(config)
    elif entry.text:
        with opened(entry.text(config)[0]) as env:
            yield env
    else:
        yield None
