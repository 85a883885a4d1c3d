"""A run from the fields that a command was given to its results: checked, trained or resumed, evaluated, drawn."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from hgpo_jax import config as configuration
from hgpo_jax import memory, model_card
from hgpo_jax.agents import AgentRunner
from hgpo_jax.config import Config
from hgpo_jax.environments import environment
from hgpo_jax.errors import ConfigError
from hgpo_jax.evaluation import describe_evaluation, evaluate, validates_apart
from hgpo_jax.files import atomic_write, is_remote
from hgpo_jax.job import Job, Runner, build, job_mesh, open_devices, unrounded
from hgpo_jax.mesh import abstract_mesh, make_mesh
from hgpo_jax.own_words import fresh_tokenizer
from hgpo_jax.policy import Policy
from hgpo_jax.policy.chat_frame import ChatFrame
from hgpo_jax.policy.tokenizer import load_tokenizer
from hgpo_jax.progress import CompileWatch
from hgpo_jax.run import distributed, remote
from hgpo_jax.run.curves import plot_curves
from hgpo_jax.run.folder import find_run, take_folder
from hgpo_jax.run.interruption import Interrupted, Interruption
from hgpo_jax.runners import TextRunner
from hgpo_jax.training import Training, refusals


def train(given: dict, resume: str, allowed: tuple[str, ...], dry: bool, multiprocess: bool) -> None:
    """Trains the run that a command asks for, to its end or until a signal.

    Args:
      given, resume, allowed: as `find_run` takes them.
      dry: only check everything but the weights, and print the memory plan.
      multiprocess: this is one of several processes.

    Raises ConfigError, RunError.
    """
    began = time.perf_counter()
    place = resume if is_remote(resume) else given.get("run_dir", "")
    if multiprocess and is_remote(place):
        raise ConfigError(f"{place}: several processes need a folder that all see; mount the bucket, and give its path")

    def look() -> tuple:
        config, folder, *rest = find_run(given, resume, allowed)
        return config.model_dump(mode="json"), str(folder), *rest

    if dry:
        return dry_run(configuration.resolve(look()[0]))
    if multiprocess:
        open_devices(multiprocess=True)
        found = distributed.broadcast_from_process_0(look)
    else:
        found = look()
        open_devices()
    config, folder, (resuming, ended) = configuration.resolve(found[0]), Path(found[1]), found[2:]
    place = remote.shown(folder)
    if ended:
        print(
            f"{place}: all {config.iterations} iterations are done and evaluated; a larger iterations= trains on, "
            f"python -m hgpo_jax.evaluate {place} evaluates again"
        )
        return
    check_loggers(config)
    check_trained_dtype(config)
    mesh = job_mesh(config)
    with Interruption() as stop, CompileWatch():
        try:
            run(config, mesh, folder, resuming, stop)
        except Interrupted as signal:
            saved = f"{stop.saved} of {config.iterations} iterations are saved" if stop.saved else "no iteration was done"
            hint = f"; continue with --resume {place}" if stop.saved or resuming else ""
            print(f"stopped by {signal}: {saved}{hint}", flush=True)
            sys.exit(128 + signal.number)
    print(f"{time.perf_counter() - began:.0f} s in all; everything is in {place}")


def dry_run(config: Config) -> None:
    """Reads the data and the tokenizer, and plans the memory; needs neither the weights nor the devices of the mesh."""
    configuration.check_together(config)
    check_trained_dtype(config)
    try:
        mesh = make_mesh("auto") if config.mesh == "auto" else abstract_mesh(config.mesh)
        found = environment(config.env)
        if config.told_on_device and config.env.compiled is None:  # its games' tables would be written
            config = config.model_copy(update={"env": config.env.model_copy(update={"compiled": False})})
        makers = None if config.in_words or found.text is None else found.text(config)
        models = {name: memory.workload_of(own, mesh).model for name, own in memory.configs_of_sets(config).items()}
        phases = memory.bytes_of_run(config, mesh)
        if makers or found.agent:
            source = config.policy.tokenizer or config.policy.source
            tokenizer = load_tokenizer(source, config.cache_dir) if source else fresh_tokenizer(config)
            runner: Runner = (
                TextRunner(config, found, *makers, models.get("", models), tokenizer, mesh) if makers
                else AgentRunner(config, models[""], tokenizer, mesh)
            )  # fmt: skip
            counts = (runner.num_tasks or "generated", runner.num_held_out_tasks or "generated")
            print(f"{config.env.name}: {counts[0]} tasks to train on, {counts[1]} held out")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(f"memory on each of {mesh.size} devices, mesh {dict(mesh.shape)}:\n{memory.table(phases)}")


def check_loggers(config: Config) -> None:
    """Raises ConfigError for a logger that is not installed."""
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("log.wandb=true: wandb is not installed; pip install 'hgpo_jax[wandb]'")


def check_trained_dtype(config: Config) -> None:
    """Raises ConfigError for weights whose type would round away what they learn; adapters have float32 of their own."""
    for own in memory.configs_of_sets(config).values():
        if own.policy.dtype != "float32" and not own.lora.rank:
            raise ConfigError(
                f"policy.dtype={own.policy.dtype}: would round away the small steps of training; leave it out "
                "(policy.compute_dtype=bfloat16 computes with a copy), or train adapters with lora.rank"
            )


def run(config: Config, mesh: Mesh, folder: Path, resuming: bool, stop: Interruption) -> None:
    """Everything after the arguments."""
    job = build(config, mesh)
    writes = jax.process_index() == 0

    locks = []  # keeps the folder's lock as long as this runs

    def take() -> tuple[int, list[str], list[str]]:
        lock, done, faults, changes = take_folder(config, folder, resuming)
        locks.append(lock)
        return done, faults, changes

    first, faults, changes = distributed.broadcast_from_process_0(take)
    stop.saved = first
    used, there = job.mesh.size, len(jax.devices())
    devices = f"{f'{used} of ' * (used < there)}{there} {jax.devices()[0].platform} device{'s' if there > 1 else ''}"
    count = sum(a.size for a in jax.tree.leaves(job.given_params))
    print(f"{remote.shown(folder)}: {config.method}, {count:,} parameters, {devices}, mesh {dict(job.mesh.shape)}", flush=True)

    if config.env.workers and isinstance(job.runner, TextRunner):
        limit = f"an answer may take {config.env.time_limit:g} s (env.time_limit)"
        print(f"{config.env.workers} workers play {config.env.name}; {limit}", flush=True)
    for fault in faults:
        print(f"warning: {fault}", file=sys.stderr if writes else None, flush=True)
    if config.log.keep_best and (tasks := job.runner.num_held_out_tasks) and not validates_apart(job):
        apart = f"with evaluation.episodes={tasks // 2} they would play others"
        print(f"log.keep_best: validations play tasks of the final evaluation, all {tasks} there are; {apart}", flush=True)
    if resuming:
        print("\n".join([f"resumed after iteration {first} in {remote.shown(folder)}", *changes]), flush=True)
    url = remote.url_of(folder)
    with remote.Upload(folder, url) if url else contextlib.nullcontext():
        train_and_evaluate(job, folder, first, stop)


def train_and_evaluate(job: Job, folder: Path, first: int, stop: Interruption) -> None:
    """Trains from an iteration on, evaluates, and writes what a run ends with."""
    writes = jax.process_index() == 0
    params, played = Training(job, folder, first, stop).run()
    with refusals():
        job.by_set(lambda job, params: save_trained(job, params, folder / "policy" / job.weights), params)
    del params
    result, transcripts = evaluate(unrounded(job), played, folder)
    shown = "\n\n".join(transcripts)
    if writes:
        plot_curves(folder)
        for of_set in job.sets.values() or [job]:
            for saved in (folder / "policy" / of_set.weights, folder / "adapter" / of_set.weights):
                if saved.is_dir():
                    count = sum(a.size for a in jax.tree.leaves(of_set.policy.params))
                    model_card.write(saved, of_set.config, count, result)
        with atomic_write(folder / "transcripts.txt") as file:  # last: its presence means that the run has ended
            file.write(shown + "\n")
    print(f"\n{shown}\n\n{describe_evaluation(result)}")


def save_trained(job: Job, params, folder: Path) -> None:
    """Writes a policy, and how its answers were asked for and ended. Raises ValueError where that cannot be written."""
    rollout, tokenizer, frame = job.config.rollout, job.policy.tokenizer, None
    if getattr(tokenizer, "chat_template", None):
        frame = ChatFrame(tokenizer, date=rollout.date, thinking=rollout.thinking, stop=rollout.stop)
    Policy(job.policy.config, params, tokenizer).save(folder, stop=rollout.stop, trained=frame)
