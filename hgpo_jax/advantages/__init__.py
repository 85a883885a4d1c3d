"""Advantage estimators for groups of multi-step trajectories: pure functions of arrays, importable alone.

    from hgpo_jax.advantages import estimate
    record = estimate("hgpo", rewards=rewards, mask=mask, states=states, groups=groups, history_length=2)

A new estimator is one function in one file, `def name(batch, *, options) -> Estimate`, and one line in `ESTIMATORS`.
Its keyword arguments with a default are options (give a new one its range in `checks.OPTIONS`); those without are
further arrays (`checks.ARRAYS`; training has those of `learner.methods.AVAILABLE_ARRAYS`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hgpo_jax.advantages import checks, grouping
from hgpo_jax.advantages.adora import adora
from hgpo_jax.advantages.beacon import beacon
from hgpo_jax.advantages.crbc import crbc
from hgpo_jax.advantages.dr_mas import dr_mas
from hgpo_jax.advantages.dvao import dvao
from hgpo_jax.advantages.eb_gae import eb_gae
from hgpo_jax.advantages.eb_td import eb_td
from hgpo_jax.advantages.ecpo import ecpo
from hgpo_jax.advantages.filters import filtered
from hgpo_jax.advantages.g2po import g2po
from hgpo_jax.advantages.g2rpo import g2rpo
from hgpo_jax.advantages.gae import gae
from hgpo_jax.advantages.gagpo import gagpo
from hgpo_jax.advantages.gbpo import gbpo
from hgpo_jax.advantages.gdpo import gdpo
from hgpo_jax.advantages.gigpo import gigpo
from hgpo_jax.advantages.graphgpo import graphgpo
from hgpo_jax.advantages.grouping import state_ids
from hgpo_jax.advantages.grpo import grpo
from hgpo_jax.advantages.hapo import hapo
from hgpo_jax.advantages.hbpo import hbpo
from hgpo_jax.advantages.hgpo import hgpo
from hgpo_jax.advantages.himac import himac
from hgpo_jax.advantages.hiper import hiper
from hgpo_jax.advantages.informative import informative
from hgpo_jax.advantages.milegpo import milegpo
from hgpo_jax.advantages.pgpo import pgpo
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from hgpo_jax.advantages.rloo import rloo
from hgpo_jax.advantages.similarity import similar_states

__all__ = [
    "ESTIMATORS",
    "NO_ROLES_TO_TELL_APART",
    "Batch",
    "Estimate",
    "estimate",
    "informative",
    "parameters",
    "similar_states",
    "state_ids",
]

Array = jax.Array | np.ndarray

ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "adora": adora,
    "beacon": beacon,
    "crbc": crbc,
    "dr_mas": dr_mas,
    "dvao": dvao,
    "eb_gae": eb_gae,
    "eb_td": eb_td,
    "ecpo": ecpo,
    "g2po": g2po,
    "g2rpo": g2rpo,
    "gae": gae,
    "gagpo": gagpo,
    "gbpo": gbpo,
    "gdpo": gdpo,
    "gigpo": gigpo,
    "graphgpo": graphgpo,
    "grpo": grpo,
    "hapo": hapo,
    "hbpo": hbpo,
    "hgpo": hgpo,
    "himac": himac,
    "hiper": hiper,
    "milegpo": milegpo,
    "pgpo": pgpo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
}

# Those that compare no turns of different roles: they have learned values, or compare whole episodes, or tell roles apart.
NO_ROLES_TO_TELL_APART = ("dr_mas", "g2rpo", "gae", "himac", "hiper")


def estimate(
    name: str,
    *,
    rewards: Array,
    mask: Array,
    states: Array,
    groups: Array,
    invalid: Array | None = None,
    by_role: Array | None = None,
    **options: Any,
) -> Estimate:
    """Advantages of all steps of B trajectories of at most T steps.

    name: a key of `ESTIMATORS`.
    rewards, mask, states, groups, invalid: the fields of `Batch`; what padding holds is ignored.
    by_role: i32[B, T], 0 or more, the role that acted in each step, for teams. A step is then compared only with those of its
        role, as in Dr. MAS. What is compared first and whitened then is whitened over all roles, as in its code.
        `NO_ROLES_TO_TELL_APART` do not take it.
    options: the estimator's own keyword arguments, see its docstring; and for any of them `keep`, a name of `filters.FILTERS`:
        the trajectories that it drops take no part, and `Estimate.keep` says so. Default: `all`.

    Jittable: inside `jax.jit` only shapes, dtypes and options are checked. Called on concrete arrays it also checks
    their values and compiles once per shape and options. Arrays sharded over a mesh are gathered first (they are
    small), so that the result is the same on every number of devices; inside `jax.jit` that takes a mesh in context
    (`jax.set_mesh`) or inputs that are replicated already.

    Raises ValueError: an unknown estimator or option, `by_role` where it has no effect, a shape or dtype that does not
    fit, a mask with holes, numbers that are not finite, ids below 0.
    """
    arrays_known, options_known = parameters(name)
    keep = options.pop("keep", "all")
    shape = checks.mask_shape(mask)
    arrays: dict[str, Array] = {"rewards": rewards, "mask": mask, "states": states, "groups": groups}
    arrays["invalid"] = np.zeros(shape, bool) if invalid is None else invalid
    for option in options:
        if option not in (*arrays_known, *options_known):
            raise ValueError(checks.unknown_name(f"option of {name}", option, (*arrays_known, *options_known)))
    if by_role is not None:
        if name in NO_ROLES_TO_TELL_APART:
            raise ValueError(f"by_role: {name} compares no turns of different roles; leave it out")
        arrays["by_role"] = by_role
    for array in arrays_known:
        if array not in options:
            raise ValueError(f"{name} needs {array}: give {array}=<{checks.describe(array)}>")
        arrays[array] = options.pop(array)
    for option, value in (options | {"keep": keep}).items():
        checks.check_option(option, value)
    arrays = {field: checks.check_array(field, value, shape) for field, value in arrays.items()}
    if checks.is_concrete(arrays["mask"]):
        host_mask = np.asarray(arrays["mask"])
        checks.check_mask(host_mask)
        for field, value in arrays.items():
            if checks.is_concrete(value):
                checks.check_values(field, np.asarray(value), host_mask)
    arrays = {field: _replicate(value) for field, value in arrays.items()}
    result: Estimate = _estimate(ESTIMATORS[name], keep, tuple(sorted(options.items())), arrays)
    return result


def parameters(name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the further arrays that an estimator needs, and its options with their defaults."""
    if name not in ESTIMATORS:
        raise ValueError(checks.unknown_name("estimator", name, ESTIMATORS))
    keywords = list(inspect.signature(ESTIMATORS[name]).parameters.values())[1:]
    arrays = tuple(p.name for p in keywords if p.default is p.empty)
    return arrays, {p.name: p.default for p in keywords if p.default is not p.empty}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _estimate(
    estimator: Callable[..., Estimate], keep: str, options: tuple[tuple[str, Any], ...], arrays: dict[str, jax.Array]
) -> Estimate:
    arrays = {field: jnp.asarray(value, checks.ARRAYS[field][0]) for field, value in arrays.items()}
    mask = arrays["mask"]
    roles = arrays.pop("by_role", None)
    batch = Batch(
        rewards=jnp.where(mask, arrays.pop("rewards"), 0.0),
        mask=arrays.pop("mask"),
        states=arrays.pop("states"),
        peers=jnp.broadcast_to(arrays["groups"][:, None], mask.shape),
        groups=arrays.pop("groups"),
        invalid=arrays.pop("invalid") & mask,
    )
    if roles is not None:
        batch = grouping.by_role(batch, roles)
    if keep != "all":
        batch = filtered(batch, keep)
    result = estimator(batch, **arrays, **dict(options))
    if isinstance(result, Estimate):  # a mistake of one's own estimator is told by who asked
        result = dataclasses.replace(result, peers=jnp.where(batch.mask, batch.peers, -1))
        if getattr(result.advantages, "shape", None) == mask.shape:
            result = dataclasses.replace(result, advantages=jnp.where(mask, result.advantages, 0.0))
    if keep != "all":
        result = dataclasses.replace(result, keep=batch.mask if result.keep is None else batch.mask & result.keep)
    if "signals" in arrays:  # a compiled environment's are never checked on the host, and an integer cast hides a NaN
        unusable = batch.mask & ~(jnp.abs(arrays["signals"]) <= checks.LARGEST).all(-1)
        result = dataclasses.replace(result, advantages=jnp.where(unusable, jnp.nan, result.advantages))
    return result


def _replicate(value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        if jax.sharding.get_abstract_mesh().empty:
            return value
        return jax.lax.with_sharding_constraint(value, PartitionSpec())
    if isinstance(value, jax.Array) and isinstance(value.sharding, NamedSharding):
        return jax.device_put(value, NamedSharding(value.sharding.mesh, PartitionSpec()))
    return value
