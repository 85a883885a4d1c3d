"""`python -m hgpo_jax.train`: trains an agent, by default a tiny Qwen2.5 on the embedded household.

    python -m hgpo_jax.train                                   the embedded job, on any CPU
    python -m hgpo_jax.train --config household_six            all six task types
    python -m hgpo_jax.train method=gigpo seed=1 learner.lr=1e-3

Writes a run folder: config.yaml (resolved), metrics.jsonl, tensorboard/, curves.png, checkpoints/, episodes/, start/ and
policy/ (Hugging Face folders of the policy before and after), adapter/ (with LoRA, for peft), evaluation.json and
transcripts.txt.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import yaml
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from hgpo_jax import cli, distributed, memory
from hgpo_jax import config as configuration
from hgpo_jax.checkpoint import Checkpoints
from hgpo_jax.config import Config, ConfigError
from hgpo_jax.environments import COMPILED, TextStage, make_environments
from hgpo_jax.evaluate import evaluate, report
from hgpo_jax.iteration import collect, make_learn
from hgpo_jax.job import Job, build, prepare_devices
from hgpo_jax.mesh import abstract_mesh, make_mesh
from hgpo_jax.metrics import MetricsWriter, plot_curves
from hgpo_jax.policy import Policy, load_policy, lora
from hgpo_jax.policy.tokenizer import load_tokenizer
from hgpo_jax.warm_start import warm_start

# Fields that may differ when a run goes on: they do not change what is learned.
FREE_TO_CHANGE = (
    "run_dir",
    "cache_dir",
    "mesh",
    "iterations",
    "rollout.chunk",
    "learner.microbatch_size",
    "log.",
    "evaluation.",
)


def find_run(config: Config, resume: str) -> tuple[str, bool]:
    """`run_folder`, and whether the run that is there began like this one; by the first process for all."""

    def look():
        folder, resuming = run_folder(config, resume)
        if resuming:
            check_unchanged(config, folder)
        return str(folder), resuming

    folder, resuming = distributed.first_says(look)
    return Path(folder), resuming


def run_folder(config: Config, resume: str) -> tuple[Path, bool]:
    """Where the run lives, and whether it goes on there.

    Raises:
      ConfigError: the folder holds a run and resuming was not asked for, or there is nothing to resume.
    """
    stem = f"{config.name}-{config.method}-s{config.seed}"
    if resume not in ("auto", "never"):
        if not (Path(resume) / "config.yaml").is_file():
            raise ConfigError(f"--resume {resume}: not a run's folder, it holds no config.yaml")
        return Path(resume), True
    if config.run_dir:
        folder = Path(config.run_dir)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"run_dir={folder}: is a file; choose another folder")
        begun = (folder / "config.yaml").is_file()
        if begun and resume == "never":
            raise ConfigError(
                f"run_dir={folder}: holds a run already; go on with --resume auto or choose another folder"
            )
        if folder.is_dir() and not begun and any(folder.iterdir()):
            raise ConfigError(f"run_dir={folder}: is not empty and not a run; choose another folder")
        return folder, begun
    if resume == "auto":
        begun = [
            p.parent for p in Path("runs").glob(f"{stem}-*/config.yaml") if not (p.parent / "evaluation.json").exists()
        ]
        if begun:
            return max(begun), True
    return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}", False


def check_unchanged(config: Config, folder: Path) -> None:
    """Raises ConfigError where a resumed run's configuration is not the one it began with."""
    old = yaml.safe_load((folder / "config.yaml").read_text())
    new = config.model_dump(mode="json")
    for name in configuration.fields():
        before, now = old, new
        for part in name.split("."):
            before, now = (before or {}).get(part), now[part]
        if before != now and not name.startswith(FREE_TO_CHANGE):
            raise ConfigError(
                f"{name}={now}: the run in {folder} began with {name}={before}; give that, or another run_dir"
            )


def live_line(row: dict) -> dict:
    """What the live line shows of an iteration."""
    return {
        "success": f"{row['success']:.2f}",
        "return": f"{row['return']:.2f}",
        "tok/s": f"{row['tokens_per_second'] / 1e3:.0f}k",
        "rollout": f"{row['seconds']['rollout']:.2f}s",
        "update": f"{row['seconds']['update']:.2f}s",
    }


def compile_ahead(job: Job, learn, state):
    """Compiles rollout and update in another thread while the warm start prepares; returns the compiled update.

    The rollout's first call then finds it in the compilation cache.
    """
    with jax.set_mesh(job.mesh):  # a mesh is only set for the thread that set it
        reference = job.reference_copy(job.policy.params)
        job.stage.compile(job.playing(state["params"], reference), job.episode_inputs(0))
        whole = NamedSharding(job.mesh, PartitionSpec())
        abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)  # noqa: E731
        episodes = jax.tree.map(abstract, job.abstract_episodes())
        return learn.lower(state, reference, episodes, job.key(0, 1), jnp.float32(0)).compile()


