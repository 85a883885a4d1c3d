"""A rehearsal: a run as configured, from its first rollout to the report, in minutes on this machine's processors.

Dtype, mesh (on simulated devices), method, critic, adapters, packing, remat, offload, templates, environment and tokenizer are
those of the configuration. Only what can be counted is smaller: layers, heads, widths, groups, turns, tokens, iterations. Every
stage is the command that a user would type, in a process of its own, so that one that is killed is named, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import yaml

from hgpo_jax.config import Config
from hgpo_jax.config.workers import at_most
from hgpo_jax.learner.methods import method_named
from hgpo_jax.policy import ModelConfig, Policy, huggingface_folder, initialize
from hgpo_jax.policy.mesh import make_mesh, parse_mesh
from hgpo_jax.policy.pictures import VISION_TOKENS
from hgpo_jax.policy.presets import preset
from hgpo_jax.policy.source import find
from hgpo_jax.policy.tokenizer import embedding_rows, read_tokenizer
from hgpo_jax.rollout.backend import backend
from hgpo_jax.rollout.env_tokenizer import fresh_tokenizer, seeing_tokenizer
from hgpo_jax.rollout.environments import ENVIRONMENTS, environment
from hgpo_jax.setup.devices import open_devices
from hgpo_jax.setup.sight import rope_sections
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.progress import say

HEAD_SIZE, LAYERS = 8, 2  # every weight of a vocabulary of 150,000 words takes time, whatever its use
OPEN_AXIS = 2  # devices of an axis that is as large as the machine
OUTPUT = 20  # lines of a stage that fails
QUIET = 20  # seconds between words of what a stage does
# Field -> its most.
MOST = {
    "rollout.group_size": 2,
    "rollout.prompt_limit": 1016,  # of which a sampler on the host makes three widths, not four
    "rollout.prompt_widths": 2,
    "rollout.response_limit": 16,
    "reward.overlong_cache": 16,
    "env.max_turns": 3,
    "env.generated": 32,
    "env.workers": 2,
    "learner.warmup_steps": 1,
    "learner.microbatch_size": 2,
    "critic.warmup_steps": 1,
    "cloning.max_steps": 2,
    "cloning.check_every": 1,
    "cloning.batch_size": 8,
    "cloning.episodes": 32,
    "evaluation.episodes": 4,
    "evaluation.every": 1,
    "log.checkpoint_every": 1,
    "log.dump_every": 1,
}


def rehearse(config: Config) -> None:
    """Rehearses a run. Raises ConfigError for what the run itself would refuse, RunError for a stage that fails."""
    jax.config.update("jax_platforms", "cpu")
    check_together(config)
    folder = Path(tempfile.mkdtemp(prefix="hgpo-rehearsal-"))
    with _sigterm_raises(), contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder)
        stages, unseen = _prepare(config, folder)
        devices = sum(math.prod(_axes(mesh).values()) for mesh in (config.mesh, config.rollout.mesh) if mesh)
        try:
            for number, (title, command) in enumerate(stages, 1):
                print(f"[{number}/{len(stages)}] {title}", file=sys.stderr, flush=True)
                seconds = _run(title, command, devices, folder)
                print(f"    {seconds:.0f} s", file=sys.stderr, flush=True)
        except RunError:
            at_end.pop_all()  # its message names a log in the folder
            raise
    unseen += [
        f"speed and memory of the devices (python -m hgpo_jax.bench plan --config ... counts the memory of mesh {config.mesh})",
        "fused kernels of GPUs and TPUs, and communication between devices",
        "learning",
    ]
    say("it runs to the end; not shown: " + "; ".join(unseen))


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM an exception, SystemExit; by itself it would end the process at once, with nothing cleaned up."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare(config: Config, folder: Path) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Writes what the stages need to the folder; returns their titles and commands, and what they do not show."""
    axes = _axes(config.mesh)
    fields, unseen = smaller(config, axes), []
    apart = _axes(config.rollout.mesh) if config.rollout.mesh else axes
    if sources := {config.policy.source, *(role.policy for role in config.roles.values())} - {"", "own", "shared"}:
        both = {axis: math.lcm(size, apart[axis]) for axis, size in axes.items()}
        unseen += _save_policies(config, sources, both, fields, folder)
    file, run = folder / "rehearsal.yaml", folder / "run"
    file.write_text(yaml.safe_dump(fields, sort_keys=False))
    say(f"rehearsal of {config.name} in {folder}: {config.method}, mesh {axes}\n{_changes(config, fields)}")
    stages = [
        ("train one iteration", ["train", "--config", str(file), f"run_dir={run}", "iterations=1"]),
        ("resume for another", ["train", "--resume", str(run), "iterations=2"]),
        ("evaluate", ["evaluate", str(run)]),
        ("report", ["report", str(run)]),
    ]
    if config.policy.source and not config.roles:  # of which each may have a policy
        stages.append(("export", ["export", str(run), "--to", str(folder / "exported")]))
    return stages, unseen


