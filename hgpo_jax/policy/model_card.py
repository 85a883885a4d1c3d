"""The README.md of a saved policy or adapter: the front matter that model hubs read, training, results, and how to load it."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import jinja2
import yaml

from hgpo_jax.config import Config, dump
from hgpo_jax.policy import huggingface_folder
from hgpo_jax.policy.source import find
from hgpo_jax.policy.tokenizer import AS_TRAINED, GENERATION
from hgpo_jax.utils.files import atomic_write

FILE = huggingface_folder.CARD
OURS = "hgpo_jax"  # in every card that this project writes


def write(folder: Path, config: Config, parameters: int, result: dict, sees: bool = False) -> None:
    """Writes the card of a policy that `config` trained.

    folder: the Hugging Face folder, or peft's folder of an adapter. parameters: number of the policy's parameters.
    result: the content of the run's evaluation.json. sees: whether the policy reads pictures.
    """
    adapter, generation_file = (folder / "adapter_config.json").is_file(), folder / GENERATION
    front = {
        **base_of(config.policy.source, config.cache_dir),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if sees else "text-generation",
        "tags": ["reinforcement-learning", "llm-agent", "hgpo_jax", _name(config.method), _name(config.env.name)],
    }
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hgpo_jax"), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = templates.get_template("model_card.md").render(
        front=yaml.safe_dump(front, sort_keys=False),
        adapter=adapter,
        sees=sees,
        config=config,
        base=front.get("base_model") or Path(config.policy.source).name,
        method=_name(config.method),
        env=_name(config.env.name),
        parameters=parameters,
        result=result,
        version=version("hgpo_jax"),
        dumped=dump(config),
        settings=json.loads(generation_file.read_text()).get(AS_TRAINED) if generation_file.is_file() else None,
    )
    with atomic_write(folder / FILE) as file:
        file.write(text)


def base_of(source: str, cache_dir: str) -> dict[str, str]:
    """Returns `base_model` (name on the hub) and `license` of the weights that training began with, if known."""
    if not source:
        return {}
    try:
        fields = front_matter(folder := find(source, cache_dir))
        if OURS not in (folder / FILE).read_text(encoding="utf-8"):
            fields.pop("base_model", None)  # what the copy of another's policy was trained from, not its own name
    except (OSError, ValueError):  # deleted since the run began, which is no reason to lose its card; or without a card
        fields = {}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists():
        fields["base_model"] = source
    elif cached := re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/", str(Path(source).absolute())):
        fields["base_model"] = f"{cached[1]}/{cached[2]}"
    return {name: fields[name] for name in ("base_model", "license") if isinstance(fields.get(name), str)}


def front_matter(folder: Path) -> dict:
    """Parses the YAML front matter of a folder's README.md; returns an empty dict if it cannot be read."""
    try:
        match = re.match(r"---\n(.*?\n)---\n", (folder / FILE).read_text(encoding="utf-8"), re.DOTALL)
        fields = yaml.safe_load(match[1]) if match else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _name(place: str) -> str:
    """Returns the last part of `./my_env.py:MyEnv`; other names unchanged."""
    return place.rpartition(":")[2]
