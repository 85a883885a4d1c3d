"""XLA_FLAGS of tests, and where they keep compiled programs."""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

# Each program in one part, and XLA's older emitters where it still has them (an unknown flag ends the process): a third less
# processor time for a program that runs once or twice.
OLDER_EMITTERS = ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
QUICK_TO_COMPILE = ["--xla_cpu_parallel_codegen_split_count=1", *OLDER_EMITTERS]


def xla_flags(devices: int, optimized: bool) -> str:
    """So many devices, all of them the CPU; `optimized`: compile as users' runs do."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *([] if optimized else QUICK_TO_COMPILE)])


LARGEST_CACHE = 2 * 2**30  # bytes, with which it is begun anew


def compiled_programs() -> Path:
    """The folder of compiled programs, of this release of jax on this processor; jax's own keys hold flags and shapes."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hgpo_jax", "tests")
    cpu = Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))] if cpu.exists() else []
    kind = "\n".join([platform.machine(), *features[:1]])
    folder = caches / f"jax{version('jax')}-jaxlib{version('jaxlib')}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
    if folder.exists() and sum(file.stat().st_size for file in folder.iterdir()) > LARGEST_CACHE:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="programs")


def programs_of_its_own() -> dict[str, str]:
    """The environment of a process that is killed: what it leaves half written is not kept, but it reads what is."""
    own, kept = Path(_scratch().name), Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    for program in kept.iterdir() if kept.exists() else ():
        with contextlib.suppress(FileExistsError):
            (own / program.name).symlink_to(program)
    return {"JAX_COMPILATION_CACHE_DIR": str(own)}
