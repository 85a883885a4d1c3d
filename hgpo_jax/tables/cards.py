"""The GPUs of this machine, dealt out to cells that run at once: jax takes all that a process sees."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.setup.validate import mesh_of_rollouts
from hgpo_jax.tables.plan import Cell, Plan, config_of
from hgpo_jax.utils.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def there(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """Returns the names of the GPUs that a process would see; [] where jax is told to do without."""
    if environment.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return []
    if VISIBLE in environment:
        names = [name.strip() for name in environment[VISIBLE].split(",")]
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # what follows -1 is hidden
    return [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]  # CUDA counts those that it sees


class Cards:
    """Deals GPUs to cells; without any, or to one cell at a time, it leaves processes as they are.

    names: from `there`. jobs: cells at once.
    """

    def __init__(self, names: list[str], jobs: int):
        self._names, self._all, self._jobs = list(names), len(names), jobs
        self._free = threading.Condition()

    def needed(self, plan: Plan, cell: Cell, more: tuple[str, ...]) -> int:
        """Returns how many a cell takes, 0 if none are dealt. Raises ConfigError if it does not say, or takes too many."""
        if not self._names or self._jobs == 1:
            return 0
        config = config_of(plan, cell, more)
        try:
            count = abstract_mesh(config.mesh).size + (mesh_of_rollouts(config).size if config.rollout.mesh else 0)
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"--jobs {self._jobs}: {cell.name}: {error}") from None
        if count > self._all:
            raise ConfigError(
                f"--jobs {self._jobs}: {cell.name} takes {count} GPUs, and there are {self._all}; leave --jobs out"
            )
        return count

    @contextlib.contextmanager
    def dealt(self, count: int) -> Iterator[dict[str, str]]:
        """Waits until so many are free; yields the variables of a process that sees these alone."""
        if not count:
            yield {}
            return
        with self._free:
            self._free.wait_for(lambda: len(self._names) >= count)
            mine, self._names = self._names[:count], self._names[count:]
        try:
            yield {VISIBLE: ",".join(mine)}
        finally:
            with self._free:
                self._names = [*mine, *self._names]
                self._free.notify_all()