def _axes(spec: str) -> dict[str, int]:
    """Returns the sizes of the mesh's axes; one that is as large as the machine has OPEN_AXIS devices."""
    open_axes = spec.replace("-1", str(OPEN_AXIS)) if spec.strip() != "auto" else f"data={OPEN_AXIS}"
    try:
        return parse_mesh(open_axes, 2**20)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def smaller(config: Config, axes: dict[str, int]) -> dict:
    """Returns the fields of the configuration's rehearsal."""
    fields = config.model_dump(mode="json")
    for name in _counted(config):
        section, field = name.split(".")
        smallest = at_most if name == "env.workers" else min
        fields[section][field] = smallest(fields[section][field], MOST[name])
    apart = _axes(config.rollout.mesh) if config.rollout.mesh else axes
    shards = math.lcm(axes["data"] * axes["fsdp"], apart["data"] * apart["fsdp"])
    rollout, learner = fields["rollout"], fields["learner"]
    rollout["prompt_groups"] = shards // math.gcd(shards, rollout["group_size"]) * (1 if shards > 2 else 2)
    episodes = rollout["prompt_groups"] * rollout["group_size"]
    rollout["decode_batch_size"] = min(rollout["decode_batch_size"], max(1, episodes // apart["data"] // 2))
    learner["minibatch_size"] = min(learner["minibatch_size"], 2 * learner["microbatch_size"] * shards)
    fields["env"]["budgets"] = [
        max(1, min(turns, fields["env"]["max_turns"] - 1)) for turns in config.env.budgets[: rollout["group_size"]]
    ]
    fields |= {"run_dir": "", "iterations": 2, "name": f"rehearsal-{config.name}"[:100]}
    fields["log"]["wandb"] = False
    fields["mesh"] = ",".join(f"{axis}={size}" for axis, size in axes.items())
    return fields


def _counted(config: Config) -> list[str]:
    """Lists the fields of MOST that the configuration reads: others must stay as they are."""
    compiled = backend(config) == "compiled"  # whose prompts and answers have lengths of their own
    unread = {
        "rollout.prompt_limit": compiled,
        "rollout.response_limit": compiled,
        "rollout.prompt_widths": backend(config) != "compiled_text",
        "env.max_turns": config.env.name not in ENVIRONMENTS,
        "env.generated": config.env.split != "generated",
        "cloning": config.warm_start != "cloning",
        "critic": not method_named(config.method).critic,
    }
    return [name for name in MOST if not unread.get(name) and not unread.get(name.partition(".")[0])]


def _changes(config: Config, fields: dict) -> str:
    """Lists what is smaller than configured."""
    before = config.model_dump(mode="json")
    names = [*_counted(config), "rollout.prompt_groups", "rollout.decode_batch_size", "learner.minibatch_size"]
    parts = []
    for name in names:
        section, field = name.split(".")
        if before[section][field] != fields[section][field]:
            parts.append(f"{name} {before[section][field]} -> {fields[section][field]}")
    return "  " + ", ".join(parts)


def _save_policies(config: Config, sources: set[str], axes: dict[str, int], fields: dict, folder: Path) -> list[str]:
    """Writes a small random policy in place of each pretrained one, and names it in `fields`; returns what that hides."""
    open_devices()
    mesh = make_mesh("data=1")
    unseen = [f"the weights of {', '.join(sorted(sources))} (random ones of {LAYERS} layers instead)"]
    for number, source in enumerate(sorted(sources)):
        model, tokenizer, original = _origin(config, source)
        if original is None:
            unseen.append(
                f"the tokenizer and template of {source}, which are not on this machine (the environment's own words)"
            )
        model = with_tokens_of(smaller_model(model, axes, len(tokenizer), sees=environment(config.env).is_seen), tokenizer)
        place = folder / f"policy{number}"
        Policy(model, initialize(model, 0, mesh), tokenizer).save(place)
        if original:
            huggingface_folder.copy_tokenizer(original, place)
        if fields["policy"]["source"] == source:
            fields["policy"] |= {"source": str(place), "tokenizer": ""}
        for role in fields["roles"].values():
            role["policy"] = str(place) if role["policy"] == source else role["policy"]
    return unseen


def _origin(config: Config, source: str) -> tuple[ModelConfig, Any, Path | None]:
    """Returns a source's sizes, its tokenizer and the folder of that, None for a stand-in. Raises ConfigError."""
    original: Path | None
    try:
        original = find(config.policy.tokenizer or source, config.cache_dir)
        tokenizer = read_tokenizer(str(original))
    except ValueError:
        entry = environment(config.env)
        original, tokenizer = None, seeing_tokenizer(entry.template) if entry.is_seen else fresh_tokenizer(config)
    try:
        return preset(source) or huggingface_folder.read_config(find(source, config.cache_dir)), tokenizer, original
    except ValueError as error:
        raise ConfigError(f"policy.source={source}: its sizes are not known: {error}") from None


def smaller_model(model: ModelConfig, axes: dict[str, int], words: int, sees: bool = False) -> ModelConfig:
    """Returns a model of few layers and heads, with the same ratios of heads and widths, that the mesh divides.

    sees: whether it keeps its vision tower, with few narrow blocks.
    """
    tensor = axes["tensor"]
    kv_heads = tensor if model.num_key_value_heads % tensor == 0 else 1
    heads = kv_heads * (model.num_attention_heads // model.num_key_value_heads)
    if heads % tensor:
        heads *= tensor
    size = HEAD_SIZE * (axes["fsdp"] // math.gcd(axes["fsdp"], HEAD_SIZE * heads))
    width = heads * size
    inner = math.ceil(model.intermediate_size * width / model.hidden_size / (size * tensor)) * size * tensor
    split = tensor * axes["fsdp"]
    vision = None
    if sees and model.vision:
        v = model.vision
        depth, whole = min(LAYERS, v.depth), v.fullatt_block_indexes
        # Both kinds of attention, where the model has them.
        full = tuple(range(depth)) if len(whole) == v.depth else (depth - 1,) if whole else ()
        narrow: dict[str, Any] = {
            "hidden_size": 4 * v.num_heads,
            "fullatt_block_indexes": full,
            "mrope_section": rope_sections(size // 2),
        }
        narrow["intermediate_size"] = math.ceil(v.intermediate_size * 4 * v.num_heads / v.hidden_size / split) * split
        vision = dataclasses.replace(v, depth=depth, out_hidden_size=width, **narrow)
    return dataclasses.replace(
        model,
        vocab_size=math.ceil(max(embedding_rows(words), words) / split) * split,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=min(LAYERS, model.num_hidden_layers),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size if model.model_type == "qwen3" else None,
        model_type="qwen2" if model.vision and not vision else model.model_type,
        vision=vision,
    )


def with_tokens_of(model: ModelConfig, tokenizer) -> ModelConfig:
    """Returns a model whose pictures have the tokens of this tokenizer, if it sees any."""
    if model.vision is None:
        return model
    ids = [tokenizer.get_vocab().get(token) for token in VISION_TOKENS]
    if None in ids:  # refused where a run begins
        return model
    before, feature, after = ids
    tokens = {"vision_start_token_id": before, "image_token_id": feature, "vision_end_token_id": after}
    return dataclasses.replace(model, vision=dataclasses.replace(model.vision, **tokens, video_token_id=feature))


def _run(title: str, command: list[str], devices: int, folder: Path) -> float:
    """Runs one of our commands on simulated devices; returns its seconds. Raises RunError."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # which stages share
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        # A program that runs a few times on small arrays is not worth optimizing.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    environment = compiled | os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    began, log = time.monotonic(), folder / f"{title.split()[0]}.log"

    def output() -> list[str]:
        return [line for line in log.read_text(errors="replace").splitlines() if line.strip()]

    with log.open("w") as out:
        child = subprocess.Popen([sys.executable, "-m", "hgpo_jax", *command], stdout=out, stderr=out, env=environment)
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(QUIET)
                    break
                print(f"    {time.monotonic() - began:.0f} s: {''.join(output()[-1:])}", file=sys.stderr, flush=True)
        finally:  # after a signal, too
            child.kill()
            code = child.wait()
    if code:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(*output()[-OUTPUT:], sep="\n", file=sys.stderr)
        raise RunError(f"rehearsal: {title} {how}; hgpo_jax {' '.join(command)}; its output is in {log}")
    return time.monotonic() - began
