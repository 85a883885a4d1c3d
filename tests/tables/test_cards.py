"""GPUs for cells that run at once: no two share one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.cards import VISIBLE, Cards, there
from hgpo_jax.utils.errors import ConfigError


@pytest.mark.parametrize(("environment", "names"), [
    ({}, ["0", "1", "2"]), ({VISIBLE: "3,GPU-5"}, ["3", "GPU-5"]), ({VISIBLE: ""}, []), ({VISIBLE: "1,-1,0"}, ["1"]),
    ({"JAX_PLATFORMS": "cpu"}, []), ({"JAX_PLATFORMS": "cuda,cpu"}, ["0", "1", "2"]),
])  # fmt: skip
def test_what_a_process_would_see(environment, names, tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert there(environment, tmp_path) == names


def test_cells_wait_until_enough_are_free():
    cards, held, most, lock = Cards(list("abcd"), 4), [], [], threading.Lock()

    def cell(count):
        with cards.dealt(count) as variables:
            mine = variables[VISIBLE].split(",")
            with lock:
                held.extend(mine)
                most.append(len(held))
                assert len(set(held)) == len(held) <= 4 and len(mine) == count
            threading.Event().wait(0.01)
            with lock:
                for name in mine:
                    held.remove(name)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(cell, [1, 3, 2, 4, 1, 2, 2, 3, 1]))
    assert max(most) > 2
    with cards.dealt(0) as variables:
        assert variables == {}


def test_who_needs_more_than_there_are_is_refused():
    plan = planning.read(planning.find("paper"))
    cell = next(cell for cell in planning.cells(plan) if cell.setting == "alfworld_7b")
    count = Cards(list("abcdefgh"), 2).needed(plan, cell, ())
    assert count > 1 and Cards([], 2).needed(plan, cell, ()) == Cards(["a"], 1).needed(plan, cell, ()) == 0
    with pytest.raises(ConfigError, match=f"^--jobs 2: {cell.name} takes {count} GPUs, and there are 1; leave --jobs out"):
        Cards(["a"], 2).needed(plan, cell, ())
    with pytest.raises(ConfigError, match=rf"^--jobs 2: {cell.name}: mesh='auto': give all sizes"):
        Cards(["a"], 2).needed(plan, cell, ("mesh=auto",))
