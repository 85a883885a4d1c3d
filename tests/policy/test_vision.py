"""Qwen2.5-VL: features, logits and gradients equal to transformers' PyTorch, on every mesh, and decoding after pictures."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.envs.sokoban import Sokoban
from hgpo_jax.envs.sokoban.env import State
from hgpo_jax.policy import ModelConfig, Policy, initialize, load_policy, network, safetensors_files, shardings, weight_names
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.policy.pictures import Pictures, grid_of, place, to_patches
from hgpo_jax.policy.vision import layout_of
from tests.helpers.refusals import refused

DATA = Path(__file__).parent / "data"
TOKENS = [60, 61, 62, 63]  # image, film, begin and end of a picture
VARIANTS = {
    "windows of four patches, tied": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, mrope_section=[1, 1, 2],
        tie_word_embeddings=True,
        vision=dict(depth=4, hidden_size=32, intermediate_size=24, num_heads=4, fullatt_block_indexes=[1, 3], window_size=16,
                    patch_size=4),
    ),
    "windows of six patches, three patches merged, untied, one layer": dict(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1, mrope_section=[2, 3, 3],
        vision=dict(depth=2, hidden_size=24, intermediate_size=28, num_heads=3, fullatt_block_indexes=[0], window_size=18,
                    patch_size=3, spatial_merge_size=3, temporal_patch_size=1),
    ),
}  # fmt: skip
TINY = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.2, model_type="qwen2_5_vl",
    vision=VisionConfig(
        depth=3, hidden_size=16, intermediate_size=24, num_heads=4, out_hidden_size=32, fullatt_block_indexes=(1,),
        mrope_section=(1, 1, 2), window_size=8, patch_size=2, image_token_id=60,
    ),
)  # fmt: skip
GRIDS = ((1, 6, 4), (1, 2, 2), (1, 4, 8))  # 6, 1 and 8 features
ROWS = [[0, 1], [2], []]
# Two pictures, one picture, and none but two image tokens that the policy itself wrote.
IDS = np.array([
    [1, 2, *[60] * 6, 3, 60, 4, 5, 6, 7, 8],
    [9, *[60] * 8, 9, 8, 7, 6, 5, 4],
    [1, 2, 60, 3, 4, 5, 6, 60, 7, 8, 9, 1, 2, 3, 4],
])  # fmt: skip


def compute(policy, ids, patches, grids, rows):
    """(logits, gradient by Hugging Face name, features), with the mean cross-entropy of the next tokens as the loss."""
    ids, v = jnp.asarray(ids), policy.config.vision
    every = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

    def loss(params):
        model = nnx.merge(policy.graphdef, params)
        features = model.visual(jnp.asarray(patches)[None], grids)[0]
        logits = model.logits(model.hidden(ids, every, pictures=place(features, grids, rows, v)))
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logp, ids[:, 1:, None], -1).mean(), (logits, features)

    (_, (logits, features)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy.params)
    gather = safetensors_files.to_host(gradients)
    return logits, {t.name: gather(t) for t in weight_names.layout(gradients, policy.config.num_hidden_layers)}, features


def assert_same(policy, rows, ids, patches, grids, logits, gradients, features):
    """Logits and features within 1e-4, gradients within 1e-4 of each parameter's largest."""
    ours, ours_gradients, ours_features = compute(policy, ids, patches, tuple(map(tuple, grids)), rows)
    assert np.abs(features).max() > 1 and np.abs(logits).max() > 1
    np.testing.assert_allclose(ours_features, features, atol=1e-4)
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert ours_gradients.keys() == gradients.keys()
    for name, theirs in gradients.items():
        scale = np.abs(theirs).max()
        assert scale > 1e-5, name  # the comparison is about something
        np.testing.assert_allclose(ours_gradients[name], theirs, rtol=0, atol=1e-4 * scale, err_msg=name)


def test_equal_to_the_stored_ones_of_transformers():
    stored = dict(np.load(DATA / "qwen2_5_vl_tiny" / "expected.npz"))
    gradients = {key.removeprefix("gradient/"): value for key, value in stored.items() if key.startswith("gradient/")}
    inputs = (stored[name] for name in ("ids", "patches", "grids", "logits"))
    assert_same(load_policy(DATA / "qwen2_5_vl_tiny"), [[0], [1, 2]], *inputs, gradients, stored["features"])


@pytest.mark.needs("torch")
@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=VARIANTS)
def test_equal_to_transformers(sizes, tmp_path):
    import make_reference

    model = make_reference.random_vision_model(tokens=TOKENS, vocab_size=64, intermediate_size=40, **sizes)
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    m = policy.config.vision.spatial_merge_size
    rows = [[(1, 5 * m, 3 * m), (1, m, m)], [(1, 4 * m, 4 * m)], [(1, m, 7 * m), (1, 2 * m, m), (1, 2 * m, 2 * m)]]
    ids, patches, grids = make_reference.prompts_with_pictures(model.config, rows, 36)
    theirs = make_reference.compute_with_pictures(model, ids, patches, grids)
    assert_same(policy, [[0, 1], [2], [3, 4, 5]], ids, patches, grids, *theirs)


