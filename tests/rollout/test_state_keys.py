"""A step counter in the observation: no step has a peer, unless one says which states are equal."""

import numpy as np
import pytest

from hgpo_jax.advantages import estimate
from hgpo_jax.config import load
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutReport, RolloutResult
from hgpo_jax.rollout.state_keys import regroup
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError, RunError

KEYS = """
import numpy as np
def place(seen):
    return seen.partition(" after ")[0]
def structured(seen):
    return {"place": np.array([ord(letter) for letter in place(seen)])}
def fails(seen):
    return {"the hall": 1}[seen]
def unhashable(seen):
    return {seen}
def none():
    return 0
"""
# Each step's place, and that after the last one; what is shown has a counter that goes on from episode to episode.
PLACES = [["the hall", "the kitchen", "the hall"], ["the hall", "the kitchen"], [], ["the hall", "the cellar", "the kitchen"]]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "keys.py").write_text(KEYS)
    monkeypatch.chdir(tmp_path)


def played() -> RolloutResult:
    e, texts = Episodes.zeros(len(PLACES), 3, 1, 1), []
    for b, places in enumerate(PLACES):
        numbers = range(len(texts), len(texts) + len(places))
        texts += [f"{place} after {100 + number} steps" for number, place in zip(numbers, places, strict=True)]
        turns = max(len(places) - 1, 0)
        e.mask[b, :turns], e.states[b, :turns], e.next_states[b, :turns] = True, numbers[:-1], numbers[1:]
    e.observations[:, :, 0] = e.states
    none = [[] for _ in PLACES]
    return RolloutResult(e, RolloutReport(texts, [""] * len(PLACES), none, none, none, np.zeros(len(PLACES)), {}, {}))


def config_with(*fields):
    return load(None, ["env.name=household_text", *fields])


@pytest.mark.parametrize(
    "field", ["env.state_key=keys.py:place", "env.state_key=keys.py:structured", "advantage.similarity=0.9"]
)
def test_steps_in_the_same_place_are_peers(here, field):
    config, before = config_with(field), played()
    check_together(config)
    e, report = regroup(before, config)
    assert e.states.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 6, 0]]
    assert e.next_states.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0], [6, 1, 0]]
    assert report.texts[e.observations[3, 1, 0]] == "the cellar after 106 steps"
    sizes = [
        np.asarray(estimate("hgpo", rewards=e.rewards, mask=e.mask, states=states, groups=e.groups).level_sizes)[e.mask, 0]
        for states in (before.episodes.states, e.states)
    ]
    assert [each.tolist() for each in sizes] == [[1, 1, 1, 1, 1], [3, 1, 3, 3, 1]]


@pytest.mark.parametrize(("fields", "message"), [
    (["env.state_key=keys.py:gone"], "env.state_key=keys.py:gone: .*keys.py has no gone"),
    (["env.state_key=keys.py:none"], r"env.state_key=keys.py:none: does not take one argument; write it as key\(observation\)"),
    (["env.state_key=keys.py:place", "advantage.similarity=0.9"], "advantage.similarity=0.9: env.state_key=.* leave one"),
    (["env.name=household", "advantage.similarity=0.9"], "env.name=household, compiled, has no texts; leave"),
    (["env.name=household", "env.state_key=keys.py:place"], "env.state_key=.*: env.name=household, compiled, does not read it"),
])  # fmt: skip
def test_refusals(here, fields, message):
    with pytest.raises(ConfigError, match=message):
        check_together(config_with(*fields))


@pytest.mark.parametrize(("name", "message"), [("fails", "fails with KeyError"), ("unhashable", "set is no key of a state")])
def test_a_function_that_fails_ends_the_run_in_one_line(here, name, message):
    with pytest.raises(RunError, match=f"^env.state_key=keys.py:{name}: .*{message}.* for the observation 'the hall after"):
        regroup(played(), config_with(f"env.state_key=keys.py:{name}"))
