"""`python -m hgpo_jax.serve`: starts, answers, ends; refuses what cannot be served."""

import dataclasses
import json
import signal
import socket
import sys
import urllib.request

import jax
import openai
import pytest

from hgpo_jax import analysis, serve
from hgpo_jax.config import cli
from hgpo_jax.policy import Policy
from tests.helpers.byte_policy import byte_policy
from tests.helpers.serving import HELLO, started


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    policy = byte_policy()
    policy.save(folder := tmp_path_factory.mktemp("serve") / "tiny")
    Policy(policy.config, policy.params, None).save(folder.parent / "mute")
    config = dataclasses.replace(policy.config, max_position_embeddings=8192)
    dataclasses.replace(policy, config=config).save(folder.parent / "long")
    return folder


@pytest.mark.slow
def test_a_server_from_start_to_end(folder, tmp_path):
    kept, options = tmp_path / "kept", ("--response-limit", 40, "--slots", 2, "--max-turns", 2, "--store", 1)
    with started(folder, *options, "--record", kept, HGPO_API_KEY="sesame") as (process, url):
        client = openai.OpenAI(base_url=url, api_key="sesame", max_retries=0, timeout=60)
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="no").models.list()
        assert json.load(urllib.request.urlopen(url.removesuffix("v1") + "health"))["status"] == "ok"
        for session in ("left", "ended"):
            for text in ("Hello", "Hello again"):
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": text}], metadata={"session_id": session}, seed=1
                )
        client.post("/sessions/ended/reward", body={"reward": 1.5, "success": True}, cast_to=object)
        next(iter(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, n=2)))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in process.stderr.read()
        assert "holds the sessions that have ended; 1 had no last reward and are left out" in process.stdout.read()
    dump = analysis.load(kept)
    assert dump.goal(0) == "ended" and dump.episodes.mask.tolist() == [[True, True]]
    assert dump.episodes.rewards.tolist() == [[0, 1.5]] and dump.episodes.success.all()
    assert [dump.observation(0, turn) for turn in range(2)] == ["Hello", "Hello again"]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["FOLDER", "--host", "0.0.0.0"], "--host 0.0.0.0: anybody could use the policy; set HGPO_API_KEY"),
        (["FOLDER", "--slots", "0"], "--slots: 0: must be a whole number from 1 to 2147483647"),
        (["FOLDER", "--response-limit", "512"], "--response-limit 512: the model's context is 512 tokens; give fewer"),
        (["FOLDER", "--prompt-limit", "512"], "--prompt-limit 512: beside a response 511 tokens fit in the context"),
        (["FOLDER", "--prompt-limit", "500", "--response-limit", "40"], "--prompt-limit 500: beside a response 472 tokens fit"),
        (["FOLDER", "--port", "TAKEN"], "--port"),
        (["FOLDER", "--port", "70000"], "--port 70000"),
        (["FOLDER", "--mesh", "data=9"], "mesh"),
        (["LONG", "--prompt-limit", "8152", "--response-limit", "40", "--store", "1"], "1: the smallest that holds a prompt"),
        (["MUTE"], "has no tokenizer with an end token"),
    ],
)
def test_mistakes_are_one_line(arguments, fragment, folder, monkeypatch, capsys):
    monkeypatch.delenv("HGPO_API_KEY", raising=False)
    monkeypatch.setattr(type(jax.config), "update", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        others = {name: str(folder.parent / name.lower()) for name in ("MUTE", "LONG")}
        names = {"FOLDER": str(folder), "TAKEN": str(taken.getsockname()[1])} | others
        monkeypatch.setattr(sys, "argv", ["serve", *(names.get(word, word) for word in arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.run(serve.main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert fragment in said
