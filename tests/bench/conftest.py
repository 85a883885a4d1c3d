"""The command in this process: the rows that it writes to --json, and what it says where it refuses."""

import json
import sys

import pytest

from hgpo_jax.bench import __main__ as command


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A function: the rows of a benchmark, of which the last tells of the machine."""

    def call(*arguments) -> list[dict]:
        file = tmp_path / "rows.json"
        monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--json", str(file)])
        command.main()
        return json.loads(file.read_text())

    return call


@pytest.fixture
def refused(monkeypatch, capsys):
    """A function: the one line of a benchmark that ends with exit code 2."""

    def call(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit) as stop:
            command.cli.run(command.main)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1, said
        return said

    return call
