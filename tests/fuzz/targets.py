"""What is fuzzed: for each target a function that takes bytes, and the one kind of error that it may raise.

A target does what a command does with the input, and a little more: a game that loads is played, a shop is visited.
"""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from webshop_tiny import write

from hgpo_jax import config as configuration
from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.alfworld.pddl import parse_domain, parse_problem
from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.commands import click, parse
from hgpo_jax.policy import huggingface_folder, safetensors_files, shapes, weight_names
from hgpo_jax.policy.answers import find_action
from hgpo_jax.policy.mesh import abstract_mesh, parse_mesh
from hgpo_jax.rollout.environments import ENVIRONMENTS
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.utils.errors import ConfigError

CORPUS = Path(__file__).parent / "corpus"
CUT = b"\n--------\n"  # between the files of an input that is several


class Target(NamedTuple):
    """run(data, folder): raises nothing but `refusal`, in one line. count: inputs of the slow test. parts: of JSON."""

    run: Callable[[bytes, Path], None]
    refusal: type[Exception]
    count: int
    parts: tuple[Callable, Callable] | None = None

    def corpus(self, name: str) -> list[bytes]:
        return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def config_file(data: bytes, folder: Path) -> None:
    configuration.dump(configuration.load(str(written(folder, "run.yaml", data))))


def overrides(data: bytes, folder: Path) -> None:
    """One override a line, as the command line hands them over."""
    configuration.load(None, os.fsdecode(data).split("\n"))


def mesh(data: bytes, folder: Path) -> None:
    """The first line counts devices, the second is the spec, which may take fewer."""
    count, _, spec = os.fsdecode(data).partition("\n")
    devices = int(count) if re.fullmatch("[1-9][0-9]?", count) else 8
    try:
        sizes = parse_mesh(spec, devices)
        assert min(sizes.values()) > 0 and sizes["data"] * sizes["fsdp"] * sizes["tensor"] <= devices
    finally:
        abstract_mesh(spec)


def pddl(data: bytes, folder: Path) -> None:
    domain, _, problem = data.decode("utf-8", "replace").partition(CUT.decode())
    parse_problem(problem, parse_domain(domain))


def game(data: bytes, folder: Path) -> None:
    path = written(folder, "game.tw-pddl", data)
    loaded = load_game(path)
    for turn in range(3):
        commands = loaded.commands
        loaded.step(commands[turn % len(commands)] if commands else "look")
    loaded.step(data[:50].decode("latin-1"))


def webshop(data: bytes, folder: Path) -> None:
    """Catalogue, attributes and human instructions."""
    items, attributes, human = [*data.split(CUT), b"{}", b"{}"][:3]
    packed = items.startswith(b"\x1f\x8b")
    files = [
        written(folder, "items.json.gz" if packed else "items.json", items), written(folder, "attributes.json", attributes),
        written(folder, "human.json", human),
    ]  # fmt: skip
    shop = load_shop(*files[:2])
    if len(shop.goals):
        session = shop.session(0)
        session.reset()
        for command in ("search[cotton]", "click[next >]", "search[<q> cotton things]"):
            labels = session.step(command)[3]["clickables"]
            for label in labels[-2:]:
                session.step(click(label))
    load_shop(*files, human_goals=True)


@functools.cache
def tiny_shop(folder: Path):
    return load_shop(*write(folder)[:2], order="original")


def actions(data: bytes, folder: Path) -> None:
    """A response a line, read as every environment's and done in a shop."""
    session = tiny_shop(folder).session(0)
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        for fallback, lower_case in {(entry.fallback, entry.lower_case) for entry in ENVIRONMENTS.values()}:
            action, well_formed = find_action(line, fallback, lower_case=lower_case)
            assert lower_case or action in line
            assert isinstance(action, str) and isinstance(well_formed, bool)
            assert all(isinstance(part, str) for part in parse(action))
            text, reward, done, _ = session.step(action)
            assert isinstance(text, str) and 0 <= reward <= 1 and done == (session.purchase is not None)
        session.step(line)
        if session.done:
            session.reset()


def policy_folder(data: bytes, folder: Path) -> None:
    """config.json and the index of weights; the files that the index names are there."""
    config, index = [*data.split(CUT), b"{}"][:2]
    written(folder, "config.json", config)
    written(folder, "model.safetensors.index.json", index)
    if not (folder / "model-00001-of-00001.safetensors").is_file():
        written(folder, "model-00001-of-00001.safetensors", (CORPUS / "safetensors" / "one").read_bytes())
    try:
        read_policy(folder)
    finally:
        safetensors_files.Weights(folder)


def safetensors(data: bytes, folder: Path) -> None:
    """A file of weights."""
    held = safetensors_files.Weights(written(folder, "model.safetensors", data).parent)
    for name in list(held.shapes)[:3]:
        if held.dtypes[name] in safetensors_files.DTYPES and 0 not in held.shapes[name]:
            held.read(name)


@functools.cache
def tensors(config) -> list[weight_names.Tensor]:
    return weight_names.layout(shapes(config), config.num_hidden_layers)


def read_policy(folder: Path) -> None:
    config = huggingface_folder.read_config(folder)
    if max(config.num_hidden_layers, config.hidden_size) < 100:
        safetensors_files.Weights(folder).check(tensors(config), config.tie_word_embeddings)


def dump(data: bytes, folder: Path) -> None:
    """A dump of episodes, a zip of arrays."""
    Episodes.load(written(folder, "iteration-00000.npz", data))


def split_header(data: bytes) -> list[bytes]:
    size = int.from_bytes(data[:8], "little")
    return [data[8 : 8 + size], data[8 + size :]]


def join_header(parts: list[bytes]) -> bytes:
    return len(parts[0]).to_bytes(8, "little") + b"".join(parts)


one = (lambda data: [data], lambda parts: parts[0])
several = (lambda data: data.split(CUT), CUT.join)
TARGETS = {
    "config": Target(config_file, ConfigError, 1_000),
    "overrides": Target(overrides, ConfigError, 3_000),
    "mesh": Target(mesh, ValueError, 10_000),
    "pddl": Target(pddl, ValueError, 5_000),
    "game": Target(game, ValueError, 1_000, one),
    "webshop": Target(webshop, ValueError, 800, several),
    "actions": Target(actions, (), 4_000),
    "policy": Target(policy_folder, ValueError, 1_000, several),
    "safetensors": Target(safetensors, ValueError, 2_000, (split_header, join_header)),
    "dump": Target(dump, ValueError, 800),
}
