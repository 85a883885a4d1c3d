"""The optimizers and the schedules of their learning rates: of the policy, of a role's policy, of the critic, of cloning."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from hgpo_jax.config import LearnerConfig
from hgpo_jax.policy import ModelConfig

BETA1, BETA2 = 0.9, 0.999
WEIGHT_DECAY = 0.01


def make_optimizer(
    lr: float,
    warmup_steps: int,
    grad_clip: float,
    *,
    weight_decay: float = WEIGHT_DECAY,
    beta2: float = BETA2,
    decay_steps: int | None = None,
    kind: str = "adamw",
    frozen: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    """Builds AdamW or Muon, preceded by a global-norm clip, with a linear warm-up.

    Muon (Jordan et al., 2024) orthogonalizes the steps of the layers' kernels, and decays no weights; all other parameters use
    Adam with Nesterov momentum.

    decay_steps: steps at which the rate has fallen to a tenth, along a cosine; None: it stays.
    frozen: names of the parameters, at the top of the tree, that stay as they are and have no moments.
    """
    rate = _learning_rate(lr, warmup_steps, decay_steps)
    if kind == "adamw":
        steps = optax.adamw(rate, b1=BETA1, b2=beta2, weight_decay=weight_decay)
    else:
        # 0.4 is roughly the root mean square of Adam's steps, so one learning rate serves both.
        steps = muon(rate, consistent_rms=0.4, adam_b1=BETA1, adam_b2=beta2, muon_weight_dimension_numbers=_matrices)
    steps = optax.chain(optax.clip_by_global_norm(grad_clip), steps)
    if not frozen:
        return steps
    return optax.partition({True: optax.set_to_zero(), False: steps}, functools.partial(_are_among, frozen))


def frozen_parts(model: ModelConfig) -> tuple[str, ...]:
    """Returns the names of a model's parameters that training leaves as they are, for `make_optimizer`."""
    return ("visual",) if model.vision_frozen else ()


def _are_among(names: tuple[str, ...], params: Any) -> Any:
    """Returns for every parameter whether its first name is one of these."""
    return jax.tree.map_with_path(lambda path, _: path[0].key in names, params)


def _learning_rate(lr: float, warmup_steps: int, decay_steps: int | None) -> optax.Schedule:
    """Rises linearly, with a cosine after it from 0 in the first step, otherwise from a warm-up's first part."""
    if decay_steps is None:
        return optax.linear_schedule(lr / max(warmup_steps, 1), lr, max(warmup_steps - 1, 1))
    return optax.warmup_cosine_decay_schedule(0.0, lr, warmup_steps, max(decay_steps, warmup_steps + 1), lr / 10)


def _matrices(params: Any) -> Any:
    """Returns Muon's dimension numbers of the kernels in layers, [(layers,) in, out], and None for all other parameters."""

    def axes(path: tuple[Any, ...], array: jax.Array) -> MuonDimensionNumbers | None:
        in_layer = path[-1].key == "kernel" and path[0].key != "lm_head"
        return MuonDimensionNumbers(array.ndim - 2, array.ndim - 1) if in_layer else None

    return jax.tree.map_with_path(axes, params)


def lr_scale(settings: LearnerConfig, iteration: int, iterations: int) -> float:
    """Returns the fraction of the learning rate for one iteration: linear from 1 in the first to `final_lr` in the last.

    iteration: from 0. A run of one iteration has the full rate.
    """
    return 1 - (1 - settings.final_lr) * iteration / max(iterations - 1, 1)
