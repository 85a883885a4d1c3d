"""Opens the devices and makes the meshes of updates and rollouts."""

from __future__ import annotations

import contextlib
import os

import jax
from jax.sharding import AbstractMesh, Mesh

from hgpo_jax.config import Config
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.setup.memory import MEMORY_SHARES, USABLE
from hgpo_jax.setup.validate import mesh_of_rollouts
from hgpo_jax.utils import distributed
from hgpo_jax.utils.container import processors
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.heartbeat import phase


@phase("opening the devices")
def open_devices(multiprocess: bool = False) -> None:
    """Sets up the backend before anything else uses jax, together with other processes if there are several.

    On a CPU every core becomes a device: for small matrices, data parallelism over cores is faster than threads inside each
    operation. Raises ConfigError if the processes do not find each other.
    """
    if not MEMORY_SHARES & os.environ.keys():  # jax reserves three quarters of a GPU by default
        os.environ[min(MEMORY_SHARES)] = str(USABLE)
    if multiprocess:
        distributed.join()
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not forced:
        with contextlib.suppress(RuntimeError):  # a program that has used jax before keeps its devices
            jax.config.update("jax_num_cpu_devices", processors())
    distributed.mute_other_processes()


def prepare_devices(config: Config, multiprocess: bool = False) -> Mesh:
    """Opens the devices and returns the mesh. Raises ConfigError, also if the mesh does not fit the devices or the batch."""
    open_devices(multiprocess)
    return job_mesh(config)


def job_meshes(config: Config) -> tuple[Mesh, Mesh | None]:
    """Returns the mesh of the updates and, with `rollout.mesh`, that of the rollouts, which has the last devices.

    Raises ConfigError as `job_mesh`.
    """
    if not config.rollout.mesh:
        return job_mesh(config), None
    devices, spec = jax.devices(), config.rollout.mesh
    if jax.process_count() > 1:
        raise ConfigError(f"rollout.mesh={spec}: works in a single process; leave it out")
    count = mesh_of_rollouts(config).size
    if count >= len(devices):
        raise ConfigError(f"rollout.mesh={spec}: leaves the update none of {len(devices)} devices; give smaller sizes")
    rollout_mesh = make_mesh(spec, devices[-count:])
    check_shards(f"rollout.mesh={spec}", config, rollout_mesh)
    try:
        return job_mesh(config, devices[:-count]), rollout_mesh
    except ConfigError as error:
        raise ConfigError(f"{error} (rollout.mesh={spec} takes {count})") from None


@phase("opening the devices")
def job_mesh(config: Config, devices: list | None = None) -> Mesh:
    """Returns the configured mesh over the open devices, or these. Raises ConfigError if it does not fit them or the batch."""
    devices, spec = devices or jax.devices(), config.mesh
    episodes = config.rollout.prompt_groups * config.rollout.group_size
    if spec == "auto":
        # The largest number of devices that can share the episodes equally.
        count = max(n for n in range(1, len(devices) + 1) if episodes % n == 0)
        if count < len(devices) and jax.process_count() > 1:
            raise ConfigError(
                f"mesh=auto: the {len(devices)} devices of {jax.process_count()} processes do not share {episodes} episodes "
                "equally; change rollout.prompt_groups or rollout.group_size, or give mesh="
            )
        devices, spec = devices[:count], f"data={count}"
    try:
        mesh = make_mesh(spec, devices)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_shards(f"mesh={config.mesh}", config, mesh)
    return mesh


def check_shards(given: str, config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises ConfigError if a mesh does not divide the episodes of an iteration."""
    episodes, shards = config.rollout.prompt_groups * config.rollout.group_size, mesh.shape["data"] * mesh.shape["fsdp"]
    if episodes % shards:
        raise ConfigError(
            f"{given}: data x fsdp = {shards} does not divide the {episodes} episodes of an iteration "
            f"(rollout.prompt_groups x rollout.group_size)"
        )
