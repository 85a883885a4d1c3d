"""`bench serve`: the same work is measured on both sides, and a speed is tokens over seconds."""

import os
import sys

import pytest

from hgpo_jax.bench import serving
from tests.helpers.byte_policy import byte_policy

SMALL = ["--rounds", "2", "--prompt", "9", "--response", "8", "--slots", "2"]


@pytest.mark.slow
def test_rows(bench, monkeypatch, tmp_path):
    byte_policy().save(tmp_path)
    measured, direct = [], serving.sample_directly

    def noted(policy, programs, keys, slots, load):
        count = lambda: sum(program._cache_size() for program in programs._programs.values())  # noqa: E731
        before, tokens = count(), direct(policy, programs, keys, slots, load)
        assert not measured or count() == before > 0  # nothing is compiled while it is timed
        measured.append((load, tokens))
        return tokens

    monkeypatch.setattr(serving, "sample_directly", noted)
    cores, kept = sorted(os.sched_getaffinity(0)), []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: kept.append(cores))  # the clients' process has its own
    arguments = ["--policy", str(tmp_path), *SMALL, "--clients", "3", "--apart"]
    served, sampler, busy, median, slowest, _ = bench("serve", *arguments)
    assert kept == [cores[:-1]] and busy["ratio"] > 0
    assert served["name"].startswith("served, 3 clients, 2 slots")
    assert served["ratio"] == pytest.approx(served["value"] / sampler["value"])
    assert median["value"] <= slowest["value"]
    # With random weights, almost every answer is as long as it may be.
    assert {(load.clients, load.rounds) for load, _ in measured} == {(3, 2)}
    assert all(0.7 * 8 * 6 <= tokens <= 8 * 6 for _, tokens in measured)


def test_what_is_missing_is_said_before_anything_is_compiled(monkeypatch, refused, tmp_path):
    byte_policy().save(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    said = refused("serve", "--policy", str(tmp_path))
    assert said.startswith(f"error: --policy {tmp_path}: has no tokenizer with an end token; add ")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert refused("serve", "--apart") == "error: --apart: needs Linux and two cores; leave it out\n"
    monkeypatch.setitem(sys.modules, "openai", None)
    assert "needs the package openai; pip install 'hgpo_jax[serve,openai]'" in refused("serve")
