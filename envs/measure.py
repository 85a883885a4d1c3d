"""Measurements in a separate process, so that the memory they report is only theirs.

in_own_process("hgpo_jax.envs.webshop.bench", "build_folder", items, attributes, folder)["mb"]
"""

import importlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path


def in_own_process(module: str, function: str, *arguments: object) -> dict[str, float]:
    """Calls `module.function(*arguments)`, which takes strings and returns a dict, in a fresh process.

    Returns: that dict, and under `mb` the peak memory of the process, in MB.

    Raises:
        RuntimeError: it failed; contains the last line of its standard error.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "hgpo_jax.envs.measure", module, function, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module}.{function} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def _peak_mb() -> float:
    """Returns the peak memory of this process, in MB."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage: on Linux it counts the parent's memory at the time of the fork as the child's own.
        peak_line = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        assert peak_line is not None  # every process has one
        return int(peak_line[1]) / 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3  # bytes there, kilobytes elsewhere


if __name__ == "__main__":
    module, function, *arguments = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), function)(*arguments) | {"mb": _peak_mb()}))
