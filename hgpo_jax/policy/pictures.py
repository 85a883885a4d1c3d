"""Pictures in prompts: from pixels to the patches that the vision tower reads, and from its features to the slots of prompts.

    patches, grids = prepare([rgb, other], config.vision)    # on the host, any sides; resized as transformers' processor does
    patches = to_patches(pixels, config.vision)              # inside a program, sides that need no resize

A prompt holds one image token per feature of its pictures (`insert_tokens`), between vision_start and vision_end. `Pictures`
says which features they are; each of their slots has three rotary positions, time, row and column.

Source: the definitions of transformers' Qwen2-VL image processor and Qwen2.5-VL (get_rope_index), checked against them in
tests/policy/test_pictures.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.policy.huggingface_vision import IMAGE_MEAN, IMAGE_STD
from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.policy.vision import Grids

Array = jax.Array | np.ndarray
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # before, for each feature of and after a picture
MAX_RATIO = 200  # of a picture's sides
MAX_PIXELS = 2**26  # of a picture as it comes


class Pictures(struct.PyTreeNode):
    """The pictures of a batch of prompts, at most K in each. Several prompts may share features."""

    features: Array  # [n, D], all pictures one after the other
    first: Array  # i32[B, K], the first feature of each picture, in the order of the prompt
    sizes: Array  # i32[B, K, 3], its time, rows and columns in features; zeros if a prompt has fewer pictures

    @property
    def ends(self) -> jax.Array:
        """The image tokens of a prompt up to the end of each picture, i32[B, K]."""
        return jnp.cumsum(self.sizes.prod(-1), -1)

    @property
    def spans(self) -> jax.Array:
        """The rotary positions that each picture takes: as many as its longer side, i32[B, K]."""
        return self.sizes[..., 1:].max(-1)

    def offset(self) -> jax.Array:
        """Returns what to add to the slot of a token after all pictures for its rotary position, i32[B]."""
        return self.spans.sum(-1) - self.ends[:, -1]

    def read(self, tokens, embeddings, image_token_id: int):
        """Puts features in the place of image tokens: (embeddings [B, S, D], rotary positions i32[B, S, 3]).

        The first image tokens of a row are those of its pictures; later ones, which a policy may write, are like any other.

        Args:
          tokens: i32[B, S]. embeddings: [B, S, D], theirs.
        """
        before = jnp.cumsum(tokens == image_token_id, -1) - (tokens == image_token_id)  # image tokens before each slot
        passed = before[..., None] >= self.ends[:, None]  # [B, S, K], the pictures before it
        inside = (tokens == image_token_id) & (before < self.ends[:, -1:])
        picture = jnp.minimum(passed.sum(-1), self.first.shape[1] - 1)
        size = jnp.take_along_axis(self.sizes, picture[..., None], 1)
        at = before - jnp.take_along_axis(self.ends - self.sizes.prod(-1), picture, 1)
        feature = jnp.where(inside, jnp.take_along_axis(self.first, picture, 1) + at, 0)
        rows, columns = jnp.maximum(size[..., 1], 1), jnp.maximum(size[..., 2], 1)
        inner = jnp.stack([at // (rows * columns), at // columns % rows, at % columns], -1)
        text = jnp.arange(tokens.shape[1]) - jnp.minimum(before, self.ends[:, -1:])
        begin = text + (passed * self.spans[:, None]).sum(-1)
        positions = begin[..., None] + jnp.where(inside[..., None], inner, 0)
        features = self.features.astype(embeddings.dtype)[feature]
        return jnp.where(inside[..., None], features, embeddings), positions


@dataclasses.dataclass(frozen=True)
class PromptPictures:
    """The pictures of one prompt, in its order, on the host.

    grids: the time, rows and columns of each, in patches. patches: f32[N, C x T x P x P] of each. digests: what distinguishes
    each from others.
    """

    v: VisionConfig
    grids: Grids
    patches: tuple[np.ndarray, ...]
    digests: tuple[bytes, ...]

    @staticmethod
    def of(pictures: Iterable[np.ndarray], v: VisionConfig) -> PromptPictures:
        """Prepares pictures as `prepare` does, one after the other."""
        each = [prepare([picture], v) for picture in pictures]
        shown = [(grids[0], patches, hashlib.sha256(patches.tobytes()).digest()) for patches, grids in each]
        grids, patches, digests = zip(*shown, strict=True) if shown else ((), (), ())
        return PromptPictures(v, grids, patches, digests)

    @property
    def sizes(self) -> np.ndarray:
        """The time, rows and columns of each in features, i32[K, 3]."""
        grids = np.array(self.grids, np.int32).reshape(-1, 3)
        return grids // np.array([1, self.v.spatial_merge_size, self.v.spatial_merge_size], np.int32)

    @property
    def offset(self) -> int:
        """What to add to the slot of a token after all pictures for its rotary position, as in `Pictures.offset`."""
        return int((self.sizes[:, 1:].max(-1, initial=0) - self.sizes.prod(-1)).sum())

    def mark(self, ids: Sequence[int]) -> list[int]:
        """Puts negative numbers that distinguish pictures in the place of their image tokens.

        Two prompts with equal marked ids hold the same pictures, and so do equal beginnings of prompts.
        """
        marks: list[int] = []
        for digest, size in zip(self.digests, self.sizes, strict=True):
            random = np.random.default_rng(np.frombuffer(digest, np.uint32))
            marks += random.integers(-(2**31), 0, size.prod(), np.int32).tolist()
        image, left = self.v.image_token_id, iter(marks)
        return [next(left, token) if token == image else token for token in ids]

    def unmark(self, ids: np.ndarray) -> np.ndarray:
        """Undoes `mark`."""
        return np.where(ids < 0, self.v.image_token_id, ids)


def place(features, grids: Grids, rows: Sequence[Sequence[int]], v: VisionConfig) -> Pictures:
    """Says which pictures each prompt of a batch holds.

    Args:
      features: [n, D], of pictures of these grids, one after the other.
      rows: the numbers of each prompt's pictures, in the prompt's order.
    """
    merged = np.array([(t, h // v.spatial_merge_size, w // v.spatial_merge_size) for t, h, w in grids], np.int32)
    begins = np.cumsum([0, *merged.prod(-1)])[:-1]
    most = max(1, *map(len, rows))
    first, sizes = np.zeros((len(rows), most), np.int32), np.zeros((len(rows), most, 3), np.int32)
    for b, numbers in enumerate(rows):
        for k, number in enumerate(numbers):
            first[b, k], sizes[b, k] = begins[number], merged[number]
    return Pictures(features, jnp.asarray(first), jnp.asarray(sizes))


def see(model: Any, pixels: jax.Array, remat: str = "none") -> Pictures:
    """Computes the features of one picture for each of M prompts, inside a program.

    Args:
      model: a bound `Qwen2` with vision.
      pixels: uint8 [M, H, W, 3], whose sides need no resize (`to_patches`).
      remat: as in `VisionTower`.
    """
    v: VisionConfig = model.c.vision
    time, rows, columns = grid_of(pixels.shape[1], pixels.shape[2], v)
    features = model.visual(to_patches(pixels, v), ((time, rows, columns),), remat)
    if model.c.vision_frozen:
        features = jax.lax.stop_gradient(features)
    M, n, D = features.shape
    size = jnp.array([time, rows // v.spatial_merge_size, columns // v.spatial_merge_size], jnp.int32)
    first = n * jnp.arange(M, dtype=jnp.int32)[:, None]
    return Pictures(features.reshape(M * n, D), first, jnp.broadcast_to(size, (M, 1, 3)))


def insert_tokens(ids: Sequence[int], grids: Grids, v: VisionConfig) -> list[int]:
    """Repeats each image token of a prompt, one per picture, as often as its picture has features.

    Raises ValueError if the prompt has another number of image tokens than pictures.
    """
    counts = iter([math.prod(grid) // v.spatial_merge_size**2 for grid in grids])
    images = sum(token == v.image_token_id for token in ids)
    if images != len(grids):
        raise ValueError(f"prompt with {images} image tokens, id {v.image_token_id}, for {len(grids)} pictures")
    return [token for token in ids for _ in range(next(counts) if token == v.image_token_id else 1)]


def picture_tokens(features: int, v: VisionConfig) -> list[int]:
    """Returns the tokens of one picture in a prompt, as Qwen2.5-VL's chat template and processor write it: one for each of its
    features, between vision_start and vision_end.
    """
    return [v.vision_start_token_id, *[v.image_token_id] * features, v.vision_end_token_id]


def resized(height: int, width: int, v: VisionConfig) -> tuple[int, int]:
    """Returns the sides to which the processor resizes a picture: multiples of a merged patch, with an area in bounds."""
    unit = v.patch_size * v.spatial_merge_size
    sides = round(height / unit) * unit, round(width / unit) * unit
    if sides[0] * sides[1] > v.max_pixels:
        shrink = math.sqrt(height * width / v.max_pixels)
        return (
            max(unit, math.floor(height / shrink / unit) * unit),
            max(unit, math.floor(width / shrink / unit) * unit),
        )
    if sides[0] * sides[1] < v.min_pixels:
        grow = math.sqrt(v.min_pixels / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return sides


def grid_of(height: int, width: int, v: VisionConfig) -> tuple[int, int, int]:
    """Returns the time, rows and columns of a picture in patches, after the resize."""
    return 1, *(side // v.patch_size for side in resized(height, width, v))  # type: ignore[return-value]


def check(picture: Any, name: str) -> None:
    """Raises ValueError, one line, unless a picture is uint8 [H, W, 3] of reasonable sides."""
    if not isinstance(picture, np.ndarray):
        raise ValueError(f"{name}: is a {type(picture).__name__}; give a numpy array, uint8 [height, width, 3]")
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueError(f"{name}: has dtype {picture.dtype} and shape {list(picture.shape)}; give uint8 [height, width, 3]")
    height, width = picture.shape[:2]
    if not height or not width:
        raise ValueError(f"{name}: is {height} x {width} pixels; give sides of at least 1")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"{name}: is {height} x {width} pixels; one side may be at most {MAX_RATIO} times the other")
    if height * width > MAX_PIXELS:
        raise ValueError(f"{name}: has {height * width:,} pixels; give at most {MAX_PIXELS:,}")


def prepare(pictures: Sequence[np.ndarray], v: VisionConfig) -> tuple[np.ndarray, Grids]:
    """Resizes pictures, uint8 [H, W, 3] each, on the host: (patches f32[N, C x T x P x P], grids).

    Raises:
      ValueError: one line that names the picture at fault.
    """
    from PIL import Image  # here: only pictures need it

    for index, picture in enumerate(pictures):
        check(picture, f"picture {index}")
    patches = [np.zeros((0, v.patch_length), np.float32)]
    for picture in pictures:
        height, width = resized(picture.shape[0], picture.shape[1], v)
        if (height, width) != picture.shape[:2]:
            picture = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
        patches.append(_patches(picture, v))
    return np.concatenate(patches), tuple(grid_of(picture.shape[0], picture.shape[1], v) for picture in pictures)


def to_patches(pixels, v: VisionConfig):
    """Lays out pictures uint8 [..., H, W, 3] whose sides need no resize, inside a program: f32[..., N, C x T x P x P].

    Raises ValueError if the processor would resize them.
    """
    height, width = pixels.shape[-3:-1]
    if resized(height, width, v) != (height, width):
        sides = " x ".join(map(str, resized(height, width, v)))
        raise ValueError(f"picture of {height} x {width} pixels: its sides need a resize; the nearest that do not are {sides}")
    return _patches(pixels, v)


def _patches(pixels, v: VisionConfig):
    """Normalizes and lays out pixels of numpy or jax; a moment of a picture is there temporal_patch_size times."""
    xp: Any = jnp if isinstance(pixels, jax.Array) else np
    *leading, height, width, _ = pixels.shape
    merge, side, n = v.spatial_merge_size, v.patch_size, len(leading)
    mean, std = (np.array(numbers, np.float32) for numbers in (IMAGE_MEAN, IMAGE_STD))
    x = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
    x = x.reshape(*leading, height // (merge * side), merge, side, width // (merge * side), merge, side, 3)
    x = x.transpose(*range(n), *(n + axis for axis in (0, 3, 1, 4, 6, 2, 5)))[..., None, :, :]
    x = xp.broadcast_to(x, (*x.shape[:-3], v.temporal_patch_size, side, side))
    return x.reshape(*leading, -1, v.patch_length)
