"""`bench serve`: the same work is measured on all sides, and a speed is tokens over seconds."""

import json
import re
import sys

import pytest

from hgpo_jax.bench import __main__ as command
from hgpo_jax.bench import serving as bench
from tests.helpers.byte_policy import byte_policy
from tests.helpers.serving import engine_of, post, raw, served

SMALL = ["--rounds", "2", "--prompt", "9", "--response", "8", "--slots", "2"]


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_rows(tmp_path, monkeypatch):
    measured, direct = [], bench.Direct.__call__

    def compiled(self):
        return sum(program._cache_size() for program in self._programs._programs.values())

    def noted(self, load):
        before = compiled(self)
        measured.append((load, direct(self, load)))
        again = len(measured) % 2 == 0
        assert not again or compiled(self) == before > 0  # nothing is compiled while it is timed
        return measured[-1][1]

    monkeypatch.setattr(bench.Direct, "__call__", noted)
    file = tmp_path / "rows.json"
    options = ["--clients", "1,3", "--against", "transformers", "--hostile", "50", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench", "serve", *SMALL, *options])
    command.main()
    rows = json.loads(file.read_text())
    names = ["served", "transformers' generate", "the sampler", "first token", "first token", "served beside"]
    told = [re.sub(r",.*| called directly| [1-9]\d* bad requests/s", "", row["name"]) for row in rows]
    assert told == [*names, *names, "machine"]
    for at, clients in ((0, 1), (len(names), 3)):
        served, generate, sampler, median, slowest, beside = rows[at : at + len(names)]
        assert served["name"].startswith(f"served, {clients} clients, 2 slots, household")
        assert served["ratio"] == pytest.approx(served["value"] / sampler["value"])
        assert generate["ratio"] == pytest.approx(served["value"] / generate["value"])
        assert beside["ratio"] == pytest.approx(beside["value"] / served["value"])
        assert median["value"] <= slowest["value"]
    # With random weights, almost every answer is as long as it may be.
    assert [(load.clients, load.rounds) for load, _ in measured] == [(1, 2), (1, 2), (3, 2), (3, 2)]
    assert all(0.7 * 8 * load.clients * load.rounds <= out.tokens <= 8 * load.clients * load.rounds for load, out in measured)


def refused(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["bench", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.cli.run(command.main)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_is_missing_is_said_before_anything_is_compiled(monkeypatch, capsys, tmp_path):
    byte_policy().save(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    said = refused(monkeypatch, capsys, "--policy", str(tmp_path))
    assert said.startswith(f"error: --policy {tmp_path}: has no tokenizer with an end token; add ") and said.count("\n") == 1
    monkeypatch.setitem(sys.modules, "openai", None)
    assert "needs the package openai; pip install 'hgpo_jax[serve,openai]'" in refused(monkeypatch, capsys)


@pytest.mark.slow
def test_bad_requests_are_refused():
    policy = byte_policy()
    with engine_of(policy, slots=2) as engine, served(engine, policy, body_limit=2**24) as port:
        for body in bench.BAD:
            assert raw(port, post(body, "/v1/completions"))[0] in (400, 413), body[:60]
