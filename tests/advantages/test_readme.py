"""The examples of the package's README run, and give the numbers that stand beside them."""

import re
from pathlib import Path

import numpy as np

from hgpo_jax import advantages
from hgpo_jax.learner.algorithms import METHODS

README = Path(advantages.__file__).with_name("README.md").read_text()


def test_the_examples_give_their_numbers(monkeypatch):
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(advantages.ESTIMATORS))
    names, checked = {"__name__": "readme"}, 0
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
        for expression, numbers in re.findall(r"^((?:record|estimate)\S*.*?) +# (\[[^\]]*\])", block, re.MULTILINE):
            np.testing.assert_allclose(np.asarray(eval(expression, names)), eval(numbers), atol=0.005)
            checked += 1
    assert checked == 5


def test_every_method_is_listed():
    table = README[README.index("## The names of") : README.index("## What differs")]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(METHODS)
