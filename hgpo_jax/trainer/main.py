"""A whole run, from the fields of a command to the results: checked, trained or resumed, evaluated, drawn."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
from jax.sharding import Mesh

from hgpo_jax import config as configuration
from hgpo_jax.config import Config
from hgpo_jax.config.cli import REFUSED
from hgpo_jax.config.learning import LearnerConfig
from hgpo_jax.config.load import RECORD
from hgpo_jax.config.policies import SHARED
from hgpo_jax.config.workers import workers_of
from hgpo_jax.evaluation.held_out import describe_evaluation, evaluate, validates_apart
from hgpo_jax.learner.loss_table import check_loss_numbers
from hgpo_jax.learner.methods import check_numbers, method_named
from hgpo_jax.policy import Policy, model_card
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.rollout.backend import backend
from hgpo_jax.rollout.env_tokenizer import fresh_tokenizer
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.rewards import reward_signals
from hgpo_jax.rollout.runners import TextRunner
from hgpo_jax.rollout.signals import declared
from hgpo_jax.serving.agent_rollout import AgentRunner
from hgpo_jax.setup import memory
from hgpo_jax.setup.build import build, check_expert, check_signals, text_makers, work_of
from hgpo_jax.setup.devices import check_shards, job_meshes, open_devices
from hgpo_jax.setup.job import Job, PolicySetup, Runner
from hgpo_jax.setup.sight import check_sight, shown
from hgpo_jax.setup.validate import check_together, mesh_of_rollouts
from hgpo_jax.trainer.curves import plot_curves
from hgpo_jax.trainer.interruption import Interrupted, Interruption
from hgpo_jax.trainer.loop import COMPILING, Training, describe, refusals
from hgpo_jax.trainer.run_folder import find_run, take_folder
from hgpo_jax.trainer.step import make_train_step
from hgpo_jax.utils import distributed, remote
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.files import atomic_write, is_remote
from hgpo_jax.utils.heartbeat import Heartbeat, current
from hgpo_jax.utils.progress import say, warn

LARGE = 10_000_000  # parameters; smaller policies are trained from random weights


@Heartbeat("training")
def train(
    fields: dict,
    resume: str = "never",
    allowed: tuple[str, ...] = (),
    multiprocess: bool = False,
    on_iteration: Callable[[dict], None] | None = None,
    exits: bool = False,
) -> Path:
    """Trains the run that the fields describe to its end, and returns its folder.

    Args:
      fields, resume, allowed: as in `find_run`.
      multiprocess: whether this is one of several processes.
      on_iteration: called with every row of metrics once it is written, in another thread.
      exits: as in `Interruption`.

    Raises ConfigError, RunError, or, after saving, Interrupted if a signal ended it.
    """
    place = resume if is_remote(resume) else fields.get("run_dir", "")
    if multiprocess and is_remote(place):
        raise ConfigError(f"{place}: several processes need a folder that all see; mount the bucket, and give its path")

    def look() -> tuple:
        config, folder, *rest = find_run(fields, resume, allowed)
        return config.model_dump(mode="json"), str(folder), *rest

    if multiprocess:
        open_devices(multiprocess=True)
    result = distributed.broadcast_from_process_0(look) if multiprocess else look()
    config, folder, (resuming, ended) = configuration.resolve(result[0]), Path(result[1]), result[2:]
    current().remember(config.cache_dir, work_of(config))
    if not multiprocess:
        open_devices()
    place = remote.shown(folder)
    if ended:
        say(
            f"{place}: all {config.iterations} iterations are done and evaluated; a larger iterations= trains on, "
            f"python -m hgpo_jax.evaluate {place} evaluates again"
        )
        return folder
    check_loggers(config)
    meshes = job_meshes(config)
    with Interruption(exits) as stop:
        try:
            run(config, meshes, folder, resuming, stop, on_iteration)
        except Interrupted as signal:
            say(f"stopped by {signal}: {_describe_saved(config, stop, place, resuming or is_taken(folder))}")
            raise
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            saved = _describe_saved(config, stop, place, resuming or is_taken(folder))
            raise RunError(f"{error.filename or place}: {error.strerror}; {saved}") from None
    say(f"{current().seconds():.0f} s in all; everything is in {place}")
    return folder


def leave(code: int) -> NoReturn:
    """Ends the process. Python alone would wait for a program that is still compiled, which takes minutes for a large model."""
    if any(thread.name.startswith(COMPILING) for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def is_taken(folder: Path) -> bool:
    """Whether a run has begun in a folder."""
    return (folder / RECORD).is_file()


def _describe_saved(config: Config, stop: Interruption, place: str, begun: bool) -> str:
    """Says how much of a run that ended early is saved, and how it continues."""
    saved = f"{stop.saved} of {config.iterations} iterations are saved" if stop.saved else "no iteration was done"
    return saved + (f"; continue with --resume {place}" if stop.saved or begun else "")


def dry_run(fields: dict, resume: str, allowed: tuple[str, ...]) -> None:
    """Checks everything but the weights, and plans the memory without the mesh's devices. Arguments as in `train`."""
    config = find_run(fields, resume, allowed).config
    check_together(config)
    check_loggers(config)
    try:
        if config.mesh == "auto":
            open_devices()
        mesh = job_meshes(config)[0] if config.mesh == "auto" else abstract_mesh(config.mesh)
        check_numbers(config.method)  # of one's own estimator, which opens the devices
        check_loss_numbers(config.learner, method_named(config.method))
        entry = environment(config.env)
        if backend(config) == "compiled_text" and config.env.compiled is None and entry.games:  # it would write their tables
            config = config.model_copy(update={"env": config.env.model_copy(update={"compiled": False})})
        makers = text_makers(config)
        check_expert(config, makers)
        models = {name: memory.workload_of(each, mesh).model for name, each in memory.configs_by_policy(config).items()}
        check_shards(f"mesh={config.mesh}", config, mesh)
        plans = [(mesh, memory.bytes_of_run(config, mesh))]
        if config.rollout.mesh:
            apart = mesh_of_rollouts(config)
            check_shards(f"rollout.mesh={config.rollout.mesh}", config, apart)
            plans = list(zip((mesh, apart), memory.bytes_apart(config, mesh, apart), strict=True))
        if makers or entry.agent:
            tokenizers = {name: _tokenizer_of(each) for name, each in memory.configs_by_policy(config).items()}
            for name, tokenizer in tokenizers.items():
                check_sight(config, models[name], shown(config), tokenizer)
            runner: Runner = (
                TextRunner(config, entry, *makers, models, tokenizers, mesh)
                if makers
                else AgentRunner(config, models, tokenizers[SHARED], mesh)
            )
            counts = (runner.num_tasks or "generated", runner.num_held_out_tasks or "generated")
            runner.close()
            own = runner.signals
            held_out = f"{counts[1]} held out" if entry.splits else "the same to evaluate on"
            say(f"{config.env.name}: {counts[0]} tasks to train on, {held_out}")
        else:
            assert entry.compiled is not None  # it has no text
            own = declared(entry.compiled(config))
        check_signals(config, own, (*own, *reward_signals(config)))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for each, phases in plans:
        say(f"memory on each of {each.size} devices, mesh {dict(each.shape)}:\n{memory.table(phases)}")


