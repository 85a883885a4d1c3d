"""`python -m hgpo_jax.tables`: the runs of a table, planned, run and collected.

    python -m hgpo_jax.tables plan paper                      every cell: commands, memory on each device, expected tokens
    python -m hgpo_jax.tables plan paper --launch slurm --to DIR      a launch file for each cell; tpu, kubernetes, skypilot
    python -m hgpo_jax.tables run household --jobs 2          runs what is missing; continues after an interruption
    python -m hgpo_jax.tables run household 'household/*/s1?'         a part of it, as on one machine of several
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

from hgpo_jax import config as configuration
from hgpo_jax.config import cli
from hgpo_jax.tables import bias, collect, curves, gradients, launch, plan, records, run, truth
from hgpo_jax.utils.errors import ConfigError

COMMANDS = ("plan", "run", "bias", "truth", "gradients", "collect", "draw")


def parse(arguments: list[str]):
    # One parser for each command, because argparse allows `field=value` between options in a parser without commands only.
    command = arguments[0] if arguments else ""
    if command not in COMMANDS:
        p = cli.parser("tables", __doc__)
        p.add_argument("command", metavar="|".join(COMMANDS), choices=COMMANDS)
        p.parse_args(arguments[:1])
    p = cli.parser(f"tables {command}", __doc__)
    if command == "collect":
        p.add_argument("runs", metavar="RUNS", type=cli.local_path, help="folder of the run folders")
        p.add_argument("--plan", metavar="PLAN", help="default: RUNS/plan.yaml, which `run` leaves there")
        p.add_argument(
            "--to",
            metavar="DIR",
            type=cli.local_path,
            help="where NAME.md, .csv, .tex, .json and the pictures go; default RUNS",
        )
        p.add_argument(
            "--record",
            metavar="NAME.json",
            type=cli.local_path,
            action="append",
            default=[],
            dest="records",
            help="what an earlier `collect` wrote, of runs that are not in RUNS: they are shown too; may be repeated",
        )
    elif command == "draw":
        p.add_argument("record", metavar="NAME.json", help="what `collect` wrote")
        p.add_argument("--plan", metavar="PLAN", help="default: the plan of that name in configs/tables")
        p.add_argument("--to", metavar="DIR", type=cli.local_path, help="where the pictures go; default beside NAME.json")
    else:
        p.add_argument("plan", metavar="PLAN", help="a plan's file, or its name in configs/tables")
        p.add_argument(
            "--runs",
            metavar="RUNS",
            type=cli.local_path,
            help="folder of the run folders; default runs/tables/PLAN",
        )
    if command == "plan":
        p.add_argument("--launch", choices=launch.WRITERS, help="write launch files for this instead")
        p.add_argument("--to", metavar="DIR", type=cli.local_path, help="where --launch writes")
    if command in ("truth", "gradients"):
        p.add_argument("cells", nargs="+", metavar="CELL", help="runs that have ended, SETTING/METHOD/sSEED")
        p.add_argument(
            "--at",
            type=int,
            required=True,
            metavar="N",
            help="after N iterations, of which there is a checkpoint; 0 is the start",
        )
    if command == "gradients":
        p.add_argument("--batches", type=int, default=48, metavar="M", help="batches that are sampled; default 48")
    if command == "run":
        p.add_argument("--jobs", type=int, default=1, help="cells at once; default 1")
    if command == "run":
        p.add_argument(
            "words",
            nargs="*",
            metavar="CELL|field=value",
            help="run these cells only, as in 'household/*/s1?'; fields are for all cells, as in cache_dir=FOLDER",
        )
    if command == "bias":
        p.add_argument("overrides", nargs="*", metavar="field=value", help="for all cells, as in cache_dir=FOLDER")
    args = p.parse_intermixed_args(arguments[1:])
    args.command = command
    if command == "run":
        args.overrides = [word for word in args.words if "=" in word]
        args.cells = [word for word in args.words if "=" not in word]
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if args.command == "collect":
        runs = Path(args.runs)
        if not runs.is_dir():
            raise ConfigError(f"{runs}: no such folder of runs")
        kept = runs / "plan.yaml"
        if not args.plan and not kept.is_file():
            raise ConfigError(f"{runs}: holds no plan.yaml; give --plan, as in --plan paper")
        source = plan.find(args.plan) if args.plan else kept
        name = runs.resolve().name if source == kept else source.stem
        to = Path(args.to) if args.to else runs
        print(collect.collect(plan.read(source), name, runs, to, [Path(record) for record in args.records]))
        return
    if args.command == "draw":
        record = Path(args.record)
        if not record.is_file():
            raise ConfigError(f"{record}: no such file; give the .json that `collect` wrote")
        planned = plan.read(plan.find(args.plan or record.stem))
        to = Path(args.to) if args.to else record.parent
        if not to.is_dir():
            raise ConfigError(f"--to {to}: no such folder")
        cells, _, measured = records.read_record(planned, record)
        print(*curves.draw(planned, cells, collect.rows(planned, cells), measured, record.stem, to), sep="\n")
        return
    source = plan.find(args.plan)
    planned = plan.read(source)
    if args.command in ("run", "bias"):
        configuration.load(None, args.overrides)  # before a cell begins
    runs = Path(args.runs or f"runs/tables/{source.stem}")
    if args.command in ("bias", "truth", "gradients"):  # which compute here, on the devices that the plan's runs see
        os.environ.update(planned.variables)
    if args.command == "run":
        if args.jobs < 1:
            raise ConfigError(f"--jobs {args.jobs}: give 1 or more")
        wanted = plan.chosen(planned, args.cells)
        if run.run_cells(planned, wanted, runs, source, jobs=args.jobs, more=tuple(args.overrides)):
            sys.exit(1)
    elif args.command == "bias":
        bias.measure_all(planned, runs, args.overrides)
    elif args.command == "truth":
        truth.KIND.measure_all(planned, runs, args.cells, args.at, truth.measure)
    elif args.command == "gradients":
        gradients.measure_all(planned, runs, args.cells, args.at, args.batches)
    elif args.launch:
        if not args.to:
            raise ConfigError("--to: needed with --launch, the folder for its files")
        for file in launch.write(planned, args.launch, Path(args.to), str(runs)):
            print(file)
    else:
        print(plan.listing(planned, runs))


if __name__ == "__main__":
    cli.run(main)
