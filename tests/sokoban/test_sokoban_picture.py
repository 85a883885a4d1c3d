"""Sokoban's pictures, pixel by pixel against the rules of drawing told again in plain Python."""

import jax
import numpy as np
import pytest
from plain_sokoban import PlainSokoban

from hgpo_jax.envs.sokoban import Sokoban, SokobanPixels
from hgpo_jax.envs.sokoban.env import State
from hgpo_jax.envs.sokoban.picture import tiles
from tests.helpers.refusals import refused

KINDS = ("floor", "wall", "target", "box", "box on target", "agent", "agent on target")


def color(kind, i, j):
    """The color of point (i, j) of 16 x 16."""
    down, right = abs(i - 7.5), abs(j - 7.5)
    if kind == "wall":
        course = i // 4
        joint = 7 if course % 2 == 0 else 3
        return (92, 82, 84) if i % 4 == 3 or j % 8 == joint else (158, 74, 60)
    if kind.startswith("box") and down <= 6.5 and right <= 6.5:
        frame = down >= 5.5 or right >= 5.5 or (down in (right, right - 0.5, right + 0.5) and down >= 1.5)
        wood, pine = ((186, 128, 66), (112, 70, 32)), ((104, 168, 84), (44, 98, 50))
        return (wood if kind == "box" else pine)[frame]
    if kind.startswith("agent"):
        if i == 3 and j in (6, 9):
            return 34, 30, 40
        if (i - 3.5) ** 2 + (j - 7.5) ** 2 <= 6.5:
            return 240, 196, 160
        if 6 <= i <= 14 and 2 * right <= i - 1:
            return (52, 96, 196) if kind == "agent" else (142, 62, 172)
    if kind.endswith("target") and (down + right <= 2 or 5 <= down + right <= 7):
        return 214, 48, 62
    return (203, 186, 150) if (i * 5 + j * 3) % 23 == 0 else (226, 211, 178)


def content(room, cell):
    """What stands in a cell of a plain room."""
    if cell not in room.floor:
        return "wall"
    thing = "agent" if cell == room.agent else "box" if cell in room.boxes else ""
    place = "target" if cell in room.targets else ""
    return " on ".join(filter(None, (thing, place))) or "floor"


def drawn(room, size, tile):
    picture = np.zeros((size * tile, size * tile, 3), np.uint8)
    for y in range(size * tile):
        for x in range(size * tile):
            i, j = (int(16 * (offset % tile + 0.5) / tile) for offset in (y, x))
            picture[y, x] = color(content(room, (y // tile, x // tile)), i, j)
    return picture


@pytest.fixture(scope="module")
def rooms():
    """(environment, four states): walls and two targets anywhere; the agent, a box, both or none of them on a target."""
    size, rng, states = 7, np.random.default_rng(0), []
    for agent_at, box_at in ((2, (3, 4)), (0, (3, 4)), (2, (0, 3)), (1, (0, 3))):
        inner = rng.permutation([row * size + column for row in range(1, size - 1) for column in range(1, size - 1)])
        cells, free = inner[:5], inner[5:15]  # two targets, then places beside them
        flags = lambda indexes: np.isin(np.arange(size**2), indexes)  # noqa: E731
        states.append(State(
            walls=~flags(np.append(cells, free)), targets=flags(cells[:2]), boxes=flags(cells[list(box_at)]),
            agent=np.int32(cells[agent_at]), task=np.int32(0), turn=np.int32(0),
        ))  # fmt: skip
    return Sokoban(size, 2), jax.tree.map(lambda *arrays: np.stack(arrays), *states)


@pytest.mark.parametrize("tile", [1, 4, 7, 16, 18])
def test_every_pixel_is_what_the_plain_rules_say(rooms, tile):
    env, states = rooms
    pictures = jax.device_get(jax.jit(jax.vmap(lambda state: env.render(state, tile)))(states))
    assert pictures.shape == (4, 7 * tile, 7 * tile, 3) and pictures.dtype == np.uint8
    seen = set()
    for index in range(4):
        state = jax.tree.map(lambda a, i=index: a[i], states)
        room = PlainSokoban.read(7, state)
        np.testing.assert_array_equal(pictures[index], drawn(room, 7, tile))
        seen |= {content(room, (row, column)) for row in range(7) for column in range(7)}
    assert seen == set(KINDS)


@pytest.mark.parametrize("tile", [1, 6])
def test_an_observation_is_enough_for_the_picture(rooms, tile):
    """Inside the compiled rollout, where a policy sees."""
    _, states = rooms
    env = SokobanPixels(7, 2, tile=tile)
    observations = jax.vmap(env._observe)(states)
    pictures = jax.jit(jax.vmap(env.picture))(observations)
    assert pictures.shape[1:] == (*env.picture_size, 3) and len(np.unique(pictures, axis=0)) == 4
    np.testing.assert_array_equal(pictures, jax.vmap(lambda state: env.render(state, tile))(states))
    assert [env.words[index] for index in env.picture_words] == ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


def test_a_pixel_is_enough_to_tell_what_stands_in_a_cell():
    assert len({tuple(tile) for tile in tiles(1).reshape(7, 3).tolist()}) == 7


@pytest.mark.parametrize("tile", [0, -3, 2.0, True, "8"])
def test_other_sides_are_refused(rooms, tile):
    env, states = rooms
    with refused(f"tile={tile!r}: must be a positive whole number of pixels"):
        env.render(jax.tree.map(lambda a: a[0], states), tile)
    with refused(f"tile={tile!r}: must be a whole number between 1 and 64"):
        SokobanPixels(tile=tile)