def _tokenizer_of(config: Config):
    """Returns the tokenizer of the policy of a configuration, which is not loaded. Raises ValueError."""
    source = config.policy.tokenizer or config.policy.source
    return load_tokenizer(source, config.cache_dir) if source else fresh_tokenizer(config)


def check_loggers(config: Config) -> None:
    """Raises ConfigError for a logger that is not installed."""
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("log.wandb=true: wandb is not installed; pip install 'hgpo_jax[wandb]'")


def run(
    config: Config,
    meshes: tuple[Mesh, Mesh | None],
    folder: Path,
    resuming: bool,
    stop: Interruption,
    on_iteration: Callable[[dict], None] | None,
) -> None:
    """Runs everything that follows the parsing of the arguments."""
    with contextlib.ExitStack() as held:
        job = build(config, *meshes)
        held.callback(job.close)
        step = make_train_step(job)
        like = describe(step[1](job.given_params))

        def take() -> tuple[int, list[str], list[str]]:
            lock, done, faults, changes = take_folder(
                config, folder, resuming, like.to_checkpoint(), describe(job.given_params)
            )
            held.callback(lock.release)
            current().write_to(folder)
            return done, faults, changes

        first, faults, changes = distributed.broadcast_from_process_0(take)
        distributed.check_shared(folder, "run_dir")
        if config.warm_start == "cloning":  # one process writes the cloned weights, and all read them
            distributed.check_shared(Path(config.cache_dir), "cache_dir")
        stop.saved = first
        _describe_run(job, folder, resuming, first, faults, changes)
        with remote.writing(folder):
            train_and_evaluate(job, Training(job, step, like, folder, first, stop, on_iteration), folder)


