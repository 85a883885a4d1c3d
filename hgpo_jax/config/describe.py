"""The text of `--help` about the fields."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from hgpo_jax.config.open_fields import OPEN, choices
from hgpo_jax.config.roles import RoleConfig
from hgpo_jax.config.schema import Config, fields, literals, role_fields

# The fields that `--help` shows; the others are behind `--help-all`.
COMMON = (
    "run_dir",
    "seed",
    "iterations",
    "method",
    "warm_start",
    "mesh",
    "env.name",
    "env.max_turns",
    "env.data",
    "policy.source",
    "lora.rank",
    "rollout.prompt_groups",
    "rollout.group_size",
    "rollout.history_length",
    "advantage.gamma",
    "advantage.normalize",
    "learner.lr",
    "learner.minibatch_size",
    "learner.microbatch_size",
    "learner.kl_weight",
    "log.checkpoint_every",
    "evaluation.episodes",
    "evaluation.every",
)


def describe(names: Iterable[str] | None = None) -> str:
    """Describes fields with defaults and meanings, by section: the named ones, or all, with a description of each section."""
    lines: list[str] = []
    section, all_fields = None, fields() | role_fields("NAME")
    for name in sorted(all_fields, key=lambda name: "." in name) if names is None else names:  # the run's own fields first
        head = name.rpartition(".")[0]
        if head != section:
            of = RoleConfig if head == "roles.NAME" else Config.model_fields[head].annotation if head else Config
            about = (of.__doc__ or "").strip()
            lines += ["", f"{head}: {about}" if head else about] if names is None else [""]
        section, info = head, all_fields[name]
        default = ",".join(info.default) if isinstance(info.default, tuple | dict) else info.default
        text = f"{info.description}{_choices(name, info.annotation)}"
        start = f"  {name}={default}"
        if len(start) > 35:  # on a line of its own
            lines.append(start)
            start = ""
        indent = " " * 36
        lines.append(textwrap.fill(text, 118, initial_indent=f"{start:36s}", subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(lines).strip("\n")


def completions(typed: str) -> list[str]:
    """Completes a partly typed `field=value`: returns matching fields, or the values of a field that has choices."""
    name, equals, _ = typed.partition("=")
    if not equals:
        return [f"{field}=" for field in fields() if field.startswith(typed)]
    info = fields().get(name)
    if info is None:
        return []
    options = choices(name) if name in OPEN else ("true", "false") if info.annotation is bool else literals(info.annotation)
    return [f"{name}={option}" for option in options if f"{name}={option}".startswith(typed)]


def _choices(name: str, annotation) -> str:
    options = (*choices(name), "package.module:NAME", "file.py:NAME") if name in OPEN else literals(annotation)
    return f" ({' | '.join(options)})" if options else ""
