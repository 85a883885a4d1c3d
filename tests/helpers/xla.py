"""XLA_FLAGS of tests."""

from importlib.metadata import version

# Each program in one part, and XLA's older emitters where it still has them (an unknown flag ends the process): a third less
# processor time for a program that runs once or twice.
OLDER_EMITTERS = ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
QUICK_TO_COMPILE = ["--xla_cpu_parallel_codegen_split_count=1", *OLDER_EMITTERS]


def xla_flags(devices: int, optimized: bool) -> str:
    """So many devices, all of them the CPU; `optimized`: compile as users' runs do."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *([] if optimized else QUICK_TO_COMPILE)])
