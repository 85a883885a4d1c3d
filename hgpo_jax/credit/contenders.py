"""The methods whose advantages are scored, and what each computes on a snapshot."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import config as configuration
from hgpo_jax.advantages import estimate, parameters
from hgpo_jax.credit.snapshot import Snapshot
from hgpo_jax.learner.methods import FIRST_SIGNAL, METHODS, estimator_options, method_named, unusable
from hgpo_jax.utils.errors import ConfigError

BATCH = ("rewards", "mask", "states", "groups", "invalid")
# What a method may not set: true advantages have the snapshot's discount and no penalties, and every step is scored.
FIXED = {
    "gamma": "is the snapshots' own",
    "invalid_penalty": "true advantages have none",
    "keep": "all steps are scored",
    "by_role": "steps are compared over all roles",
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A method, with some of its options.

    method: as in `method=`. options: fields of `advantage`, as in `history_length=0`.
    """

    method: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.method, *self.options))

    def missing(self, snapshots: list[Snapshot]) -> str:
        """Says why the method cannot be scored; "" if it can."""
        estimator = method_named(self.method).estimator
        needed = parameters(estimator)[0]
        if lacking := sorted(name for name in needed if any(name not in snapshot.arrays for snapshot in snapshots)):
            return f"needs {', '.join(lacking)}, which a snapshot does not hold"
        first = FIRST_SIGNAL.get(estimator)
        if first and any(snapshot.about.signals[0] != first for snapshot in snapshots):
            return f"needs {first} as the first signal, which a snapshot does not hold"
        return ""

    def advantages(self, snapshot: Snapshot) -> np.ndarray:
        """Computes the advantages f32[B, T] of a snapshot, batch by batch. Raises ConfigError."""
        about, estimator = snapshot.about, method_named(self.method).estimator
        fields = [f"method={self.method}", f"rollout.history_length={about.history_length}", *self._fields(about.gamma)]
        options = estimator_options(configuration.load(None, fields), estimator)
        names = {*BATCH, *parameters(estimator)[0]}
        advantages = np.zeros(snapshot["mask"].shape, np.float32)
        for rows in snapshot.batches():
            arrays = {name: snapshot[name][rows] for name in names}
            try:
                advantages[rows] = estimate(estimator, **arrays, **options).advantages
            except ValueError as error:
                raise ConfigError(f"{self.name}: {error}") from None
        if fault := unusable(advantages, snapshot["mask"]):
            raise ConfigError(f"{self.name}: returns {fault}")
        return advantages

    def _fields(self, gamma: float) -> list[str]:
        return [f"advantage.gamma={gamma}", "advantage.invalid_penalty=0", *(f"advantage.{o}" for o in self.options)]


def read(text: str) -> Contender:
    """Reads a method and its options, as in `hgpo history_length=0`. Raises ConfigError."""
    method, *options = text.split() or [""]
    for option in options:
        if reason := FIXED.get(option.partition("=")[0]):
            raise ConfigError(f"{option}: {reason}; leave it out")
    contender = Contender(method, tuple(options))
    configuration.load(None, [f"method={method}", *contender._fields(1.0)])
    method_named(method)
    return contender


def all_methods() -> list[Contender]:
    """Returns a contender for each estimator of the library: `dapo` and others that share one differ only in their losses."""
    by_estimator: dict[str, str] = {}
    for name, method in METHODS.items():
        by_estimator.setdefault(method.estimator, name)
    return [Contender(name) for name in by_estimator.values()]