@pytest.mark.needs("torch")
def test_moments_of_a_film_see_only_themselves_as_in_transformers(tmp_path):
    import make_reference
    import torch

    sizes = VARIANTS["windows of four patches, tied"]
    model = make_reference.random_vision_model(tokens=TOKENS, vocab_size=64, intermediate_size=40, **sizes)
    model.save_pretrained(tmp_path)
    policy, grids = load_policy(tmp_path), ((3, 4, 6), (1, 8, 2))
    patches = np.random.default_rng(0).standard_normal((88, policy.config.vision.patch_length)).astype(np.float32)
    ours = nnx.merge(policy.graphdef, policy.params).visual(jnp.asarray(patches)[None], grids)[0]
    with torch.no_grad():
        theirs = model.model.visual(torch.tensor(patches), torch.tensor(grids)).pooler_output
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.fixture(scope="module")
def params():
    return initialize(TINY, 0, make_mesh("data=1", jax.devices()[:1]))


@pytest.fixture(scope="module")
def patches():
    return jax.random.normal(jax.random.key(1), (1, 60, TINY.vision.patch_length))


@jax.jit
def read(params, patches, ids):
    """Hidden states at every slot."""
    model = nnx.merge(network(TINY), params)
    pictures = place(model.visual(patches, GRIDS)[0], GRIDS, ROWS, TINY.vision)
    return model.hidden(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), pictures=pictures)


@functools.partial(jax.jit, static_argnums=(2, 3))
def see(params, patches, grids, remat="none"):
    return nnx.merge(network(TINY), params).visual(patches, grids, remat)


def test_prompts_without_pictures_are_read_as_by_a_qwen2(params, patches):
    plain = dataclasses.replace(TINY, model_type="qwen2", vision=None)
    language = {name: value for name, value in params.items() if name != "visual"}
    expected = Policy(plain, language, None).logits(IDS, np.full(3, 15))
    np.testing.assert_array_equal(Policy(TINY, params, None).logits(IDS, np.full(3, 15)), expected)
    with_none = nnx.merge(network(TINY), params).logits(read(params, patches, IDS))
    np.testing.assert_allclose(with_none[2], expected[2], atol=1e-5)
    assert np.abs(with_none[:2] - expected[:2]).max() > 0.1


def test_decoding_after_pictures_equals_reading(params, patches):
    graphdef, rows, lengths = network(TINY), jnp.arange(3), jnp.array([12, 10, 4])
    prompts = jnp.where(jnp.arange(12) < lengths[:, None], IDS[:, :12], 0)

    @jax.jit
    def prefill(params):
        model = nnx.merge(graphdef, params)
        pictures = place(model.visual(patches, GRIDS)[0], GRIDS, ROWS, TINY.vision)
        return *model.prefill(prompts, lengths - 1, 15, pictures), pictures.offset()

    @jax.jit
    def decode(params, offset, *state):
        model = nnx.merge(graphdef, params)
        return model.decode(*state, model.decode_blocks(), offset=offset)

    hidden, cache, offset = prefill(params)
    assert offset.tolist() == [3 - 6 + 1 - 1, 4 - 8, 0]
    full = read(params, patches, IDS)
    np.testing.assert_allclose(hidden, full[rows, lengths - 1], atol=1e-5)
    for step in range(3):
        position = lengths + step
        hidden, cache = decode(params, offset, jnp.asarray(IDS)[rows, position], position, cache)
        np.testing.assert_allclose(hidden, full[rows, position], atol=1e-5)


def test_packed_prompts_with_pictures_are_read_as_alone(params, patches):
    packed = jnp.asarray(np.concatenate([IDS[0], IDS[1]])[None])

    @jax.jit
    def read_packed(params):
        model, start = nnx.merge(network(TINY), params), jnp.repeat(jnp.array([0, 15]), 15)[None]
        pictures = place(model.visual(patches, GRIDS)[0], GRIDS, [[0, 1, 2]], TINY.vision)
        return model.hidden(packed, jnp.arange(30)[None], segment_start=start, pictures=pictures)

    together = read_packed(params)
    np.testing.assert_allclose(together.reshape(2, 15, -1), read(params, patches, IDS)[:2], atol=1e-5)


def test_rows_of_pictures_are_seen_as_alone(params):
    """And a picture where it stands among others makes no difference."""
    patches = jax.random.normal(jax.random.key(2), (3, 60, TINY.vision.patch_length))
    together = see(params, patches, GRIDS)
    for row in range(3):
        np.testing.assert_allclose(see(params, patches[row, 28:][None], GRIDS[2:])[0], together[row, 7:], atol=1e-5)
        np.testing.assert_allclose(see(params, patches[row, :24][None], GRIDS[:1])[0], together[row, :6], atol=1e-5)


