"""A served policy beside the same sampler called directly: tokens per second and the time to the first token.

    python -m hgpo_jax.bench serve --policy smollm2 --clients 1,8,32 --against transformers

Every client streams one answer after the other to a prompt of its own random tokens; all are in one process beside the
server's. Directly, as many requests are under way as there are clients, and steps are as long as the sampler likes. All answers
end with the tokenizer's end token, which random weights (--policy household) draw as often as any other. The peer is a simple
hand-written server: one request after the other goes through transformers' `generate` and is answered as a whole, so that the
first token comes with the last. Nothing is compiled during the timing. With --hostile N the clients ask once more, beside a
process that sends N bad requests a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jax
import numpy as np

from hgpo_jax.bench import policies
from hgpo_jax.bench.limits import row
from hgpo_jax.config import Config
from hgpo_jax.envs.cli import whole_number
from hgpo_jax.envs.household import Household
from hgpo_jax.export import policy_folder
from hgpo_jax.policy import Policy, initialize, load_policy
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.sampling.continuous_batching import SlotPrograms, SlotRequest, SlotSampler
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.job import prepare_devices
from hgpo_jax.utils.errors import ConfigError, RunError


class Load(NamedTuple):
    """Clients' requests: `rounds` answers each, of up to `response` tokens, to `prompt` random tokens below `vocabulary`."""

    clients: int
    rounds: int
    prompt: int
    response: int
    vocabulary: int

    def ids(self, client: int, round: int) -> list[int]:
        """Returns token ids of a prompt."""
        return np.random.default_rng((client, round)).integers(1, self.vocabulary, self.prompt).tolist()


class Measured(NamedTuple):
    """The result of a load: its tokens, total seconds, and seconds of each request to its first token."""

    tokens: int
    seconds: float
    first: list[float]


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--policy",
        default=policies.HOUSEHOLD,
        metavar="POLICY",
        help="household: random weights of the household's shape (default); or smollm2, a GGUF file, a folder",
    )
    p.add_argument("--clients", type=_numbers, default="1,8,32", metavar="N,N", help="numbers of clients; default: 1,8,32")
    for name, default, meaning in (
        ("slots", 8, "responses sampled at a time"),
        ("rounds", 4, "answers to each client"),
        ("prompt", 128, "tokens of a prompt"),
        ("response", 64, "tokens of an answer"),
    ):
        p.add_argument(f"--{name}", type=whole_number, default=default, help=f"{meaning}; default {default}")
    p.add_argument("--hostile", type=whole_number, metavar="N", help="bad requests a second beside the clients")
    policies.add_against(p)


