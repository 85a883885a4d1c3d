"""What the commands share: their options, and the manner of refusing a user's mistake (one line, exit code 2)."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable

from hgpo_jax import config as configuration


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message):
        self.exit(2, f"error: {message}; {self.prog} --help explains\n")


def parser(command: str, description: str, *, epilog: str = "") -> Parser:
    return Parser(
        prog=f"python -m hgpo_jax.{command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_config_arguments(p: argparse.ArgumentParser) -> None:
    """--config, --mesh and the field=value overrides."""
    p.add_argument(
        "--config", metavar="FILE", help="a YAML file, or the name of one in configs/; default: the embedded job"
    )
    p.add_argument(
        "--mesh", metavar="SPEC", help="device mesh, as in data=2,fsdp=4,tensor=1; -1 takes what is left; auto"
    )
    p.add_argument("overrides", nargs="*", metavar="field=value", help="fields to change, as in learner.lr=3e-4 seed=1")


def add_distributed(p: argparse.ArgumentParser) -> None:
    """--distributed."""
    p.add_argument(
        "--distributed", action="store_true",
        help="this is one of several processes, started alike (hgpo_jax/distributed.py, configs/launch)",
    )  # fmt: skip


def load_config(args) -> configuration.Config:
    mesh = [f"mesh={args.mesh}"] if args.mesh else []
    return configuration.load(args.config, [*args.overrides, *mesh])


# What a disk or its owner refuses, not what a program does wrong.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def run(main: Callable[[], None]) -> None:
    """Runs a command; a ConfigError becomes one line on standard error and exit code 2, a RunError or a full disk 1."""
    try:
        main()
    except configuration.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except configuration.RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        print(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
