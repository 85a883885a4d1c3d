"""The vision tower of Qwen2.5-VL in Flax NNX: from patches to features of the language model's width.

    grids = ((1, 8, 6), (1, 4, 4))                           # time, rows and columns of two pictures, in patches
    features = model.visual(patches, grids)                  # [M, 64, C x T x P x P] -> [M, 16, D]

`grids` is static: a program is compiled for each combination of sizes. Each of the M rows holds pictures of these sizes, one
after the other. Patches come as transformers' processor lays them out (`pictures.py`): the spatial_merge_size ^ 2 patches that
become one feature are neighbours.

Most blocks attend within windows, some within the whole picture, never from one picture, or one moment of a film, to another.
Windows at the right and lower edges are smaller. Patches are sorted by window, and windows by size, so that all windows of a
size are one product without a mask; only blocks of full attention sort queries, keys and values back.

Source: Qwen2.5-VL's technical report (arXiv 2502.13923); the names of weights are transformers' ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hgpo_jax.policy.attention import attend
from hgpo_jax.policy.layers import MLP, REMAT, Linear, RMSNorm, product_transposed
from hgpo_jax.policy.mesh import auto_axes, constrain
from hgpo_jax.policy.model_config import ModelConfig, VisionConfig
from hgpo_jax.policy.rope import apply_rope

Grids = tuple[tuple[int, int, int], ...]  # time, rows and columns of each picture, in patches
EPS = 1e-6
ROPE_THETA = 1e4


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the patches of some pictures go. The orders are index arrays: `sorted = original[order]`."""

    windows: np.ndarray  # i64[N], patches sorted by window
    back: np.ndarray  # i64[N], sorts them back
    merged_back: np.ndarray  # i64[N / merge^2], the same for merged patches
    window_runs: tuple[tuple[int, int], ...]  # (count, patches in each) of windows of a size, in that order
    picture_runs: tuple[tuple[int, int], ...]  # the same for pictures, in the original order
    positions: np.ndarray  # i64[N, 2], row and column of each patch, sorted by window


