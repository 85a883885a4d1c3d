"""`python -m hgpo_jax.evaluate RUN`: success of a run's policy on held-out tasks, sampled and greedy.

    python -m hgpo_jax.evaluate RUN                                             repeats a run's own: RUN/evaluation.json
    python -m hgpo_jax.evaluate RUN evaluation.episodes=2048                    another: RUN/evaluations/held_out-t1-n2048.json
    python -m hgpo_jax.evaluate RUN --seeds 123,456,789 --split valid_unseen    the published protocol
    python -m hgpo_jax.evaluate RUN --samples 16                                pass@k and avg@16: each task 16 times
    python -m hgpo_jax.evaluate HF_FOLDER --config household                    a policy without a run, as `export` writes
    python -m hgpo_jax.evaluate RUN --panel alfworld-valid_seen                 every task of a list that is the same for all
    python -m hgpo_jax.evaluate openai:URL#MODEL env.name=household_text --panel household --to FOLDER   a served policy
    python -m hgpo_jax.evaluate --compare A.json B.json                         two results of a panel, paired by task

The held-out tasks are the same for every run, so results are comparable. With --seeds, each seed draws evaluation.episodes
tasks of its own (repeating them where an environment has fewer) and samples at evaluation.temperature; every transcript is
kept, too.
RUN/evaluation.json stays that of the run's own settings: all others go into evaluations/ in the first folder, or with --to
elsewhere, as SPLIT-tTEMPERATURE-nEPISODES.json, with -samplesN before the dot, or with -sSEEDS and the transcripts beside it
(.jsonl). Until it is written, a folder .passes beside it keeps what each seed, sample or mode has played, and the same command
goes on after these (not in several processes). A file that was made with other settings, or of a policy of another name, is
never replaced. With adapters a run plays them beside its weights, here they are merged; policy.compute_dtype=bfloat16 rounds
what is merged.

A panel (hgpo_jax/evaluation/panels.py) decides the tasks: each is played once greedily and once sampled, or once under each
of --seeds. evaluations/panel-NAME-tTEMPERATURE-nTASKS-sSEEDS.json holds the digests of panel and policy and every task's
outcome, with the transcripts beside it. The policy may also be served by any program with OpenAI's chat API
(hgpo_jax/evaluation/served.py).
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from hgpo_jax import config as configuration
from hgpo_jax.config import Config, cli
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.evaluation import panels
from hgpo_jax.evaluation.files import OWN, data_of, file_name, refuse_another, settings_of, write
from hgpo_jax.evaluation.held_out import describe_evaluation, describe_seeds, evaluate_seeds, play_both
from hgpo_jax.evaluation.pass_at_k import describe_samples, evaluate_samples
from hgpo_jax.evaluation.passes import NONE_KEPT, Passes
from hgpo_jax.evaluation.served import PREFIX, ServedPolicy
from hgpo_jax.policy import huggingface_folder
from hgpo_jax.policy.source import find
from hgpo_jax.rollout.environments import ENVIRONMENTS, Environment
from hgpo_jax.setup.build import build, work_of
from hgpo_jax.setup.devices import prepare_devices
from hgpo_jax.setup.job import Job
from hgpo_jax.trainer.curves import plot_curves
from hgpo_jax.trainer.provenance import outside_code
from hgpo_jax.utils import remote
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.heartbeat import Heartbeat, current, phase
from hgpo_jax.utils.progress import say


def split_of(config: Config, split: str | None) -> tuple[str, list[str]]:
    """Returns the name of the tasks to evaluate on, and the overrides that select them. Raises ConfigError."""
    if "held_out" in ENVIRONMENTS.get(config.env.name, Environment()).options:
        return split or config.env.held_out, [f"env.held_out={split}"] if split else []
    if split not in (None, "held_out"):
        raise ConfigError(f"--split {split}: {config.env.name} has one set of tasks to evaluate on, held_out")
    return "held_out", []


def parse_seeds(text: str) -> list[int]:
    parts = text.split(",")
    numbers = {int(part) for part in parts if part.isdecimal() and len(part) <= 10}
    if len(numbers) < len(parts) or max(numbers) >= 2**31:
        raise ConfigError(f"--seeds {text:.100}: give different whole numbers with commas between them, as in 123,456,789")
    return list(map(int, parts))


def _served_configuration(args) -> tuple[str | None, list[str]]:
    """Does `cli.trained_policy` for a policy on a server. Raises ConfigError for options that do not apply to one."""
    for option, value, why in (
        ("--panel NAME", args.panel or None, "a served policy plays panels"),
        ("--to FOLDER", args.to, "it has no folder for the result"),
    ):
        if value is None:
            raise ConfigError(f"{args.run}: give {option}; {why}")
    for option, is_set in (("--mesh", args.mesh), ("--distributed", args.distributed)):
        if is_set:
            raise ConfigError(f"{option}: nothing is computed here for a served policy; leave it out")
    for override in args.overrides:
        if cli.of_policy(override) or override.startswith("policy.compute_dtype="):
            raise ConfigError(f"{override:.200}: the policy is that of {args.run}; leave it out")
    return args.config, [*args.overrides, "warm_start=none"]


def _prepare(
    args, config: Config, mesh: Mesh | None, tasks: list[str], seeds: list[int]
) -> tuple[Callable[[Passes], tuple[dict, list[dict], str]], list[str]]:
    """Prepares the evaluation: a function of its passes, and the digests of the policies that play.

    The function returns the result, all episodes if they are kept, and the text to print.
    """
    digests: list[str] = []
    if args.run.startswith(PREFIX):
        served = ServedPolicy(args.run, config)
        play: panels.Play = served.play
        types: Sequence[str] = served.task_types
    else:
        job = build(config, mesh, trains=False)
        if args.panel or jax.process_count() == 1:
            with phase("reading the policy for its digest"):
                sources = (policy.settings.policy.source for policy in job.policies.values())
                digests = [huggingface_folder.digest(find(source, config.cache_dir)) for source in sources if source]
        if not args.panel:
            return functools.partial(_evaluate, job, seeds, args.samples), digests
        play, types = panels.player(job, job.given_params), job.runner.task_types

    def evaluate_panel(passes: Passes) -> tuple[dict, list[dict], str]:
        result, episodes = panels.evaluate_panel(play, types, config.evaluation, args.panel, tasks, seeds, passes)
        return {"policy_sha256": digests[0] if digests else None} | result, episodes, panels.describe(result)

    return evaluate_panel, [*digests, panels.digest(args.panel, tasks)]


def _evaluate(job: Job, seeds: list[int], samples: int | None, passes: Passes) -> tuple[dict, list[dict], str]:
    params = job.base_rollout_params(job.given_params)
    if samples:
        result = evaluate_samples(job, params, samples, passes)
        return result, [], describe_samples(result)
    if seeds:
        result, episodes = evaluate_seeds(job, params, seeds, passes)
        return result, episodes, describe_seeds(result)
    result, _ = play_both(job, params, passes)
    return result, [], describe_evaluation(result)


def parse() -> argparse.Namespace:
    p = cli.parser("evaluate", __doc__)
    cli.add_trained_policy(
        p,
        nargs="?",
        help="the folder of a run that has ended, or of a Hugging Face policy, or a GGUF file; with --panel also "
        "openai:URL#MODEL, a served one",
    )
    p.add_argument("--seeds", metavar="N,N,...", help="seeds of tasks and sampling, as in 123,456,789; of a panel, of sampling")
    p.add_argument(
        "--samples", metavar="N", type=whole_number, help="plays of each task, for pass@k up to N and avg@N, sampled"
    )
    p.add_argument("--split", help="tasks to evaluate on: valid_seen or valid_unseen of ALFWorld, else held_out")
    p.add_argument(
        "--to",
        metavar="FOLDER",
        type=cli.local_path,
        help="where to write; default: evaluations/ in the first folder",
    )
    p.add_argument("--panel", metavar="NAME", help=f"every task of a list that is the same for all: {', '.join(panels.PANELS)}")
    p.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="plays nothing: two results of a panel, paired by task"
    )
    cli.add_distributed(p)
    return p.parse_intermixed_args()


def print_comparison(args: argparse.Namespace) -> None:
    """Prints the comparison of two panel results. Raises ConfigError for files that cannot be compared."""
    others = "run", "overrides", "config", "mesh", "seeds", "samples", "split", "to", "panel", "distributed"
    if extra := [name for name in others if getattr(args, name) not in (None, [], False)]:
        raise ConfigError(f"--compare: takes two files and nothing else; leave out {', '.join(extra)}")
    a, b = map(panels.read, args.compare)
    print(panels.describe_comparison(a, b, panels.compare(a, b)))


class Source(NamedTuple):
    """What an evaluation plays: a run, a policy's folder or file, or a served policy."""

    name: str  # as the user wrote it
    folder: Path
    is_run: bool
    config: str | None  # the configuration file
    overrides: list[str]  # that select the policy


