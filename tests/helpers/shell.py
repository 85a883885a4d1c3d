"""Checks of shell scripts by shellcheck."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def shellcheck(text: str) -> None:
    command = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not command:
        pytest.skip("needs shellcheck")
    done = subprocess.run([command, "--shell=bash", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
