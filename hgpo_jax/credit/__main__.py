"""`python -m hgpo_jax.credit`: the referee of credit assignment. It scores estimators on snapshots of policies.

    python -m hgpo_jax.credit snapshot DIR --config household --seeds 0,1,2 iterations=40     trains, and keeps three levels
    python -m hgpo_jax.credit snapshot DIR --run RUN --levels 50            of a run with checkpoints, where it won half
    python -m hgpo_jax.credit score DIR                                     every estimator of the library
    python -m hgpo_jax.credit score DIR --method 'hgpo history_length=0' --method ./my_file.py:leave_one_out

A snapshot is a file of NumPy arrays: episodes, and for every step the true advantage, with its standard error, from many
continuations. DATA_CARD.md beside the snapshots describes them and scores an estimator without this library. `score` writes
scores.md and scores.json there, too. `snapshot` keeps what it finds finished.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from pathlib import Path

from hgpo_jax import config as configuration
from hgpo_jax.analysis.dumps import read_config
from hgpo_jax.config import cli
from hgpo_jax.credit import card, contenders, make, snapshot, table
from hgpo_jax.envs.command_line import Parser, whole_number
from hgpo_jax.trainer import main as training
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.heartbeat import Heartbeat
from hgpo_jax.utils.progress import say


def numbers(text: str) -> list[int]:
    """Reads whole numbers with commas between them (an argparse type)."""
    return sorted({whole_number(part, 0) for part in text.split(",")})


def percents(text: str) -> list[float]:
    """Reads levels of success in % as shares (an argparse type)."""
    levels = [number / 100 for number in numbers(text)]
    if max(levels) > 1:
        raise argparse.ArgumentTypeError(f"{text}: give percents from 0 to 100, as in 20,50,80")
    return levels


def parser(command: str) -> Parser:
    p = cli.parser(f"credit {command}", __doc__)
    p.add_argument("folder", metavar="DIR", type=cli.local_path, help="the folder of the snapshots")
    if command == "score":
        some = "a method, ./file.py:NAME, or one with options, as in 'hgpo history_length=0'; may be repeated; default: all"
        p.add_argument("--method", action="append", metavar="NAME", dest="methods", help=some)
        p.add_argument("--against", default="hgpo", metavar="NAME", help="the reference of the differences; default hgpo")
        return p
    cli.add_config_arguments(p)
    p.add_argument("--run", action="append", metavar="RUN", dest="runs", help="a run with checkpoints; may be repeated")
    p.add_argument("--seeds", type=numbers, default=[0], metavar="N,N", help="of the runs to train, without --run; default 0")
    p.add_argument(
        "--levels", type=percents, default=[0.2, 0.5, 0.8], metavar="N,N", help="of success, in per cent; default 20,50,80"
    )
    p.add_argument("--setting", metavar="NAME", help="the name to pool snapshots under; default: the run's name")
    p.add_argument("--groups", type=whole_number, default=16, metavar="N", help="tasks of a batch; default 16")
    two = functools.partial(whole_number, low=2)
    p.add_argument("--batches", type=two, default=4, metavar="N", help="batches of a snapshot; default 4")
    p.add_argument("--continuations", type=two, default=16, metavar="N", help="from each state; default 16")
    any_number = functools.partial(whole_number, low=0)
    p.add_argument("--directions", type=any_number, metavar="N", help="of gradients, 0 for none; default 128")
    return p


@Heartbeat("snapshots")
def take(args) -> None:
    """Makes the snapshots that are missing."""
    if args.runs and (args.config or args.overrides or args.mesh):
        raise ConfigError("--run: has its own configuration; leave out --config, --mesh and fields")
    folder, runs = Path(args.folder), [Path(run) for run in args.runs or ()]
    names = [file_name(args.setting or config.name, config.seed) for config in map(read_config, runs)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--run: {len(twice)} of them would make {twice[0]}-*.npz; give each in a call with its --setting")
    never: dict[str, make.NeverNear] = {}
    for run in runs or (train(args, folder, seed) for seed in args.seeds):
        config = read_config(run)
        setting = args.setting or config.name
        for level in args.levels:
            file = folder / f"{file_name(setting, config.seed)}-{level * 100:.0f}.npz"
            sizes = {name: getattr(args, name) for name in ("groups", "batches", "continuations", "directions")}
            try:
                make.make(run, file, setting, level, **sizes)
            except make.NeverNear as error:  # other levels and seeds may be
                say(f"{file} is left out: {error}")
                never[file.name] = error
    if never and not any(folder.glob("*.npz")):
        raise next(iter(never.values()))
    card.write(folder)
    say(f"{folder / card.FILE}")
    if never:
        raise RunError(f"{folder}: lacks {', '.join(never)}, whose levels no checkpoint was near")


def file_name(setting: str, seed: int) -> str:
    return re.sub(r"[^\w.-]+", "-", setting) + f"-s{seed}"


def train(args, folder: Path, seed: int) -> Path:
    """Trains a run in DIR/runs, or finds it there, with a checkpoint of every iteration; returns its folder."""
    mesh = [] if args.mesh is None else [f"mesh={args.mesh}"]
    overrides = [*args.overrides, *mesh, f"seed={seed}"]
    name = args.setting or configuration.load(args.config, overrides).name
    run = folder / "runs" / file_name(name, seed)
    begun = (run / "config.yaml").is_file()  # with the levels of an earlier call
    stop_at = read_config(run).cloning.stop_at if begun else args.levels[0] * 0.75
    keeps = ["log.checkpoint_every=1", "log.keep_checkpoints=1000", f"cloning.stop_at={stop_at}"]
    fields = configuration.read_fields(args.config, [*keeps, *overrides])
    return training.train(fields | {"run_dir": str(run)}, "auto")


@Heartbeat("scores")
def score(args) -> None:
    """Scores the methods on all snapshots of a folder."""
    folder = Path(args.folder)
    reference = contenders.read(args.against)
    methods = [contenders.read(text) for text in args.methods] if args.methods else contenders.all_methods()
    say(table.write(table.compute(snapshot.load_all(folder), methods, reference), folder))


COMMANDS = {"snapshot": take, "score": score}


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] not in COMMANDS:
        p = cli.parser("credit", __doc__)
        p.add_argument("command", metavar="|".join(COMMANDS), choices=COMMANDS)
        p.parse_args(words[:1])
    COMMANDS[words[0]](parser(words[0]).parse_intermixed_args(words[1:]))


if __name__ == "__main__":
    cli.run(main)