@functools.cache
def layout_of(grids: Grids, v: VisionConfig) -> Layout:
    """Computes the layout of pictures of these sizes. Raises ValueError for sizes that merged patches do not divide."""
    merge, merged = v.spatial_merge_size, 0
    windows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    for time, rows, columns in grids:
        if min(time, rows, columns) < 1 or rows % merge or columns % merge:
            raise ValueError(f"grid {(time, rows, columns)}: rows and columns must be positive multiples of {merge}")
        row, column = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge).swapaxes(2, 3)
        positions += [np.stack([row.ravel(), column.ravel()], -1)] * time
        index = merged + np.arange(time * rows * columns // merge**2).reshape(time, rows // merge, columns // merge)
        merged += index.size
        corners = itertools.product(*(range(0, side, v.window) for side in index.shape[1:]))
        for moment, (top, left) in itertools.product(index, corners):
            windows.append(moment[top : top + v.window, left : left + v.window].ravel())
    windows.sort(key=len)
    order = np.concatenate(windows)
    patches = (order[:, None] * merge**2 + np.arange(merge**2)).ravel()
    moments = [rows * columns for time, rows, columns in grids for _ in range(time)]
    return Layout(
        windows=patches,
        back=np.argsort(patches),
        merged_back=np.argsort(order),
        window_runs=_runs([len(window) * merge**2 for window in windows]),
        picture_runs=_runs(moments),
        positions=np.concatenate(positions)[patches],
    )


def _runs(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    """Counts equal neighbours: (count, length) each."""
    return tuple((len(list(group)), length) for length, group in itertools.groupby(lengths))


def attend_within(runs: tuple[tuple[int, int], ...], q_MNHE, k_MNHE, v_MNHE):
    """Computes attention within consecutive parts of N, whose `runs` are (count, length): [M, N, H, E]."""
    outs, begin = [], 0
    for count, length in runs:
        part = slice(begin, begin := begin + count * length)
        q, k, v = (a[:, part].reshape(-1, length, *a.shape[2:]) for a in (q_MNHE, k_MNHE, v_MNHE))
        last = jnp.full(q.shape[:2], length - 1)  # every patch sees all others
        outs.append(attend(q, k, v, last).reshape(q_MNHE.shape[0], -1, *q.shape[2:]))
    return jnp.concatenate(outs, axis=1)


def constrain_rows(x, *axes: str | None):
    """Pins the layout of x [M, ...]; M rows that the devices of a batch do not divide are computed by all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    shards = math.prod(mesh.shape[axis] for axis in auto_axes("batch"))
    return constrain(x, None if x.shape[0] % shards else "batch", *axes)


class VisionAttention(nnx.Module):
    def __init__(self, c: ModelConfig, v: VisionConfig, rngs):
        self.heads = v.num_heads
        self.qkv = Linear(c, "visual.qkv", v.hidden_size, 3 * v.hidden_size, rngs, bias=True)
        self.proj = Linear(c, "visual.proj", v.hidden_size, v.hidden_size, rngs, bias=True)

    def __call__(self, x, rope, layout: Layout, full: bool):
        """Maps x [M, N, D], sorted by window, to the same. full: attend to the whole picture."""
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = (constrain_rows(qkv[:, :, i], None, "heads", None) for i in range(3))
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        if full:
            y = attend_within(layout.picture_runs, *(a[:, layout.back] for a in (q, k, v)))[:, layout.windows]
        else:
            y = attend_within(layout.window_runs, q, k, v)
        return self.proj(y.reshape(x.shape))


class VisionBlock(nnx.Module):
    def __init__(self, c: ModelConfig, v: VisionConfig, rngs):
        self.norm1, self.norm2 = RMSNorm(v.hidden_size, EPS), RMSNorm(v.hidden_size, EPS)
        self.attn = VisionAttention(c, v, rngs)
        self.mlp = MLP(c, v.hidden_size, v.intermediate_size, rngs, bias=True, prefix="visual.")

    def __call__(self, x, rope, layout: Layout, full: bool):
        x = constrain_rows(x + self.attn(self.norm1(x), rope, layout, full), None, None)
        return constrain_rows(x + self.mlp(self.norm2(x)), None, None)


class VisionTower(nnx.Module):
    """`blocks` holds all blocks, stacked for `lax.scan`."""

    def __init__(self, c: ModelConfig, v: VisionConfig, rngs: nnx.Rngs):
        self.v = v
        shape = (v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
        kernel = nnx.initializers.normal(c.initializer_range)(rngs.params(), shape)
        self.patch_embed = nnx.Dict(proj=nnx.Dict(weight=nnx.Param(kernel)))
        make = nnx.vmap(lambda rngs: VisionBlock(c, v, rngs), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=v.depth)(make)(rngs)
        merged = v.hidden_size * v.spatial_merge_size**2
        mlp = {
            "0": Linear(c, "visual.mlp.0", merged, merged, rngs, bias=True),
            "2": Linear(c, "visual.mlp.2", merged, v.out_hidden_size, rngs, bias=True),
        }
        self.merger = nnx.Dict(ln_q=RMSNorm(v.hidden_size, EPS), mlp=nnx.Dict(mlp))

    def _rope(self, positions: np.ndarray):
        """Computes cosines and sines, f32[1, N, 1, E / 2]: half of the frequencies turn with the row, half with the column."""
        quarter = self.v.hidden_size // self.v.num_heads // 4
        frequency = ROPE_THETA ** (-np.arange(quarter) / quarter)
        angle = (positions[:, :, None] * frequency).reshape(1, len(positions), 1, -1).astype(np.float32)
        return jnp.cos(angle), jnp.sin(angle)

    def __call__(self, patches, grids: Grids, remat="none"):
        """Computes the features of pictures.

        Args:
          patches: f32[M, N, C x T x P x P], the pictures of each row one after the other.
          grids: time, rows and columns of each picture of a row, in patches; static. Their products add up to N.
          remat: the parts of each block that the backward pass recomputes, as in `Qwen2.hidden`.

        Returns: [M, N / spatial_merge_size^2, D] in the weights' type, in the order of the pictures, by row and column.
        """
        layout = layout_of(grids, self.v)
        if patches.shape[1] != len(layout.windows):
            raise ValueError(f"{patches.shape[1]} patches: the grids {grids} have {len(layout.windows)}")
        kernel, rope = self.patch_embed.proj.weight[...], self._rope(layout.positions)
        x = product_transposed(patches.astype(kernel.dtype), kernel.reshape(kernel.shape[0], -1))
        x = constrain_rows(x[:, layout.windows], None, None)
        graphdef, weights = nnx.split(self.blocks)
        for full, run in itertools.groupby(range(self.v.depth), self.v.fullatt_block_indexes.__contains__):
            indexes = list(run)

            def body(x, layer, full=full):
                return nnx.merge(graphdef, layer)(x, rope, layout, full), None

            body = body if remat == "none" else jax.checkpoint(body, policy=REMAT[remat])
            x, _ = jax.lax.scan(body, x, jax.tree.map(lambda a, i=indexes: a[i[0] : i[-1] + 1], weights))
        merger: Any = self.merger
        x = merger.ln_q(x).reshape(x.shape[0], len(layout.merged_back), -1)
        x = merger.mlp["2"](jax.nn.gelu(merger.mlp["0"](x), approximate=False))
        return x[:, layout.merged_back]
