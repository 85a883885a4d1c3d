"""`bench serve`: the same work is measured on all sides, and a speed is tokens over seconds."""

import re
import sys

import pytest

from hgpo_jax.bench import serving
from tests.helpers.byte_policy import byte_policy

SMALL = ["--rounds", "2", "--prompt", "9", "--response", "8", "--slots", "2"]


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_rows(bench, monkeypatch):
    measured, direct = [], serving.Direct.__call__

    def compiled(self):
        return sum(program._cache_size() for program in self._programs._programs.values())

    def noted(self, load):
        before = compiled(self)
        measured.append((load, direct(self, load)))
        again = len(measured) % 2 == 0
        assert not again or compiled(self) == before > 0  # nothing is compiled while it is timed
        return measured[-1][1]

    monkeypatch.setattr(serving.Direct, "__call__", noted)
    rows = bench("serve", *SMALL, "--clients", "3", "--against", "transformers", "--hostile", "50")
    names = ["served", "transformers' generate", "the sampler", "first token", "first token", "served beside"]
    told = [re.sub(r",.*| called directly| [1-9]\d* bad requests/s", "", row["name"]) for row in rows]
    assert told == [*names, "machine"]
    served, generate, sampler, median, slowest, beside, _ = rows
    assert served["name"].startswith("served, 3 clients, 2 slots, household")
    assert served["ratio"] == pytest.approx(served["value"] / sampler["value"])
    assert generate["ratio"] == pytest.approx(served["value"] / generate["value"])
    assert beside["ratio"] == pytest.approx(beside["value"] / served["value"])
    assert median["value"] <= slowest["value"]
    # With random weights, almost every answer is as long as it may be.
    assert [(load.clients, load.rounds) for load, _ in measured] == [(3, 2), (3, 2)]
    assert all(0.7 * 8 * load.clients * load.rounds <= out.tokens <= 8 * load.clients * load.rounds for load, out in measured)


def test_what_is_missing_is_said_before_anything_is_compiled(monkeypatch, refused, tmp_path):
    byte_policy().save(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    said = refused("serve", "--policy", str(tmp_path))
    assert said.startswith(f"error: --policy {tmp_path}: has no tokenizer with an end token; add ")
    monkeypatch.setitem(sys.modules, "openai", None)
    assert "needs the package openai; pip install 'hgpo_jax[serve,openai]'" in refused("serve")
