"""Bad input is refused before anything is traced, in one line that names it."""

import jax
import numpy as np
import pytest
from batches import worked_example

from hgpo_jax.advantages import ESTIMATORS, Estimate, checks, estimate, parameters


def changed(field, change):
    arguments = worked_example()
    arguments[field] = change(arguments[field].copy())
    return arguments


def put(index, value):
    def change(array):
        array[index] = value
        return array

    return change


CASES = {
    "unknown estimator": ("hgop", worked_example(), "unknown estimator 'hgop': did you mean 'hgpo'"),
    "unknown option": ("hgpo", worked_example(histroy_length=2), "'histroy_length': did you mean 'history_length'"),
    "another's option": ("grpo", worked_example(), "unknown option of grpo 'gamma'"),
    "negative history": ("hgpo", worked_example(history_length=-1), "history_length=-1: give an integer of 0 or more"),
    "history as bool": ("hgpo", worked_example(history_length=True), "history_length=True"),
    "gamma nan": ("hgpo", worked_example(gamma=float("nan")), "gamma=nan"),
    "weight_offset": ("hgpo", worked_example(weight_offset=1001), "weight_offset=1001: give a number from 1 to 1000"),
    "normalize": ("hgpo", worked_example(normalize="std"), "normalize='std': give 'mean' or 'mean_std'"),
    "missing array": ("pgpo", worked_example(), "pgpo needs success"),
    "shape": ("hgpo", changed("rewards", lambda x: x[:, :4]), r"rewards has shape \(3, 4\): give \(3, 6\)"),
    "groups shape": ("hgpo", changed("groups", lambda x: x[:2]), r"groups has shape \(2,\): give \(3,\)"),
    "mask dtype": ("hgpo", changed("mask", lambda x: x.astype(int)), "mask has dtype int64: give bool"),
    "states dtype": ("hgpo", changed("states", lambda x: x + 0.5), "states has dtype float64: give int32"),
    "signals without an axis": ("gdpo", worked_example(gamma=None, signals=np.zeros((3, 6))), r"give \(3, 6\) and an axis"),
    "weights of signals": (
        "gdpo",
        worked_example(gamma=None, signals=np.zeros((3, 6, 2)), signal_weights=(1.0,)),
        "give 2 numbers, one for each",
    ),
    "a signal's nan": (
        "gdpo",
        worked_example(gamma=None, signals=put((1, 0, 1), np.nan)(np.zeros((3, 6, 2)))),
        r"signals\[1, 0, 1\] is nan",
    ),
    "hole": ("hgpo", changed("mask", put((1, 2), False)), r"mask\[1\] has a hole before step 3"),
    "nan": ("hgpo", changed("rewards", put((2, 4), np.nan)), r"rewards\[2, 4\] is nan: give finite"),
    "infinite": ("grpo", {**changed("rewards", put((0, 0), -np.inf)), "gamma": None}, r"rewards\[0, 0\] is -inf"),
    "too large": (
        "hgpo",
        changed("rewards", lambda x: x.astype(np.float64) + 1e39),
        r"rewards\[0, 0\] is 1e\+39: scale it to 1e\+15",
    ),
    "too small": ("hgpo", changed("rewards", lambda x: x.astype(np.float64) - 1e19), r"rewards\[0, 0\] is -1e\+19: scale it"),
    "negative id": ("hgpo", changed("states", put((0, 1), -1)), r"states\[0, 1\] is -1: ids must be from 0"),
    "padding's id": ("hgpo", changed("states", put((0, 1), 2**31 - 1)), r"states\[0, 1\] is 2147483647"),
    "64-bit id": ("hgpo", changed("groups", lambda x: x.astype(np.int64) + 2**40), r"groups\[0\] is 1099511627776"),
}


@pytest.mark.parametrize("name", ["dr_mas", "g2rpo", "gae", "himac", "hiper"])
def test_roles_are_refused_where_they_would_change_nothing(name):
    arguments = {name: value for name, value in worked_example().items() if name != "gamma"}
    with pytest.raises(ValueError, match=f"^by_role: {name} compares no turns of different roles; leave it out$"):
        estimate(name, **arguments, by_role=arguments["states"] * 0)


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    name, arguments, message = CASES[case]
    arguments = {key: value for key, value in arguments.items() if value is not None}
    with pytest.raises(ValueError, match=message) as error:
        estimate(name, **arguments)
    assert "\n" not in str(error.value)


def test_shapes_and_options_are_checked_under_jit():
    arguments = worked_example()

    def traced(rewards, **options):
        return estimate("hgpo", **{**arguments, "rewards": rewards, **options}).advantages

    expected = estimate("hgpo", **arguments).advantages
    np.testing.assert_allclose(jax.jit(traced)(arguments["rewards"]), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="rewards has shape"):
        jax.jit(traced)(arguments["rewards"][:2])
    with pytest.raises(ValueError, match="history_length=-3"):
        jax.jit(lambda r: traced(r, history_length=-3))(arguments["rewards"])


def test_under_jit_a_signal_that_is_no_number_makes_its_step_one_that_an_update_skips(monkeypatch):
    """Whatever the estimator makes of it: `beacon` counts in integers, which have no NaN."""
    monkeypatch.setitem(ESTIMATORS, "counted", lambda batch, *, signals: Estimate(signals.astype(int)[..., 0] * 1.0, 0.0))
    arguments = {name: value for name, value in worked_example().items() if name != "gamma"}
    signals = np.ones((*arguments["mask"].shape, 2), np.float32)
    signals[0, 1, 1], signals[1, 0, 0], signals[2, 2, 0] = np.nan, np.inf, -1e16
    signals[~arguments["mask"]] = np.nan  # padding counts nowhere
    found = jax.jit(lambda signals: estimate("counted", **arguments, signals=signals).advantages)(signals)
    assert sorted(zip(*np.nonzero(np.isnan(found)), strict=True)) == [(0, 1), (1, 0), (2, 2)]


def test_every_option_is_known_and_its_default_accepted():
    for name in ESTIMATORS:
        arrays, options = parameters(name)
        assert set(arrays) <= set(checks.ARRAYS) and set(options) <= set(checks.OPTIONS)
        for option, default in options.items():
            checks.check_option(option, default)
