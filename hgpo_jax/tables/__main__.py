"""`python -m hgpo_jax.tables`: the runs of a table, planned, run and collected.

    python -m hgpo_jax.tables plan paper                      every cell: commands, memory on each device, expected tokens
    python -m hgpo_jax.tables plan paper --launch slurm --to DIR      a launch file for each cell; or shell
    python -m hgpo_jax.tables run household --jobs 2          runs what is missing; continues after an interruption
    python -m hgpo_jax.tables run household 'household/*/s1?'         a part of it, in another --runs on each machine
    python -m hgpo_jax.tables bias household                  the Oracle bias of each setting at its warm start
    python -m hgpo_jax.tables truth household --at 20 household/hgpo-k2/s10  true advantages in runs, after 20 iterations
    python -m hgpo_jax.tables gradients household --at 20 household/hgpo-k2/s10   where estimators' gradients point there
    python -m hgpo_jax.tables collect runs/tables/household   results beside published numbers: Markdown, CSV, LaTeX
    python -m hgpo_jax.tables collect RUNS --record NAME.json         and what was collected before, of runs that are elsewhere
    python -m hgpo_jax.tables draw configs/tables/results/household.json     the pictures again, from what `collect` kept

PLAN is a file such as configs/tables/paper.yaml, or its name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hgpo_jax import config as configuration
from hgpo_jax.config import cli
from hgpo_jax.tables import (
    advantage_errors,
    advantage_errors_in_runs,
    compare,
    figures,
    gradients,
    launch,
    plan,
    plan_results,
    run,
    run_measurements,
)
from hgpo_jax.tables import collect as collecting
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.heartbeat import Heartbeat

Arguments = dict[str, dict[str, Any]]
DIR: dict[str, Any] = {"metavar": "DIR", "type": cli.local_path}
RECORD = {"metavar": "NAME.json", "type": cli.local_path}
PLANNED: Arguments = {
    "plan": {"metavar": "PLAN", "help": "a plan's file, or its name in configs/tables"},
    "--runs": DIR | {"metavar": "RUNS", "help": "folder of the run folders; default runs/tables/PLAN"},
}
MEASURED: Arguments = PLANNED | {
    "cells": {"nargs": "+", "metavar": "CELL", "help": "runs that have ended, SETTING/METHOD/sSEED"},
    "--at": {
        "type": int,
        "required": True,
        "metavar": "N",
        "help": "after N iterations, of which there is a checkpoint; 0 is the start",
    },
}
CELLS = "run these cells only, as in 'household/*/s1?'; fields are for all cells, as in cache_dir=FOLDER"
EARLIER = "what an earlier `collect` wrote, of runs that are not in RUNS: they are shown too; may be repeated"
COMMANDS: dict[str, Arguments] = {
    "plan": PLANNED
    | {
        "--launch": {"choices": launch.WRITERS, "help": "write launch files for this instead"},
        "--to": DIR | {"help": "where --launch writes"},
    },
    "run": PLANNED
    | {
        "--jobs": {"type": int, "default": 1, "help": "cells at once; default 1"},
        "words": {"nargs": "*", "metavar": "CELL|field=value", "help": CELLS},
    },
    "bias": PLANNED | {"words": {"nargs": "*", "metavar": "field=value", "help": "for all cells, as in cache_dir=FOLDER"}},
    "truth": MEASURED,
    "gradients": MEASURED
    | {"--batches": {"type": int, "default": 48, "metavar": "M", "help": "batches that are sampled; default 48"}},
    "collect": {
        "runs": DIR | {"metavar": "RUNS", "help": "folder of the run folders"},
        "--plan": {"metavar": "PLAN", "help": "default: RUNS/plan.yaml, which `run` leaves there"},
        "--to": DIR | {"help": "where NAME.md, .csv, .tex, .json and the pictures go; default RUNS"},
        "--record": RECORD | {"action": "append", "default": [], "dest": "records", "help": EARLIER},
    },
    "draw": {
        "record": RECORD | {"help": "what `collect` wrote"},
        "--plan": {"metavar": "PLAN", "help": "default: the plan of that name in configs/tables"},
        "--to": DIR | {"help": "where the pictures go; default beside NAME.json"},
    },
}


def parse(arguments: list[str]):
    # One parser for each command, because argparse allows `field=value` between options in a parser without commands only.
    command = arguments[0] if arguments else ""
    if command not in COMMANDS:
        p = cli.parser("tables", __doc__)
        p.add_argument("command", metavar="|".join(COMMANDS), choices=COMMANDS)
        p.parse_args(arguments[:1])
    p = cli.parser(f"tables {command}", __doc__)
    for name, options in COMMANDS[command].items():
        p.add_argument(name, **options)
    args = p.parse_intermixed_args(arguments[1:])
    args.command = command
    return args


def collect(args) -> None:
    runs = Path(args.runs)
    if not runs.is_dir():
        raise ConfigError(f"{runs}: no such folder of runs")
    copy = runs / "plan.yaml"
    if not args.plan and not copy.is_file():
        raise ConfigError(f"{runs}: holds no plan.yaml; give --plan, as in --plan paper")
    source = plan.find(args.plan) if args.plan else copy
    name = runs.resolve().name if source == copy else source.stem
    to = Path(args.to) if args.to else runs
    print(collecting.collect(plan.read(source), name, runs, to, [Path(record) for record in args.records]))


def draw(args) -> None:
    record = Path(args.record)
    if not record.is_file():
        raise ConfigError(f"{record}: no such file; give the .json that `collect` wrote")
    planned = plan.read(plan.find(args.plan or record.stem))
    to = Path(args.to) if args.to else record.parent
    if not to.is_dir():
        raise ConfigError(f"--to {to}: no such folder")
    results = plan_results.read_record(planned, record)
    print(*figures.draw(planned, results, compare.table_rows(planned, results.cells), record.stem, to), sep="\n")


def main(arguments: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if args.command in ("collect", "draw"):
        collect(args) if args.command == "collect" else draw(args)
        return
    source = plan.find(args.plan)
    planned = plan.read(source)
    runs = Path(args.runs or f"runs/tables/{source.stem}")
    if args.command != "plan":
        compute(args, source, planned, runs)
    elif args.launch:
        if not args.to:
            raise ConfigError("--to: needed with --launch, the folder for its files")
        print(*launch.write(planned, args.launch, Path(args.to), str(runs)), sep="\n")
    elif args.to:
        raise ConfigError(f"--to {args.to}: is where --launch writes its files; give that, too, or leave it out")
    else:
        print(plan.listing(planned, runs))


@Heartbeat("tables")
def compute(args, source: Path, planned: plan.Plan, runs: Path) -> None:
    """Runs cells, or measures something in them."""
    if args.command in ("run", "bias"):
        fields = [word for word in args.words if "=" in word or args.command == "bias"]
        configuration.load(None, fields)  # before a cell begins
    if args.command == "run":
        if args.jobs < 1:
            raise ConfigError(f"--jobs {args.jobs}: give 1 or more")
        cells = plan.select_cells(planned, [word for word in args.words if "=" not in word])
        if run.run_cells(planned, cells, runs, source, jobs=args.jobs, more=tuple(fields)):
            sys.exit(1)
        return
    os.environ.update(planned.variables)  # what is measured here is measured on the devices that the plan's runs see
    if args.command == "bias":
        advantage_errors.measure_all(planned, runs, fields)
    elif args.command == "truth":
        run_measurements.measure_all(
            advantage_errors_in_runs.Measured, planned, runs, args.cells, args.at, advantage_errors_in_runs.measure
        )
    else:
        gradients.measure_all(planned, runs, args.cells, args.at, args.batches)


if __name__ == "__main__":
    cli.run(main)