def train(job: Job, folder: Path, resuming: bool) -> dict:
    """Runs the job in its folder; returns the final parameters, adapters merged."""
    config = job.config
    learn, init = make_learn(job)
    compiling = ThreadPoolExecutor(1).submit(compile_ahead, job, learn, init(job.policy.params))
    if jax.process_count() > 1:  # processes must start programs in one order, which two threads would not keep
        compiling.result()
    writes = jax.process_index() == 0
    checkpoints = Checkpoints(folder / "checkpoints", config.log.keep_checkpoints)
    done = checkpoints.latest() if resuming else None
    if distributed.first_says((folder / "start" / "config.json").is_file):
        reference = load_policy(folder / "start", job.mesh, config.policy.dtype).params
    else:
        reference = warm_start(job) if config.warm_start == "cloning" else job.policy.params
        Policy(job.policy.config, reference, job.policy.tokenizer).save(folder / "start")
    state = init(reference)
    reference = job.reference_copy(reference)
    if done:
        state = checkpoints.restore(done, state)
        print(f"resumed after iteration {done} in {folder}", flush=True)
    learn = compiling.result()
    if reference is not job.policy.params:  # nothing reads them again, and they would fill a part of every device
        jax.tree.map(lambda a: a.delete(), job.policy.params)
    first = done or 0
    if writes:
        (folder / "episodes").mkdir(exist_ok=True)
        writer = MetricsWriter(folder, keep=first, tensorboard=config.log.tensorboard)
    bar = tqdm(total=config.iterations, initial=first, desc="training", unit="it", disable=None, dynamic_ncols=True)
    printed = 0.0
    for iteration in range(first, config.iterations):
        began = time.perf_counter()
        episodes, played = collect(job, job.playing(state["params"], reference), iteration)
        sampled = time.perf_counter()
        lr_share = 1 - (1 - config.learner.final_lr) * iteration / config.iterations
        key, share = job.key(iteration, 1), jnp.float32(lr_share)
        state, metrics = learn(state, reference, episodes, key, share)
        metrics = played | {name: float(value) for name, value in jax.device_get(metrics).items()}
        ended = time.perf_counter()
        row = {
            "iteration": iteration,
            **metrics,
            "lr": config.learner.lr * lr_share,
            "seconds": {"rollout": sampled - began, "update": ended - sampled},
            "tokens_per_second": metrics["tokens"] / (ended - began),
        }
        if writes:
            writer.write(row)
        last = iteration + 1 == config.iterations
        if writes and (last or (iteration + 1) % config.log.dump_every == 0):
            name = folder / "episodes" / f"iteration-{iteration:05d}"
            jax.device_get(episodes).save(name.with_suffix(".npz"))
            if not job.method.dynamic_sampling:  # its episodes come from several rollouts, a report from one
                job.stage.save_report(name.with_suffix(".json"))
        if last or (iteration + 1) % config.log.checkpoint_every == 0:
            checkpoints.save(iteration + 1, state)
        bar.set_postfix(live_line(row), refresh=False)
        bar.update()
        if bar.disable and (last or time.perf_counter() - printed > 5):
            printed = time.perf_counter()
            left = (config.iterations - iteration - 1) * (ended - began)
            line = "  ".join(f"{name} {value}" for name, value in live_line(row).items())
            print(f"iteration {iteration + 1}/{config.iterations}  {line}  left {left:.0f}s", flush=True)
    bar.close()
    if writes:
        writer.close()
    checkpoints.close()
    if job.adapted.lora:
        lora.save(folder / "adapter", job.adapted, state["params"], base=config.policy.source)
    return job.merged(state["params"], reference)


def dry_run(config: Config) -> None:
    """Reads the data and the tokenizer, and plans the memory; needs neither the weights nor the devices of the mesh."""
    try:
        mesh = make_mesh("auto") if config.mesh == "auto" else abstract_mesh(config.mesh)
        texts = () if config.env.name in COMPILED else make_environments(config)
        work = memory.work_of(config, mesh)
        planned = memory.plan(config, mesh, work)
        if texts:
            tokenizer = load_tokenizer(config.policy.tokenizer or config.policy.source)
            stage = TextStage(config, *texts, work.model, tokenizer, mesh)
            counts = (stage.rollout.tasks or "generated", stage.held_out_tasks or "generated")
            print(f"{config.env.name}: {counts[0]} tasks to train on, {counts[1]} held out")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(f"memory on each of {mesh.size} devices, mesh {dict(mesh.shape)}:\n{memory.table(planned)}")


def main() -> None:
    p = cli.parser("train", __doc__, epilog="fields:\n" + configuration.describe())
    cli.add_config_arguments(p)
    cli.add_distributed(p)
    p.add_argument(
        "--dry-run", action="store_true", help="check everything but the weights, print the plan of memory, and stop"
    )
    p.add_argument("--resume", metavar="auto|never|PATH", default="never", help="go on with an interrupted run")
    args = p.parse_intermixed_args()  # options may stand between fields
    began = time.perf_counter()
    config = cli.load_config(args)
    if args.dry_run:
        return dry_run(config)
    mesh = prepare_devices(config, args.distributed)
    folder, resuming = find_run(config, args.resume)
    job = build(config, mesh)
    writes = jax.process_index() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(configuration.dump(config))
    devices = f"{job.mesh.size} {jax.devices()[0].platform} device{'s' if job.mesh.size > 1 else ''}"
    count = sum(a.size for a in jax.tree.leaves(job.policy.params))
    print(f"{folder}: {config.method}, {count:,} parameters, {devices}, mesh {dict(job.mesh.shape)}", flush=True)

    params = train(job, folder, resuming)
    Policy(job.policy.config, params, job.policy.tokenizer).save(folder / "policy")
    if writes:
        plot_curves(folder, f"{config.name}, {config.method}, seed {config.seed}")
    result, transcripts = evaluate(job, params, folder)
    shown = "\n\n".join(transcripts)
    if writes:
        (folder / "transcripts.txt").write_text(shown + "\n")
    print(f"\n{shown}\n\n{report(result)}")
    print(f"{time.perf_counter() - began:.0f} s in all; everything is in {folder}")


if __name__ == "__main__":
    cli.run(main)
