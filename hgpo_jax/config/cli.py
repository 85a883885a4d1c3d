"""Options that commands share, and how they report a user's mistake: one line, exit code 2."""

from __future__ import annotations

import argparse
import errno
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from hgpo_jax import config as configuration
from hgpo_jax.envs import command_line
from hgpo_jax.envs.command_line import Parser
from hgpo_jax.utils import errors
from hgpo_jax.utils.files import is_remote


def parser(command: str, description: str | None) -> Parser:
    return Parser(
        prog=f"python -m hgpo_jax.{command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def local_path(text: str) -> str:
    """Checks an argument that names a file or folder on this machine (an argparse type)."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f"{text}: must be a place of this machine")
    return text


def positive(text: str) -> float:
    """Reads an argument that is a number above 0 (an argparse type)."""
    number = float(text)  # argparse reports a ValueError
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


class _HelpAll(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.epilog = f"every field:\n\n{configuration.describe()}"
        parser.print_help()
        parser.exit()


def add_config_arguments(p: argparse.ArgumentParser) -> None:
    """Adds --config, --mesh, the field=value overrides, and help on fields: the common ones, or all with --help-all."""
    common = configuration.describe(configuration.COMMON)
    p.epilog = f"fields that are often changed (--help-all shows every field):\n\n{common}"
    p.add_argument("--help-all", action=_HelpAll, nargs=0, help="show this help with every field, and exit")
    file = p.add_argument("--config", metavar="FILE", help="a YAML file, or the name of one in configs/; default: household")
    p.add_argument(
        "--mesh", metavar="SPEC", help="device mesh: auto, or sizes as in data=2,fsdp=4,tensor=1; -1: the remaining devices"
    )
    overrides = p.add_argument(
        "overrides", nargs="*", metavar="field=value", help="fields to change, as in learner.lr=3e-4 seed=1"
    )
    overrides.completer = lambda prefix, **_: configuration.completions(prefix)  # type: ignore[attr-defined]  # argcomplete's
    file.completer = lambda **_: configuration.named_files()  # type: ignore[attr-defined]


def add_trained_policy(p: argparse.ArgumentParser, **options) -> None:
    """Adds RUN|HF_FOLDER (with argparse's `options`) and the arguments of `add_config_arguments`."""
    meaning = "the folder of a run that has ended, or of a Hugging Face policy"
    p.add_argument("run", **{"metavar": "RUN|HF_FOLDER", "help": meaning} | options)
    add_config_arguments(p)


def is_run(folder: str) -> bool:
    """Whether this is the folder of a run that has ended."""
    return Path(folder, "config.yaml").is_file() and Path(folder, "policy").is_dir()


def check_ended(folder: str, otherwise: str) -> None:
    """Raises ConfigError unless this is the folder of a run that has ended. otherwise: what another policy needs."""
    if is_run(folder):
        return
    if Path(folder, "config.yaml").is_file():
        kept = any(Path(folder, "checkpoints").glob("[0-9]*"))
        end = ", or end it at its last checkpoint N with --resume RUN iterations=N" if kept else ""
        resume = f"python -m hgpo_jax.train --resume {folder}"
        raise errors.ConfigError(f"{folder}: this run has not ended; continue it with {resume}{end}")
    raise errors.ConfigError(
        f"{folder}: not the folder of a run that has ended; it needs config.yaml and policy/ (for a Hugging Face policy, "
        f"exported or not, give {otherwise})"
    )


def policies_of(run: Path) -> list[Path]:
    """Lists the policy folders of a multi-policy run, each named by its roles."""
    return sorted(file.parent for file in run.glob("policy/*/config.json"))


def trained_policy(args) -> tuple[str, list[str]]:
    """Returns the config file and the overrides that select the policy of `add_trained_policy`'s arguments.

    Raises ConfigError.
    """
    run = is_run(args.run)
    if args.config is None:
        check_ended(args.run, "--config, as in --config household or --config RUN/config.yaml")
    if run and args.config is not None:
        raise errors.ConfigError(
            f"--config {args.config}: the run in {args.run} has its own config.yaml; change fields as field=value"
        )
    mesh = [] if args.mesh is None else [f"mesh={args.mesh}"]
    roles = {policy.name for policy in policies_of(Path(args.run))} if run else set()
    for override in args.overrides:
        if of_policy(override, roles):  # else the saved one would win in silence
            raise errors.ConfigError(f"{override:.200}: the policy is that of {args.run}; leave it out")
    saved = saved_policy(args.run)
    return str(Path(args.run, "config.yaml")) if run else args.config, [*args.overrides, *mesh, *saved]


def of_policy(override: str, roles: Collection[str] | None = None) -> bool:
    """Whether a trained policy decides an override's field: it has its own weights, sizes and tokenizer, adapters merged.

    roles: those with a trained policy of their own; None: all.
    """
    name = override.partition("=")[0]
    name = configuration.SHORT.get(name, name)
    if role := re.fullmatch(r"roles\.(\w+)\.(policy|lora_rank)", name):
        return roles is None or role[1] in roles
    return name == "warm_start" or (name.startswith(("policy.", "lora.")) and name != "policy.compute_dtype")


def saved_policy(folder: str) -> list[str]:
    """Returns overrides that select the policy of a run or of a Hugging Face folder; adapters are merged."""
    run = is_run(folder)
    saved = [f"policy={Path(folder, 'policy') if run else folder}", "warm_start=none", "lora.rank=0"]
    if run and (policies := policies_of(Path(folder))):
        shared = next((policy for policy in policies if "+" in policy.name), policies[0])
        saved[0] = f"policy={shared}"
        for policy in policies:
            if "+" not in policy.name:
                saved += [f"roles.{policy.name}.policy={policy}", f"roles.{policy.name}.lora_rank=0"]
    return saved


def add_distributed(p: argparse.ArgumentParser) -> None:
    """Adds --distributed."""
    p.add_argument(
        "--distributed",
        action="store_true",
        help="run as one of several processes, all started with the same command (configs/launch)",
    )


def read_fields(args) -> dict:
    """Returns the fields that --config, --mesh and the overrides set, as `config.read_fields` does. Raises ConfigError."""
    mesh = [] if args.mesh is None else [f"mesh={args.mesh}"]
    return configuration.read_fields(args.config, [*args.overrides, *mesh])


def load_config(args) -> configuration.Config:
    return configuration.resolve(read_fields(args))


# Failures of the disk or of permissions, not errors of the program.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def run(main: Callable[[], None]) -> None:
    """Runs a command; a ConfigError becomes one line on standard error and exit code 2, a RunError or a full disk 1."""
    try:
        command_line.run(main, (errors.ConfigError,))
    except errors.RunError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        message = f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}"
    else:
        return
    print(f"error: {command_line.one_line(message)}", file=sys.stderr)
    sys.exit(1)
