"""A server in this process, and what speaks to it."""

import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import jax
import numpy as np
import openai

from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving import uvicorn_server
from hgpo_jax.serving.engine import Engine, Progress
from hgpo_jax.serving.web_app import Api
from tests.helpers.byte_policy import generated

SLOTS, WAITING, PROMPT, RESPONSE = 4, 3, 200, 48
HELLO = [{"role": "user", "content": "Hello"}]


def engine_of(policy, **limits) -> Engine:
    """On one device; `limits` in place of the usual ones."""
    usual = {"slots": SLOTS, "prompt_limit": PROMPT, "response_limit": RESPONSE, "waiting_limit": WAITING}
    return Engine(policy, make_mesh("data=1", jax.devices()[:1]), **usual | limits)


@contextlib.contextmanager
def served(engine, policy, **options):
    """A server in a thread; gives its port."""
    api = Api(engine, policy.tokenizer, "tiny", **{"key": "", "time_limit": 60.0} | options)
    with uvicorn_server.served(api) as url:
        yield urlsplit(url).port


class Scripted:
    """In the place of an engine: what it answers is written by a function of the prompt's text, 7 tokens at a time."""

    prompt_limit, response_limit, room, waiting, active, failure, vision = 4000, 300, 8, 0, 0, "", None

    def __init__(self, tokenizer, write):
        self.tokenizer, self.write, self.vocabulary, self.end_tokens = tokenizer, write, 10**6, (tokenizer.eos_token_id,)
        self.prompts: list[str] = []

    def submit(self, generations):
        for generation in generations:
            self.prompts.append(self.tokenizer.decode(generation.ids))
            tokens = [*self.tokenizer(self.write(self.prompts[-1])).input_ids, *self.end_tokens]
            for at in range(0, len(tokens), 7):
                some = tokens[at : at + 7]
                generation.tell(Progress(some, [-0.5] * len(some), at + 7 >= len(tokens)))

    def cancel(self, generations):
        """Nothing is under way."""


@contextlib.contextmanager
def started(*arguments, **environment):
    """The command in a process of its own: (it, its URL)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hgpo_jax.serve", *map(str, arguments), "--port", "0"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment,
    )  # fmt: skip
    try:
        while (line := process.stdout.readline()).startswith(("preparing ", "loading ", "finding ", "compiling ")):
            pass
        found = re.fullmatch(r"(.*) is served at (http://\S+/v1), with caches of [\d,]+ MiB; Ctrl-C ends it\n", line)
        assert found, (line, process.stderr.read())
        yield process, found[2]
    finally:
        process.kill()
        process.wait()


def client_of(port, key="any"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


def expected(policy, ids, seed, number=0, limit=RESPONSE, decoding=None):
    """Tokens and log-probabilities of a choice by the rollout's sampler."""
    key = jax.random.fold_in(jax.random.key(np.uint32(seed)), number)
    return generated(policy, ids, key, limit, decoding or Decoding())


def wait_until(condition, seconds: float = 30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def idle(engine):
    """Waits until nobody has a slot."""
    wait_until(lambda: not (engine.active or engine.waiting))


def post(body: str | bytes, path="/v1/chat/completions", key="") -> bytes:
    body = body.encode() if isinstance(body, str) else body
    key = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: {len(body)}\r\n\r\n".encode() + body


def hello(**more) -> bytes:
    """A request for a chat completion; `more` of its fields, or in place of the usual ones."""
    return post(json.dumps({"model": "tiny", "messages": HELLO} | more))


def get(path, **headers) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in ({"Host": "localhost"} | headers).items())
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


def raw(port, request: str | bytes, whole: bool = False) -> tuple[int, dict[str, str], str]:
    """Sends bytes and reads one answer, or `whole`, all until the end of a stream: (status, headers, body)."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request.encode() if isinstance(request, str) else request)
        status, headers, body = read(connection)
        while whole and not body.endswith("0\r\n\r\n"):
            body += connection.recv(65536).decode()
        return status, headers, body


def read(connection) -> tuple[int, dict[str, str], str]:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            break
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    return int(status.split()[1]), headers, body.decode()


def ends(connection, seconds: float = 10) -> bytes:
    """What comes until the server closes the connection, which it must."""
    connection.settimeout(seconds)
    data = b""
    with contextlib.suppress(ConnectionResetError):  # with something of ours unread
        while more := connection.recv(65536):
            data += more
    return data


def in_thread(call, *given, **more):
    """The result of a call on a thread of its own, or what it was refused with, by and by."""
    results: queue.Queue = queue.Queue()

    def run():
        try:
            results.put(call(*given, **more))
        except openai.APIStatusError as error:
            results.put(error.message)

    threading.Thread(target=run, daemon=True).start()
    return lambda: results.get(timeout=30)
