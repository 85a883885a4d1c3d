"""Pictures before and in prompts: the patches of transformers' processor, on the host and on the device, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.policy import Policy, initialize
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.model_config import ModelConfig, VisionConfig
from hgpo_jax.policy.pictures import grid_of, insert_tokens, place, prepare, resized, to_patches
from tests.helpers.refusals import refused

SIZES = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=4, out_hidden_size=32, fullatt_block_indexes=(0,))
REAL = VisionConfig(**SIZES, mrope_section=(1, 1, 2))  # the published model's patches
SMALL = VisionConfig(
    **SIZES, mrope_section=(1, 1, 2), patch_size=4, spatial_merge_size=3, window_size=24, min_pixels=12 * 12,
    max_pixels=100 * 100, image_token_id=60,
)  # fmt: skip
# Sides that need no resize, that are enlarged, that are reduced, thin ones, and halves of a unit, rounded to even.
SIDES = [(56, 84), (3, 5), (1, 200), (1200, 30), (1400, 1100), (70, 98), (42, 41), (200, 1)]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def picture(height, width, seed=0):
    """Noise on a gradient, so that a resize has both to smooth and to keep."""
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    slope = np.linspace(0, 130, width)[None, :, None] + np.linspace(0, 5, height)[:, None, None]
    return (noise + slope).astype(np.uint8)


def processor(v):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        min_pixels=v.min_pixels, max_pixels=v.max_pixels, patch_size=v.patch_size, merge_size=v.spatial_merge_size,
        temporal_patch_size=v.temporal_patch_size,
    )  # fmt: skip


@pytest.mark.needs("torch")
@pytest.mark.parametrize("v", [REAL, SMALL], ids=["real", "small"])
def test_patches_equal_those_of_transformers(v):
    pictures = [picture(*sides, seed) for seed, sides in enumerate(SIDES)]
    theirs = processor(v)(images=pictures, return_tensors="np", input_data_format="channels_last")
    patches, grids = prepare(pictures, v)
    assert patches.dtype == np.float32 and [*map(list, grids)] == theirs["image_grid_thw"].tolist()
    np.testing.assert_allclose(patches, theirs["pixel_values"], atol=1e-5)


@pytest.mark.needs("torch")
def test_sides_equal_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for height, width in rng.integers(1, 3000, (2000, 2)).tolist():
        if max(height, width) <= 200 * min(height, width):
            for v in (REAL, SMALL):
                unit = v.patch_size * v.spatial_merge_size
                assert resized(height, width, v) == smart_resize(height, width, unit, v.min_pixels, v.max_pixels)


def patches_by_hand(pixels, v):
    """One number after the other."""
    height, width, _ = pixels.shape
    unit, out = v.patch_size * v.spatial_merge_size, []
    for top in range(0, height, unit):
        for left in range(0, width, unit):
            for y in range(top, top + unit, v.patch_size):
                for x in range(left, left + unit, v.patch_size):
                    part = pixels[y : y + v.patch_size, x : x + v.patch_size]
                    channels = [(part[:, :, c] / 255 - MEAN[c]) / STD[c] for c in range(3)]
                    out.append(np.concatenate([np.tile(c.ravel(), v.temporal_patch_size) for c in channels]))
    return np.array(out)


def test_patches_inside_a_program_equal_those_of_the_host():
    pixels = np.stack([picture(36, 24, seed) for seed in range(6)]).reshape(2, 3, 36, 24, 3)
    patches = jax.jit(to_patches, static_argnums=1)(jnp.asarray(pixels), SMALL)
    assert patches.shape == (2, 3, 54, SMALL.patch_length) and patches.dtype == jnp.float32
    for row in range(2):
        for column in range(3):
            np.testing.assert_allclose(patches[row, column], patches_by_hand(pixels[row, column], SMALL), atol=1e-5)
            on_host, grids = prepare([pixels[row, column]], SMALL)
            np.testing.assert_allclose(patches[row, column], on_host, atol=1e-5)
            assert grids == (grid_of(36, 24, SMALL),) == ((1, 9, 6),)


@pytest.mark.parametrize(("bad", "said"), [
    (picture(20, 20).astype(np.float32), "picture 1: has dtype float32 and shape [20, 20, 3]; give uint8"),
    (picture(20, 20)[..., :2], "picture 1: has dtype uint8 and shape [20, 20, 2]; give uint8 [height, width, 3]"),
    (picture(20, 20)[0], "picture 1: has dtype uint8 and shape [20, 3]"),
    (picture(20, 20)[:0], "picture 1: is 0 x 20 pixels; give sides of at least 1"),
    (picture(1, 201), "picture 1: is 1 x 201 pixels; one side may be at most 200 times the other"),
    (np.broadcast_to(np.uint8(0), (10_000, 10_000, 3)), "picture 1: has 100,000,000 pixels; give at most 67,108,864"),
    ([[1]], "picture 1: is a list; give a numpy array"),
])  # fmt: skip
def test_bad_pictures_are_refused(bad, said):
    with refused(said):
        prepare([picture(20, 20), bad], SMALL)


def test_sides_that_need_a_resize_are_refused_inside_a_program():
    with refused("picture of 30 x 24 pixels: its sides need a resize; the nearest that do not are 24 x 24"):
        to_patches(jnp.zeros((30, 24, 3), jnp.uint8), SMALL)
    with refused("the nearest that do not are 96 x 96"):  # in bounds
        to_patches(jnp.zeros((120, 120, 3), jnp.uint8), SMALL)


def positions_by_hand(row, sizes, image):
    """The definition, token by token: (positions, how far the next one is from the number of tokens)."""
    out, position, left = [], 0, list(sizes)
    index = 0
    while index < len(row):
        if row[index] == image and left:
            t, h, w = left.pop(0)
            out += [(position + a, position + b, position + c) for a in range(t) for b in range(h) for c in range(w)]
            index, position = index + t * h * w, position + max(h, w)
        else:
            out.append((position,) * 3)
            index, position = index + 1, position + 1
    return out, position - len(row)


def test_positions_and_features_are_those_of_the_definition():
    grids = ((1, 9, 3), (1, 3, 3), (2, 6, 12))  # 3, 1 and 16 features
    sizes, begins = [(1, 3, 1), (1, 1, 1), (2, 2, 4)], [0, 3, 4]
    rows = [[0, 2], [1], [], [2], [1, 0, 1]]
    counts, rng = [3, 1, 16], np.random.default_rng(0)
    ids, features = [], jnp.asarray(rng.standard_normal((20, 5)), jnp.float32)
    for row in rows:
        tokens = [7]
        for number in row:
            tokens += [8, *[60] * counts[number], *rng.integers(0, 50, 2).tolist()]
        ids.append((tokens + [9, 60] + [3] * 30)[:30])  # an image token of nothing, as a policy may write
    pictures = place(features, grids, rows, SMALL)
    embeddings = jnp.asarray(rng.standard_normal((5, 30, 5)), jnp.float32)
    read, positions = jax.jit(lambda p, ids: p.read(ids, embeddings, 60))(pictures, jnp.array(ids))
    for b, row in enumerate(rows):
        expected, offset = positions_by_hand(ids[b], [sizes[number] for number in row], 60)
        assert positions[b].tolist() == [list(position) for position in expected]
        assert pictures.offset()[b] == offset
        wanted = [begins[number] + i for number in row for i in range(counts[number])]
        slots = [s for s in range(30) if ids[b][s] == 60][: len(wanted)]
        by_hand = np.array(embeddings[b])
        by_hand[slots] = np.asarray(features)[wanted]
        np.testing.assert_array_equal(read[b], by_hand)


@pytest.mark.needs("torch")
def test_positions_equal_those_of_transformers():
    import make_reference
    import torch

    vision = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2, fullatt_block_indexes=[0])
    model = make_reference.random_vision_model(
        vision, [1, 1, 2], [60, 61, 62, 63], vocab_size=64, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=3, num_key_value_heads=1,
    )  # fmt: skip
    v = dataclasses.replace(REAL, image_token_id=60)
    rows = [[(1, 6, 4), (1, 2, 2)], [(1, 4, 10)], [(1, 2, 6), (1, 8, 2), (1, 2, 2)]]
    ids, _, grids = make_reference.prompts_with_pictures(model.config, rows, 40)
    theirs, offset = model.model.get_rope_index(
        torch.tensor(ids), torch.tensor(ids == 60).int(), image_grid_thw=torch.tensor(grids)
    )
    pictures = place(jnp.zeros((31, 2)), tuple(grids), [[0, 1], [2], [3, 4, 5]], v)
    _, positions = pictures.read(jnp.asarray(ids), jnp.zeros((*ids.shape, 2)), 60)
    np.testing.assert_array_equal(positions, theirs.permute(1, 2, 0))
    np.testing.assert_array_equal(pictures.offset(), offset[:, 0])


def test_image_tokens_are_as_many_as_features():
    ids = [1, 60, 2, 60, 3]
    assert insert_tokens(ids, ((1, 3, 6), (1, 6, 6)), SMALL) == [1, 60, 60, 2, 60, 60, 60, 60, 3]
    with refused("prompt with 2 image tokens, id 60, for 1 pictures"):
        insert_tokens(ids, ((1, 3, 6),), SMALL)


def test_a_policy_sees_pictures():
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        model_type="qwen2_5_vl", vision=SMALL, initializer_range=0.2,
    )  # fmt: skip
    policy = Policy(config, initialize(config, 0, make_mesh("data=1", jax.devices()[:1])), None)
    one, other, third = picture(24, 12), picture(30, 40, 1), picture(24, 12, 2)
    pictures, grids = policy.see([[one], [other, one], [one], [third]])
    assert grids == [((1, 6, 3),), ((1, 6, 9), (1, 6, 3)), ((1, 6, 3),), ((1, 6, 3),)]
    assert pictures.features.shape == (2 + 6 + 2, 32)  # each picture once
    prompts = [insert_tokens([1, *[60] * len(row), 2], row, SMALL) for row in grids]
    assert [*map(len, prompts)] == [4, 10, 4, 4]
    ids = np.array([row + [0] * (10 - len(row)) for row in prompts])
    logits = policy.logits(ids, [4, 10, 4, 4], pictures)
    np.testing.assert_allclose(logits[0, :4], logits[2, :4], atol=1e-5)
    changed = np.abs(logits[3, :4] - logits[0, :4]).max(-1)
    assert changed[0] < 1e-5 < 1e-3 < changed[1:].min()  # from the first feature on
    with refused("the prompts hold no pictures"):
        policy.see([[], []])
    plain = dataclasses.replace(config, model_type="qwen2", vision=None)
    with refused("a qwen2 sees no pictures; choose a qwen2_5_vl"):
        Policy(plain, {}, None).see([[one]])
