"""A policy behind a server: a stand-in answers by a rule, and a plain loop over the environment says what must come out."""

import dataclasses
import hashlib
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from hgpo_jax import config as configuration
from hgpo_jax import evaluate
from hgpo_jax.evaluation import panels, served
from hgpo_jax.evaluation.served import ServedPolicy
from hgpo_jax.policy.answers import find_action
from hgpo_jax.rollout.chat_prompts import PromptInput, load_template
from hgpo_jax.rollout.tasks import task_numbers
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.halls import Halls
from tests.helpers.refusals import refused

TURNS, COUNT = 6, 10
GREEDY = Decoding(temperature=0.0)


def answer_to(message: str, temperature: float, seed: int) -> str:
    """The stand-in's rule: one of the commands in the message, by its hash; now and then without tags."""
    mark = message + (str(seed) if temperature else "")
    number = int(hashlib.sha256(mark.encode()).hexdigest()[:8], 16)
    commands = re.findall("'([^']+)'", message)
    said = commands[number % len(commands)] if commands else "hello"
    return said if number % 5 == 0 else f"<think>hm</think><action>{said}</action>"


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.keys: set[str] = set()
        self.fail_after, self.fail_with, self.apart = 10**9, 401, False
        self.policy = f"openai:http://127.0.0.1:{self.server_port}/v1#small"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.requests.append(asked)
        server.keys.add(self.headers["Authorization"])
        if self.path.startswith("/page"):
            return self._send(200, {}, b"<html>Welcome</html>", "text/html")
        if self.path != "/v1/chat/completions" or asked["model"] != "small":
            return self._send(404, {"error": {"message": f"no model {asked['model']}\nhere"}})
        if len(server.requests) > server.fail_after:
            return self._send(server.fail_with, {"error": {"message": "too much"}})
        if len(server.requests) == 4:
            return self._send(503, {"error": {"message": "busy"}})  # which is asked again
        text = answer_to(asked["messages"][0]["content"], asked["temperature"], asked["seed"])
        message = {"role": "assistant", "content": text}
        if server.apart and text.startswith("<think>"):
            apart = {"reasoning_content": "hm", "content": text.removeprefix("<think>hm</think>")}
            message |= apart if server.apart == "field" else {"content": text.removeprefix("<think>")}
        self._send(200, {"id": "1", "object": "chat.completion", "created": 1, "model": "small", "choices": [
            {"index": 0, "finish_reason": "stop", "message": message}]})  # fmt: skip

    def _send(self, status, content, page=None, kind="application/json"):
        body = page or json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def config(*overrides, name="tests.helpers.halls:Halls"):
    fields = f"evaluation.episodes={COUNT}", f"env.name={name}", "warm_start=none", "rollout.response_limit=40"
    return configuration.load(None, [*fields, *overrides])


def plain_play(episode: int, task: int, temperature: float) -> tuple[bool, list[bool], set[tuple[str, int]]]:
    """One episode, turn by turn: (success, which answers are malformed, each message and the seed of its answer)."""
    env, template, history = Halls(), load_template("text"), []
    asked, malformed = set(), []
    observation, commands = env.reset(task)
    for turn in range(TURNS):
        message = template.render(PromptInput(env.goal, history[-2:], turn, observation, commands))
        seed = int(np.random.SeedSequence([3, episode, turn]).generate_state(1)[0]) % 2**31  # of run, episode and turn
        asked.add((message, seed))
        action, well_formed = find_action(answer_to(message, temperature, seed), 30)
        malformed.append(not well_formed)
        before = observation
        observation, commands, _, done, info = env.step(action)
        history.append((before, action))
        if done:
            break
    return info["won"], malformed, asked


def plainly(temperature: float) -> list[tuple[bool, list[bool], set]]:
    return [plain_play(i, task, temperature) for i, task in enumerate(task_numbers("held_out", None, range(COUNT), None))]