@pytest.mark.slow
def test_remat_of_the_tower_changes_nothing(params, patches):
    gradient = jax.jit(jax.grad(lambda params, remat: (see(params, patches, GRIDS, remat) ** 3).sum()), static_argnums=1)
    plain, *rematted = (gradient(params, remat) for remat in ("none", "dots", "full"))
    for other in rematted:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, other)


@pytest.mark.slow
def test_same_on_a_mesh(params, patches):
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    split = initialize(TINY, 0, mesh)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (split, params)))
    placed = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), split, shardings(TINY, mesh))
    assert all(jax.tree.leaves(placed))
    with jax.set_mesh(mesh):
        rows = [row for row in ROWS[:2] for _ in range(2)]
        ids = np.repeat(IDS[:2], 2, axis=0)
        logits = np.asarray(logits_of(split, jnp.repeat(patches, 4, 0), ids, rows))
        alone = np.asarray(logits_of(split, patches, ids, rows))  # one row, which no mesh divides
    np.testing.assert_allclose(alone, logits, atol=1e-4)
    np.testing.assert_allclose(logits[::2], logits_of(params, patches, IDS[:2], ROWS[:2]), atol=1e-4)


def logits_of(params, patches, ids, rows):
    pictures = place(see(params, patches, GRIDS)[0], GRIDS, rows, TINY.vision)
    return Policy(TINY, params, None).logits(ids, np.full(len(ids), ids.shape[1]), pictures)


def test_windows_are_those_of_the_picture():
    """By asking, for each pair of patches, whether their merged patches lie in one window of two by two."""
    v, grids = TINY.vision, ((1, 6, 10), (2, 4, 4))
    layout, place_of = layout_of(grids, v), []
    for picture, (t, h, w) in enumerate(grids):
        for moment in range(t):
            for top in range(0, h, 2):
                for left in range(0, w, 2):
                    place_of += [(picture, moment, top // 4, left // 4)] * 4
    sorted_places = [place_of[index] for index in layout.windows]
    begin, seen = 0, set()
    for count, length in layout.window_runs:
        for _ in range(count):
            (window,) = set(sorted_places[begin : begin + length])
            assert place_of.count(window) == length and window not in seen
            seen.add(window)
            begin += length
    assert begin == len(place_of) == 92 and layout.picture_runs == ((1, 60), (2, 16))


def test_grids_that_do_not_merge_are_refused(params, patches):
    with refused("grid (1, 3, 4): rows and columns must be positive multiples of 2"):
        see(params, patches, ((1, 3, 4),))
    with refused("60 patches: the grids ((1, 2, 2),) have 4"):
        see(params, patches, ((1, 2, 2),))


@pytest.mark.slow
def test_one_program_goes_from_a_state_to_a_token_of_the_answer(params):
    """Drawn, cut into patches, seen, read and answered without the host; the same by the host's way."""
    v, env = dataclasses.replace(TINY.vision, min_pixels=64), Sokoban(6, 1)
    cells = np.random.default_rng(0).permutation([row * 6 + column for row in range(1, 5) for column in range(1, 5)])
    flag = lambda index: jnp.arange(36) == index  # noqa: E731
    states = [
        State(flag(0), flag(cells[0]), flag(cells[1]), jnp.int32(cells[agent]), jnp.int32(0), jnp.int32(0)) for agent in (2, 3)
    ]
    prompts = jnp.array([[1, *[60] * 9, 2], [3, *[60] * 9, 4]])
    grid = grid_of(12, 12, v)

    @jax.jit
    def answer(params, states):
        model = nnx.merge(network(TINY), params)
        patches = to_patches(jax.vmap(lambda state: env.render(state, 2))(states), v)
        features = model.visual(patches, (grid,)).reshape(-1, TINY.hidden_size)
        pictures = Pictures(features, jnp.array([[0], [9]]), jnp.full((2, 1, 3), jnp.array([1, 3, 3])))
        hidden, cache = model.prefill(prompts, jnp.array([10, 10]), 12, pictures)
        token = model.logits(hidden).argmax(-1)
        hidden, _ = model.decode(token, jnp.array([11, 11]), cache, model.decode_blocks(), offset=pictures.offset())
        return token, model.logits(hidden)

    token, logits = answer(params, jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))
    policy = Policy(dataclasses.replace(TINY, vision=v), params, None)
    pictures, grids = policy.see([[np.asarray(env.render(state, 2))] for state in states])
    assert grids == [(grid,), (grid,)]
    ids = np.concatenate([prompts, token[:, None]], axis=1)
    np.testing.assert_allclose(policy.logits(ids, [12, 12], pictures)[:, -1], logits, atol=1e-4)
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
