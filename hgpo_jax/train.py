"""`python -m hgpo_jax.train`: trains an agent, by default a tiny Qwen2.5 in the household.

    python -m hgpo_jax.train                                   the default run, on any CPU
    python -m hgpo_jax.train --config household_six            all six task types
    python -m hgpo_jax.train method=gigpo seed=1 learner.lr=1e-3
    python -m hgpo_jax.train --resume RUN                      continues a run, with its own config.yaml
    python -m hgpo_jax.train --resume RUN iterations=160       and makes it longer

Writes a run folder: config.yaml (resolved), log.txt, metrics.jsonl, tensorboard/, curves.png, checkpoints/, episodes/, start/
and policy/ (Hugging Face folders of the policy before and after), adapter/ (with LoRA, for peft), evaluation.json and
transcripts.txt.
"""

from __future__ import annotations

import argparse
import contextlib

from hgpo_jax import config as configuration
from hgpo_jax.config import cli
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import is_remote
from hgpo_jax.utils.heartbeat import Heartbeat


def check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for options of which one would be ignored."""
    if args.rehearse and args.resume != "never":
        raise ConfigError(f"--resume {args.resume}: a rehearsal begins anew; leave it out")
    if args.rehearse and args.dry_run:
        raise ConfigError("--rehearse: --dry-run stops before anything is played; leave out one of the two")
    for option, is_set in (("--rehearse", args.rehearse), ("--dry-run", args.dry_run)):
        if is_set and args.distributed:
            raise ConfigError(f"--distributed: {option} is of one process; leave out one of the two")
    if args.allow_change and args.resume == "never":
        raise ConfigError(f"--allow-change {args.allow_change[0]:.100}: no run is resumed; leave it out, or give --resume")


def main() -> None:
    p = cli.parser("train", __doc__)
    cli.add_config_arguments(p)
    cli.add_distributed(p)
    p.add_argument("--dry-run", action="store_true", help="check everything but the weights, print the memory plan, and stop")
    p.add_argument(
        "--rehearse",
        action="store_true",
        help="play the whole run through in minutes, on simulated devices: the same dtype, mesh, method and environment, only "
        "smaller and shorter; keeps only compiled programs, in cache_dir",
    )
    p.add_argument(
        "--resume",
        metavar="auto|never|RUN",
        default="never",
        help="continue the interrupted run in a folder; fields that are not given come from its config.yaml. auto: the run in "
        "run_dir, or without run_dir the newest unfinished one under runs/ of this name, method and seed; if there is none, a "
        "new run begins. A finished run is left alone unless iterations= asks for more",
    )
    p.add_argument(
        "--allow-change",
        metavar="FIELD",
        action="append",
        default=[],
        help="a field that a resumed run may change; iterations, log.*, evaluation.* and fields that only change speed "
        "or memory may anyway",
    )
    args = p.parse_intermixed_args()  # options may be between fields
    check_options(args)
    fields = cli.read_fields(args)
    config = configuration.resolve(fields) if args.resume == "never" else None
    # Only here: these take seconds to import, and mistakes in fields have been rejected by now.
    # Which of several processes this is, and whether it may speak, is not known yet.
    with contextlib.nullcontext() if args.distributed else Heartbeat("importing the program"):
        from hgpo_jax.setup.validate import check_overrides
        from hgpo_jax.trainer.main import Interrupted, dry_run, leave, train
        from hgpo_jax.trainer.run_folder import run_folder

    # Several processes cannot share a bucket, which `train` refuses. Before all of them have come here none begins a run.
    if args.resume == "auto" and not (args.distributed and is_remote(fields.get("run_dir", ""))):
        resumes = run_folder(fields, args.resume)[1]
        config = None if resumes else configuration.resolve(fields)
    if config:  # a run that is resumed may have begun with overrides that were not refused then
        check_overrides(config, args.overrides)
    if args.rehearse:
        assert config is not None
        from hgpo_jax.trainer.rehearsal import rehearse  # seconds, as above

        return rehearse(config)
    allowed = tuple(args.allow_change)
    if args.dry_run:
        return dry_run(fields, args.resume, allowed)
    try:
        train(fields, args.resume, allowed, args.distributed, exits=True)
    except Interrupted as signal:
        leave(128 + signal.number)


if __name__ == "__main__":
    cli.run(main)