def find_source(args: argparse.Namespace) -> Source:
    """Finds the policy that the arguments name. Raises ConfigError, also if there is no folder for its evaluations."""
    if args.run is None:
        raise ConfigError("RUN|HF_FOLDER: none is given; name the folder of a run, or two results of a panel with --compare")
    name, served = args.run, args.run.startswith(PREFIX)
    args.run = name if served else remote.local(name)
    folder, is_run = Path(args.run), not served and cli.is_run(args.run)
    config, overrides = _served_configuration(args) if served else cli.trained_policy(args)
    if not is_run and args.to is None and folder.is_file():
        raise ConfigError(f"{args.run}: is a file, which has no folder for its evaluations; give one with --to")
    if not is_run and args.to is None and not folder.is_dir():
        # A folder named like the policy would from then on be mistaken for the policy itself.
        raise ConfigError(f"{args.run}: no such folder; for a policy from the hub give --to, the folder for its evaluations")
    return Source(name, folder, is_run, config, overrides)


@Heartbeat("evaluation")
def main() -> None:
    args = parse()
    if args.compare:
        return print_comparison(args)
    source = find_source(args)
    seeds = [] if args.seeds is None else parse_seeds(args.seeds)
    if args.samples and (seeds or args.panel):
        other = f"--panel {args.panel}" if args.panel else f"--seeds {args.seeds}"
        raise ConfigError(f"--samples {args.samples}: {other} decides the plays; leave out one of the two")
    if args.panel is not None:
        if args.split:
            raise ConfigError(f"--split {args.split}: --panel {args.panel} decides the tasks; leave it out")
        split, overrides, seeds = f"panel-{args.panel}", panels.panel_fields(args.panel, args.overrides), seeds or [0]
    else:
        split, overrides = split_of(configuration.load(source.config, source.overrides), args.split)
    config = configuration.load(source.config, [*source.overrides, *overrides])
    current().remember(config.cache_dir, work_of(config))
    served = source.name.startswith(PREFIX)
    mesh = None if served else prepare_devices(config, args.distributed)  # before anything else asks jax for its devices
    if args.panel and source.is_run:
        panels.refuse_trained_on(args.panel, configuration.load(source.config))
    tasks = panels.panel_tasks(args.panel, config) if args.panel else []
    settings = settings_of(config)
    in_run = source.is_run and args.to is None and not seeds and not args.samples
    if in_run:
        of_run = configuration.load(source.config)
        in_run = (settings, data_of(config)) == (settings_of(of_run), data_of(of_run))
    target = source.folder if in_run else Path(args.to) if args.to else source.folder / "evaluations"
    about_plays = config.evaluation.temperature, config.evaluation.episodes, seeds, args.samples
    file = target / (OWN if in_run else file_name(split, *about_plays))
    if not in_run:
        refuse_another(file, settings, source.name if args.to else None, data_of(config))
    evaluation, digests = _prepare(args, config, mesh, tasks, seeds)
    about = {"policy": source.name, "env": config.env.name, "split": split, "data": data_of(config), "settings": settings}
    about["hgpo_jax"] = version("hgpo_jax")
    if jax.process_index() == 0:  # before hours of evaluation, not after
        target.mkdir(parents=True, exist_ok=True)
        if not os.access(target, os.W_OK):
            raise ConfigError(
                f"{target}: cannot be written; {'see its owner' if in_run else 'choose another folder with --to'}"
            )
    passes = NONE_KEPT
    if jax.process_count() == 1:
        passes = Passes(file.with_suffix(".passes"), about | {"digests": digests, "code": outside_code(config)})
    result, episodes, text = evaluation(passes)
    if jax.process_index() == 0:
        write(file, result if in_run else about | result, episodes)
        passes.end()
        if in_run:
            plot_curves(source.folder)  # the curves include the evaluation
        say(text)  # not print: the Heartbeat would add a line after it
        remote.send(target)
        if not in_run:
            say(str(file))


if __name__ == "__main__":
    cli.run(main)
