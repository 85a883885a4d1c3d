"""Shared parts of `bench sample` and `bench update`: a policy of any shape with random weights, meshes to try, the peer."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hgpo_jax.config import Config
from hgpo_jax.envs.cli import whole_number
from hgpo_jax.policy import ModelConfig, shapes, shardings
from hgpo_jax.policy.mesh import abstract_mesh, make_mesh
from hgpo_jax.policy.presets import FAMILIES, preset
from hgpo_jax.setup import memory
from hgpo_jax.setup.job import open_devices, prepare_devices
from hgpo_jax.utils.errors import ConfigError

SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
}
HOUSEHOLD = "household"


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--policy",
        metavar="PRESET",
        default=HOUSEHOLD,
        help="shape of the policy: Qwen2.5-0.5B and the like, or household, the default run's (default)",
    )
    for option, name in SIZES.items():
        p.add_argument(f"--{option.replace('_', '-')}", type=whole_number, help=f"{name} in place of the preset's")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights at work")
    p.add_argument("--mesh", metavar="SPEC", help="mesh, as in data=2; default: one device and all of them, the better counts")
    p.add_argument("--repeats", type=whole_number, default=3, help="timed rounds, of which the median counts")
    add_against(p)


def add_against(p: argparse.ArgumentParser) -> None:
    p.add_argument("--against", choices=("transformers",), help="also do the work in PyTorch (pip install 'hgpo_jax[parity]')")


def workload(args: argparse.Namespace) -> memory.Workload:
    """Returns the policy's sizes and, for the household, those of its prompts and responses. Raises ConfigError."""
    if args.policy == HOUSEHOLD:
        found = memory.workload_of(Config(), abstract_mesh("data=1"))
    elif model := preset(args.policy):
        found = memory.Workload(model=model, prompt=128, response=32, steps=0, decode_batch=0)
    else:
        known = [HOUSEHOLD, *(family + size for family, (sizes, _) in FAMILIES.items() for size in sizes)]
        raise ConfigError(f"--policy {args.policy}: expected one of {', '.join(known)}")
    changes = {name: getattr(args, option) for option, name in SIZES.items() if getattr(args, option)}
    if {"hidden_size", "num_attention_heads"} & changes.keys() and found.model.model_type != "qwen3":
        changes["head_dim"] = None
    try:
        return dataclasses.replace(found, model=dataclasses.replace(found.model, **changes))
    except ValueError as error:
        raise ConfigError(f"--policy {args.policy}: {error}") from None


def refuse(args: argparse.Namespace, model: ModelConfig, rows: Sequence[int], tokens: int) -> None:
    """Raises ConfigError, before any measurement, for a mesh that divides neither rows nor weights, or for sizes of weights or
    of `tokens` in a row that the devices cannot hold."""
    for count in rows:
        for name, mesh in meshes(args.mesh, count).items():
            try:
                shardings(model, mesh)
            except ValueError as error:
                raise ConfigError(f"--mesh {name}: {error}") from None
    needed = sum(a.size for a in jax.tree.leaves(shapes(model))) * jnp.dtype(args.dtype).itemsize + 4 * max(rows) * tokens
    limit = memory.device_limit(jax.local_devices())
    if limit and needed > limit * jax.device_count():
        held = limit * jax.device_count() / memory.GiB
        raise ConfigError(
            f"--policy {args.policy}: weights and tokens take {needed / memory.GiB:.1f} GiB, the devices hold {held:.1f}; "
            "give smaller sizes"
        )


def meshes(spec: str | None, rows: int) -> dict:
    """Returns meshes to try by name: the given one, or one device and, if they can share the rows equally, all of them."""
    prepare_devices(Config())
    devices = jax.devices()
    names = [spec] if spec else ["data=1", *([f"data={len(devices)}"] if len(devices) > 1 and not rows % len(devices) else [])]
    try:
        found = {}
        for name in names:
            chosen = devices if "-1" in name or name == "auto" else devices[: abstract_mesh(name).size]
            found[name] = make_mesh(name, chosen)
    except ValueError as error:
        raise ConfigError(f"--mesh {spec}: {error}") from None
    shards = next(iter(found.values())).shape["data"]
    if rows % shards:
        raise ConfigError(f"--mesh {spec}: data={shards} does not divide the {rows} rows")
    return found


def load_peer(name: str | None):
    """Loads the module of the peer, None if none is requested. Raises ConfigError if it cannot do the same work."""
    if name is None:
        return None
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"--against {name}: needs torch; pip install 'hgpo_jax[parity]'")
    from hgpo_jax.bench import peer

    open_devices()
    peer.device()
    return peer
