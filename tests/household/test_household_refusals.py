"""What `Household(...)` refuses, each time in one line that names the field, the value and the fix."""

import numpy as np
import pytest

from hgpo_jax.envs.household import Household, world

NOT_NUMBERS = ["6", 6.5, 7.0, None, float("nan"), True, [6]]
NOT_NAMES = [None, "place", "kitchen", 5, {}, (), [], ("fly",), ("place", 3), (["place"],), np.array(["place", "two"])]


def refusal(**arguments) -> str:
    with pytest.raises(ValueError) as caught:
        Household(**arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("field", "low", "high"), [("places", 6, 12), ("things", 2, 8), ("max_turns", 1, 1000)])
def test_numbers(field, low, high):
    for value in (low - 1, high + 1, -1, *NOT_NUMBERS):
        if value is True and low == 1:
            assert isinstance(value, int)  # True is in range as a number, and still no number of turns
        assert refusal(**{field: value}) == f"{field}={value!r}: must be a whole number between {low} and {high}"
    for value in (low, high, np.int64(low)):
        assert getattr(Household(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "known"), [("tasks", world.TASKS), ("rooms", world.ROOMS)])
def test_names(field, known):
    for value in [*NOT_NAMES, [next(iter(known))] * 2, [*known, "attic"]]:
        message = refusal(**{field: value})
        given = list(value) if isinstance(value, list | tuple) and value else value
        assert message == f"{field}={given!r}: list one or more of {', '.join(known)}, each once"


def test_tasks_without_a_room():
    for task, rooms in world.TASKS.items():
        for room in world.ROOMS:
            if room in rooms:
                assert Household((task,), (room,)).tasks == (task,)
            else:
                message = refusal(tasks=(task,), rooms=(room,))
                assert message == f"rooms=['{room}']: task '{task}' needs one of {', '.join(rooms)}"
    assert "task 'heat'" in refusal(tasks=["place", "heat"], rooms=["bedroom", "bathroom"])