def _describe_run(job: Job, folder: Path, resuming: bool, first: int, faults: list[str], changes: list[str]) -> None:
    """Says what is about to be trained, on what, and what was found in the folder."""
    config = job.config
    rollouts = job.rollout_mesh
    used, there = job.mesh.size + (rollouts.size if rollouts else 0), len(jax.devices())
    devices = f"{f'{used} of ' * (used < there)}{there} {jax.devices()[0].platform} device{'s' if there > 1 else ''}"
    count = sum(a.size for a in jax.tree.leaves(job.given_params))
    apart = f", rollouts on a mesh of their own, {dict(rollouts.shape)}" if rollouts else ""
    say(f"{remote.shown(folder)}: {config.method}, {count:,} parameters, {devices}, mesh {dict(job.mesh.shape)}{apart}")

    if config.policy.source and config.policy.tokenizer:
        own = f"policy.source={config.policy.source} has its own; it is for --dry-run and --rehearse, which may lack that"
        warn(f"policy.tokenizer={config.policy.tokenizer} is not read: {own}")
    if config.env.workers and isinstance(job.runner, TextRunner):
        limit = f"an answer may take {config.env.time_limit:g} s (env.time_limit)"
        count, ray = workers_of(config.env.workers)
        say(f"{count} workers{' on a Ray cluster' * ray} play {config.env.name}; {limit}")
    if config.env.retriever and not config.env.workers:
        say(f"env.retriever={config.env.retriever}: is asked one query at a time; env.workers=16 asks as many at once")
    if not environment(config.env).splits:
        also = "give its class a parameter held_out, with which it has others (hgpo_jax/envs/protocol.py)"
        say(f"env.name={config.env.name}: the tasks to evaluate on are those to train on; {also}")
    for fault in faults:
        if jax.process_index() == 0:
            warn(fault)
    if jax.process_index() == 0 and any(map(has_default_rate, job.policies.values())):
        lr = LearnerConfig.model_fields["lr"].default
        warn(f"learner.lr={lr:g}: the default, for small random weights; pretrained ones are given 1e-6, adapters 1e-4")
    if config.rollout.overlap and not rollouts and used == 1 and jax.default_backend() != "cpu":
        say("rollout.overlap=1: on one device programs take turns, and only the environments' time overlaps")
    if config.rollout.overlap and config.learner.rollout_correction == "none":
        say("rollout.overlap=1: learned worse without learner.rollout_correction=token (hgpo_jax/rollout/README.md)")
    if config.log.keep_best and (tasks := job.runner.num_held_out_tasks) and not validates_apart(job):
        apart = f"with evaluation.episodes={tasks // 2} they would play others"
        say(f"log.keep_best: validations play tasks of the final evaluation, all {tasks} there are; {apart}")
    if resuming:
        after = f"after iteration {first}" if first else "before its first iteration"
        say("\n".join([f"resumed {after} in {remote.shown(folder)}", *changes]))


def has_default_rate(policy: PolicySetup) -> bool:
    """Whether a large pretrained policy is to learn at the rate of small random ones."""
    size = sum(a.size for a in jax.tree.leaves(policy.initial.params))
    default = LearnerConfig.model_fields["lr"].default
    return bool(policy.settings.policy.source) and size > LARGE and policy.settings.learner.lr == default


def train_and_evaluate(job: Job, training: Training, folder: Path) -> None:
    """Trains, evaluates, and writes the results of the run."""
    writes = jax.process_index() == 0
    params, played = training.run()
    with refusals():
        job.by_policy(functools.partial(save_trained, folder / "policy"), params)
    del params
    training.stop.agreed()
    result, transcripts = evaluate(job, played, folder)
    text = "\n\n".join(transcripts)
    if writes:
        plot_curves(folder)
        for name, policy in job.policies.items():
            for saved in (folder / "policy" / name, folder / "adapter" / name):
                if saved.is_dir():
                    count = sum(a.size for a in jax.tree.leaves(policy.initial.params))
                    sees = policy.initial.config.vision is not None
                    model_card.write(saved, policy.settings, count, result, sees)
        with atomic_write(folder / "transcripts.txt") as file:  # written last: its presence means that the run has ended
            file.write(text + "\n")
    say(f"\n{text}\n\n{describe_evaluation(result)}")


def save_trained(folder: Path, policy: PolicySetup, params) -> None:
    """Writes a policy, and how its answers were asked for and ended. Raises ValueError where that cannot be written."""
    rollout, tokenizer, frame = policy.settings.rollout, policy.initial.tokenizer, None
    if getattr(tokenizer, "chat_template", None):
        frame = ChatFrame(tokenizer, thinking=rollout.thinking, stop=rollout.stop)
    Policy(policy.initial.config, params, tokenizer).save(folder / policy.name, stop=rollout.stop, trained=frame)
