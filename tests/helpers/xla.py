"""XLA_FLAGS of tests."""

# XLA's older emitters, and each program in one part: a third less processor time for a program that runs once or twice.
QUICK_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def xla_flags(devices: int, optimized: bool) -> str:
    """So many devices, all of them the CPU; `optimized`: compile as users' runs do."""
    count = f"--xla_force_host_platform_device_count={devices}"
    return count if optimized else f"{count} {QUICK_TO_COMPILE}"