@pytest.mark.parametrize(("temperature", "workers"), [(0.0, 0), (0.7, 2)])
def test_what_a_server_plays_is_what_it_answers(server, temperature, workers, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    policy = ServedPolicy(server.policy, config(f"env.workers={workers}"))
    episodes, scores, transcripts = policy.play(Decoding(temperature=temperature, top_p=0.9), seed=3)
    asked = server.requests[1:]  # the first one finds out whether it answers
    wanted = plainly(temperature)
    assert episodes.success.tolist() == [won for won, _, _ in wanted] == scores.astype(bool).tolist()
    assert 0 < episodes.success.sum() < COUNT
    turns = episodes.mask.sum(axis=1)
    assert [episodes.invalid[i, : turns[i]].tolist() for i in range(COUNT)] == [malformed for _, malformed, _ in wanted]
    assert 0 < episodes.invalid.sum() < turns.sum()
    assert {(one["messages"][0]["content"], one["seed"]) for one in asked} == set.union(*(pairs for _, _, pairs in wanted))
    assert server.keys == {"Bearer secret"}
    sent = {(one["model"], one["max_tokens"], one["temperature"], one["top_p"]) for one in asked}
    assert sent == {("small", 40, temperature, 0.9)} and not any("stop" in one for one in asked)
    assert policy.task_types == ("walk",)
    assert all(text.startswith("task: walk to hall") for text in transcripts), transcripts[0]


def test_reasoning_that_a_server_takes_apart_belongs_to_the_text(server):
    play = lambda *fields: ServedPolicy(server.policy, config(*fields)).play(GREEDY, 0)  # noqa: E731
    one = play("rollout.stop=[END]")
    assert all(asked["stop"] == ["END"] for asked in server.requests)
    for server.apart in ("field", "without the tag that the prompt opened"):
        other = play()
        assert one[2] == other[2] and "<think>hm</think>" in one[2][0]
        np.testing.assert_array_equal(one[0].invalid, other[0].invalid)
    # A prompt that asks for the action alone gets none.
    assert not any("hm" in text for text in play("env.template=plain")[2])


def test_words_keep_their_capitals_where_the_original_does_not_take_them(server, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "answer_to", lambda *_: "<think>hm</think><action>Answer[Paris]</action>")
    policy = ServedPolicy(server.policy, config())
    for lower_case, said in ((False, "Answer[Paris]"), (True, "answer[paris]")):
        policy._entry = dataclasses.replace(policy._entry, lower_case=lower_case)
        policy.play(GREEDY, 0)
        assert f'and did "{said}"' in server.requests[-1]["messages"][0]["content"]


@pytest.mark.parametrize(("change", "fragment"), [
    ({"policy": "openai:http://127.0.0.1:9/v1"}, "expected openai:URL#MODEL, as in"),
    ({"policy": "openai:ftp://x/v1#small"}, "expected openai:URL#MODEL, as in"),
    ({"policy": "openai:http://[x/v1#small"}, "expected openai:URL#MODEL, as in"),
    ({"policy": "openai:http://localhost:abc/v1#small"}, "expected openai:URL#MODEL, as in"),
    ({"policy": "openai:http://me:secret@x/v1#small"}, "holds more than a place, and is written down; set OPENAI_API_KEY"),
    ({"policy": "openai:http://x/v1?key=secret#small"}, "holds more than a place, and is written down; set OPENAI_API_KEY"),
    ({"fields": ["env.compiled=true", "data=x"], "name": "alfworld"}, "env.compiled=true: a served policy needs texts"),
    ({"fields": ["env.size=7"]}, "env.size=7"),
    ({"policy": "openai:http://127.0.0.1:9/v1#small"}, "Connection error"),
    ({"model": "large"}, "no model large here"),
    ({"path": "page"}, "what it sent has no choices; such a URL usually ends in /v1"),
    ({"name": "household"}, "env.name=household: a served policy needs texts"),
    ({"name": "sokoban_pixels"}, "env.name=sokoban_pixels: a served policy reads texts, and these are pictures"),
])  # fmt: skip
def test_refusals(change, fragment, server):
    policy = f"openai:http://127.0.0.1:{server.server_port}/{change.get('path', 'v1')}#{change.get('model', 'small')}"
    policy = change.get("policy", policy)
    given = {"name": change["name"]} if "name" in change else {}
    with refused(fragment, ConfigError) as caught:
        ServedPolicy(policy, config(*change.get("fields", ()), **given))
    assert "secret" not in str(caught.value)


@pytest.fixture
def evaluated(server, tmp_path, monkeypatch):
    """Evaluates the server on a panel of ten short tasks; gives the result's file."""
    contents = lambda config, count: [f"hall {number}" for number in range(count)]  # noqa: E731
    monkeypatch.setitem(panels.PANELS, "household", panels.Panel(("tests.helpers.halls:Halls",), {}, COUNT, contents))

    def run(*options, to="there"):
        arguments = ["env.name=tests.helpers.halls:Halls", "--panel", "household", "--to", str(tmp_path / to), *options]
        monkeypatch.setattr("sys.argv", ["evaluate", server.policy, *arguments])
        evaluate.main()
        return tmp_path / to / f"panel-household-t1-n{COUNT}-s0.json"

    return run


def test_a_panel_played_by_a_server(evaluated, server, capsys):
    file = evaluated()
    result = json.loads(file.read_text())
    assert (result["policy"], result["policy_sha256"], len(result["tasks"])) == (server.policy, None, COUNT)
    lines = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["mode"] for line in lines] == ["greedy"] * COUNT + ["sampled"] * COUNT
    again = json.loads(evaluated(to="again").read_text())
    assert again["tasks"] == result["tasks"] and again["panel"] == result["panel"]
    assert "panel household, 10 tasks, digest" in capsys.readouterr().out
    found = panels.compare(panels.read(str(file)), again)
    assert found["success, greedy"]["all"]["p"] == 1.0


def test_a_server_that_stops_answering_ends_it_in_one_line(evaluated, server, tmp_path, monkeypatch):
    server.fail_after = 5
    monkeypatch.setattr(served, "AT_ONCE", 2)
    with refused("too much", RunError):
        evaluated()
    assert list((tmp_path / "there").iterdir()) == []
    time.sleep(0.5)
    assert len(server.requests) <= 5 + 2 * 2  # what was queued is not sent


@pytest.mark.parametrize(("after", "unplayed", "code"), [(30, range(3), 400), (6, range(1, COUNT), 422), (30, range(3), 413)])
def test_a_message_that_is_refused_ends_its_episode_alone(after, unplayed, code, server):
    """As not solved, but for an episode that had not begun: the long ones must not drop out of the success rate."""
    server.fail_after, server.fail_with = after, code
    episodes, _, transcripts = ServedPolicy(server.policy, config()).play(GREEDY, 0)
    turns, refused = episodes.mask.sum(axis=1), np.array(["too much" in text for text in transcripts])
    assert (turns == 0).sum() in unplayed and refused[turns == 0].all()
    cut = (turns > 0) & refused
    assert cut.any() and not episodes.success[refused].any()
    assert all("ended by a refusal: openai:" in transcripts[i] for i in np.flatnonzero(cut))
    assert all(turns[i] < len(whole[1]) for i, whole in enumerate(plainly(0.0)) if cut[i])


def test_where_every_message_is_refused_there_is_no_result(evaluated, server, tmp_path):
    server.fail_after, server.fail_with = 1, 400  # the one that finds out whether it answers
    with pytest.raises(RunError, match=r"BadRequestError: .*too much"):
        evaluated()
    assert not list(tmp_path.rglob("*.json"))
