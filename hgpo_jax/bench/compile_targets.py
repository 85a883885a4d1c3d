"""Devices to compile for, none of which this machine needs: TPU topologies, and the GPUs of one host.

The TPU compiler knows its chips by name. XLA's GPU compiler is told what a card is like.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.utils.errors import ConfigError

TPUS = {"v4": "tpu-v4", "v5e": "tpu-v5e", "v5p": "tpu-v5p", "v6e": "tpu-v6e"}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A card, in the fields of XLA's GpuDeviceInfoProto by which our cards differ. major: of its compute capability."""

    chip: str
    major: int
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    memory_bandwidth: int
    device_memory_size: int
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


# Values of openxla/xla, xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm, h200, b200), but for the H200's memory,
# which is what a card reports.
GPUS = {
    "a100": Gpu("a100-80g", 8, 108, 64, 1.41, 2_039_040_000_000, 85_100_068_864, 41_943_040, 167_936, 166_912),
    "h100": Gpu("h100-80g", 9, 132, 128, 1.98, 3_352_320_000_000, 84_942_979_072, 52_428_800, 233_472, 232_448),
    "h200": Gpu("h200-141g", 9, 132, 128, 1.98, 4_800_000_000_000, 150_001_732_812, 52_428_800, 233_472, 232_448),
    "b200": Gpu("b200-180g", 10, 148, 128, 1.965, 7_672_320_000_000, 191_514_411_008, 132_644_864, 233_472, 232_448),
}
CUDNN = 9, 10  # a release that has every kernel that JAX may choose


class Target(NamedTuple):
    """Devices to compile for. chip: a name of `memory.CHIPS`. options: of the compiler."""

    mesh: Mesh
    chip: str
    options: dict[str, bool]


def target_of(name: str, spec: str) -> Target:
    """Returns a mesh over a TPU topology, as `v5e:2x4`, or over the GPUs of a host, as `h100:2`.

    Raises ConfigError, or ValueError as in `make_mesh`.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    kind, _, size = name.partition(":")
    if kind in TPUS:
        chip, extra, options = TPUS[kind], "tpu", {}
        description = {"platform": "tpu", "topology_name": name}
    elif kind in GPUS and re.fullmatch("[1-9][0-9]?", size):
        # Products by cuBLAS: Triton's tiles are chosen by trial on a card, and the default has failed for a whole update.
        chip, extra, options = GPUS[kind].chip, "gpu-compiler", {"xla_gpu_enable_triton_gemm": False}
        description = {"platform": "cuda", "topology": f"1x1x{size}", "target_config": _description(GPUS[kind])}
    else:
        kinds = f"{', '.join(TPUS)} and its shape, as in v5e:2x4, or {', '.join(GPUS)} and how many, as in h100:2"
        raise ConfigError(f"--compile {name}: expected one of {kinds}")
    try:
        devices = topologies.get_topology_desc(**description).devices
    except Exception as error:  # the plug-in is absent, or does not know the shape; its errors come from C++
        reason = " ".join(str(error).split())
        raise ConfigError(f"--compile {name}: no compiler for it (pip install 'hgpo_jax[{extra}]'): {reason}") from None
    if kind in GPUS:
        _do_without_a_card()
    return Target(make_mesh(spec, devices), chip, options)


def _do_without_a_card() -> None:
    """Lets JAX lower fused attention without cuDNN's library, and keep no program, which could not be read back."""
    from jax._src.cudnn import fused_attention_stablehlo

    # JAX asks the library for its version only.
    fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN[0] * 10000 + CUDNN[1] * 100
    jax.config.update("jax_enable_compilation_cache", False)


def _description(gpu: Gpu) -> str:
    """Returns XLA's GpuTargetConfigProto of a card as text.

    Without `cub_version`, sorting is compiled to XLA's own kernel: CUB's asks for a card.
    """
    own = {name: value for name, value in dataclasses.asdict(gpu).items() if name not in ("chip", "major")}
    accelerated = "feature_extension: ACCELERATED_FEATURES" if gpu.major >= 9 else ""
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {gpu.major} {accelerated} }}
          {" ".join(f"{name}: {value}" for name, value in own.items())}
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
          runtime_version: "12.9.0"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
        device_description_str: "{gpu.chip}"
    """