def _numbers(text: str) -> list[int]:
    """Reads an argument that is a list of whole numbers (an argparse type)."""
    return [whole_number(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value, unit and ratio: of the speed to the sampler's own, and to the peer's."""
    try:
        import openai  # noqa: F401  # the clients' process uses it

        from hgpo_jax.serving.api import Api
        from hgpo_jax.serving.engine import Engine
        from hgpo_jax.serving.server import served
    except ImportError as error:
        raise ConfigError(f"bench serve: needs the package {error.name}; pip install 'hgpo_jax[serve,openai]'") from None
    peer = policies.load_peer(args.against)
    prepare_devices(Config())
    mesh = make_mesh("data=1", jax.devices()[:1])
    policy = _policy(args.policy, mesh)
    loads = [Load(count, args.rounds, args.prompt, args.response, len(policy.tokenizer) - 3) for count in args.clients]
    rows = []
    engine = Engine(
        policy, mesh, slots=args.slots, prompt_limit=args.prompt, response_limit=args.response, waiting_limit=max(args.clients)
    )
    spawn = multiprocessing.get_context("spawn")
    clients = ProcessPoolExecutor(1, mp_context=spawn)
    direct = Direct(policy, mesh, args.slots, args.prompt, args.response, max(args.clients) * args.rounds)
    with clients, engine:
        for shape in engine.shapes():
            engine.warm_up(*shape)
        api = Api(engine, policy.tokenizer, "served", key="", time_limit=3600.0)
        with served(api) as url:
            for load in loads:
                direct(load)  # compiles every combination
                alone = direct(load)
                clients.submit(ask, url, load._replace(rounds=1)).result()  # starts the process
                ours = clients.submit(ask, url, load).result()
                told = f"{load.clients} clients, {args.slots} slots, {args.policy}"
                speeds = [each.tokens / each.seconds for each in (ours, alone)]
                rows += [
                    row(f"served, {told}", speeds[0], "tokens/s", None, speeds[0] / speeds[1]),
                    row("the sampler called directly", speeds[1], "tokens/s"),
                    row("first token, median", 1e3 * statistics.median(ours.first), "ms"),
                    row("first token, slowest", 1e3 * max(ours.first), "ms"),
                ]
                if args.hostile:
                    with _crowd(spawn, url, args.hostile) as sent:
                        before = sent.value
                        beside = clients.submit(ask, url, load).result()
                        bad = (sent.value - before) / beside.seconds
                    speed = beside.tokens / beside.seconds
                    rows.append(row(f"served beside {bad:.0f} bad requests/s", speed, "tokens/s", None, speed / speeds[0]))
    if peer:
        each = len(rows) // len(loads) + 1  # rows of a load, including the peer's
        with served(_peer_app(peer, policy, args.response)) as url, ProcessPoolExecutor(1, mp_context=spawn) as others:
            for number, load in enumerate(loads):
                others.submit(ask, url, load._replace(rounds=1), False).result()
                theirs = others.submit(ask, url, load, False).result()
                speed = theirs.tokens / theirs.seconds
                at = each * number + 1
                rows.insert(at, row("transformers' generate, served", speed, "tokens/s", None, rows[at - 1]["value"] / speed))
    return rows


def _policy(name: str, mesh) -> Policy:
    if name == policies.HOUSEHOLD:
        env = Household()
        found = policies.workload(argparse.Namespace(policy=name, **dict.fromkeys(policies.SIZES)))
        return Policy(found.model, initialize(found.model, 0, mesh), word_tokenizer(env.words))
    try:
        policy = load_policy(policy_folder(name), mesh)
    except ValueError as error:
        raise ConfigError(f"--policy: {error}") from None
    if policy.tokenizer is None or policy.tokenizer.eos_token_id is None:
        raise ConfigError(f"--policy {name}: has no tokenizer with an end token; add tokenizer.json and tokenizer_config.json")
    return policy


class Direct:
    """A sampler without a server, `direct(load) -> Measured`, for loads of up to `requests` answers.

    The second call with a load compiles nothing.
    """

    def __init__(self, policy: Policy, mesh, slots: int, prompt: int, response: int, requests: int):
        self._policy, self._mesh, self._slots, self._prompt = policy, mesh, slots, prompt
        self._keys = jax.random.split(jax.random.key(0), requests)  # one number for all loads: another recompiles
        self._programs = SlotPrograms(policy.graphdef, mesh, max_new=response, end_tokens=policy.end_tokens)

    def __call__(self, load: Load) -> Measured:
        requests = [
            SlotRequest(load.clients * round + client, 0, load.ids(client, round))
            for round in range(load.rounds)
            for client in range(load.clients)
        ]
        tokens = 0
        with jax.set_mesh(self._mesh):
            sampler = SlotSampler(
                self._programs, self._policy.params, self._keys, Decoding(), slots=self._slots, prompt_limit=self._prompt
            )
            began = time.perf_counter()
            while requests or sampler.active:
                room = min(sampler.free, load.clients - sampler.active)
                sampler.add(requests[:room])
                requests = requests[room:]
                tokens += sum(len(response.tokens) for response in sampler.step())
        return Measured(tokens, time.perf_counter() - began, [])


def ask(url: str, load: Load, stream: bool = True) -> Measured:
    """Runs the clients' side, in a separate process."""
    import openai

    async def all_clients() -> Measured:
        first: list[float] = []
        tokens = 0

        async def client(number: int) -> None:
            nonlocal tokens
            async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=3600, max_retries=0) as api:
                create: Any = api.completions.create
                for round in range(load.rounds):
                    asked = {
                        "model": "served",
                        "prompt": load.ids(number, round),
                        "max_tokens": load.response,
                        "seed": load.clients * round + number,
                    }
                    began = time.perf_counter()
                    if not stream:
                        answer = await create(**asked)
                        first.append(time.perf_counter() - began)
                        tokens += answer.usage.completion_tokens
                        continue
                    options = {"include_usage": True}
                    seen = False
                    chunks = await create(**asked, stream=True, stream_options=options)
                    async for chunk in chunks:
                        if not seen:
                            first.append(time.perf_counter() - began)
                        seen = True
                        tokens += chunk.usage.completion_tokens if chunk.usage else 0

        began = time.perf_counter()
        await asyncio.gather(*map(client, range(load.clients)))
        return Measured(tokens, time.perf_counter() - began, first)

    return asyncio.run(all_clients())


# Bodies that are rejected: no JSON, endless nesting, a field that changes answers, wrong types, a prompt that is too long.
BAD = [
    b"{",
    b"[" * 100_000,
    b'{"model": "served", "prompt": "x", "min_p": 0.5}',
    b'{"model": "served", "prompt": {}}',
    b'{"model": "served", "prompt": "' + b"x" * 1_000_000 + b'"}',
]


@contextlib.contextmanager
def _crowd(context, url: str, rate: int) -> Iterator[Any]:
    """Runs a process that sends `rate` bad requests a second, or as many as it can; yields its count. Raises RunError."""
    over, sent = context.Event(), context.Value("i", 0)
    process = context.Process(target=bother, args=(url, rate, over, sent), daemon=True)
    process.start()
    while not sent.value and process.is_alive():
        time.sleep(0.01)
    try:
        yield sent
    finally:
        over.set()
        process.join()
    if process.exitcode:
        raise RunError("bench serve: the process that sends bad requests has failed; what it said is above")


def bother(url: str, rate: int, over, sent) -> None:
    """Sends a bad request every 1 / `rate` seconds until `over` is set, and counts them; every other one stops half-way."""
    place = urlsplit(url)
    assert place.hostname and place.port
    held: deque[socket.socket] = deque(maxlen=rate)
    began = time.monotonic()
    for number in itertools.count():
        connection = socket.create_connection((place.hostname, place.port), timeout=60)
        body = BAD[number // 2 % len(BAD)]
        head = f"POST {place.path}/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with contextlib.suppress(OSError):  # cut off, as expected
            connection.sendall((head + body)[: len(head) + len(body) // 2] if number % 2 else head + body)
        held.append(connection)
        sent.value += 1
        if over.wait(max(0.0, began + sent.value / rate - time.monotonic())):
            return


def _peer_app(peer, policy: Policy, response: int) -> Any:
    """Makes a simple server around `generate`."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    model, lock = peer.make_model(policy.config, policy.params, "float32"), asyncio.Lock()
    end = policy.tokenizer.eos_token_id

    async def complete(request: Request) -> JSONResponse:
        asked = await request.json()
        sample: Callable[[], np.ndarray] = peer.sampler(model, np.array([asked["prompt"]]), response, 1.0, end)
        async with lock:
            tokens = (await asyncio.to_thread(sample))[0].tolist()
        text = policy.tokenizer.decode(tokens, skip_special_tokens=True)
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": len(tokens), "total_tokens": 0}
        choices = [{"index": 0, "text": text, "finish_reason": "length", "logprobs": None}]
        answer = {"id": "0", "object": "text_completion", "created": 0, "model": "served"}
        return JSONResponse(answer | {"choices": choices, "usage": usage})

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
