"""Shared parts of commands: a parser, and a way to run them that reports a user's mistake in one line, with exit code 2."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
import unicodedata
from collections.abc import Callable


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, without the usage text, and answers a shell's requests for completions."""

    def parse_args(self, *args, **kwargs):
        complete(self)
        return super().parse_args(*args, **kwargs)

    def parse_intermixed_args(self, *args, **kwargs):
        complete(self)
        return super().parse_intermixed_args(*args, **kwargs)

    def error(self, message):
        self.exit(2, f"error: {one_line(message)}; {self.prog} --help explains\n")


def complete(parser: argparse.ArgumentParser) -> None:
    """Does nothing unless a shell asks for completions; then it answers, and ends the process."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete  # its registration in the shell sets that variable

        argcomplete.autocomplete(parser)


def printable(text: str) -> str:
    """Makes text harmless for a terminal: control characters, directional marks and lone surrogates become question marks."""
    return "".join(c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else "?" for c in text)


def one_line(message: object) -> str:
    """Returns a message without line breaks, whatever it contains."""
    return printable(" ".join(str(message).split()))


def nearest(name: str, names: list[str], otherwise: str = "--help lists them all") -> str:
    """Suggests the intended name for a mistyped one, as the end of a message."""
    name = name[:100]
    # People remember only the last part of a field: `lr` should find `learner.lr`.
    close = [n for n in names if n.rpartition(".")[2] == name]
    if not close:
        close = difflib.get_close_matches(name, names, 3, 0.5)
        alike = [difflib.SequenceMatcher(None, n, name).ratio() for n in close]
        close = [n for n, ratio in zip(close, alike, strict=True) if ratio == max(alike)]
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def whole_number(text: str, low: int = 1) -> int:
    """Reads a whole number (an argparse type). Raises ArgumentTypeError, which argparse reports in one line."""
    if not (text.isdecimal() and len(text) <= 10 and low <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text:.50}: must be a whole number from {low} to {2**31 - 1}")
    return int(text)


# Errors that a wrong path causes; others, such as a full disk, are not the user's mistake.
PATHS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def run(main: Callable[[], None], mistakes: tuple[type[Exception], ...]) -> None:
    """Runs a command; one of the `mistakes`, or a wrong path, becomes one line on standard error and exit code 2."""
    caught: tuple[type[Exception], ...] = (OSError, *mistakes)
    try:
        main()
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = None
        sys.exit(1)
    except caught as error:
        message = one_line(error)
        if isinstance(error, OSError) and error.filename is not None and error.errno in PATHS:
            assert error.strerror is not None  # the system sets it together with the file's name
            message = one_line(f"{error.filename}: {error.strerror.lower()}; check the path")
        elif not isinstance(error, mistakes):
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
