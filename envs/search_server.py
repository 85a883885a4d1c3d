"""`python -m hgpo_jax.envs.search_server`: a retrieval server in Search-R1's protocol over the index of `env.name=search`.

    python -m hgpo_jax.envs.search_server --data FOLDER --port 8000        the passages of a folder (envs/search/files.py)
    python -m hgpo_jax.envs.search_server --passages 300000                those of the generated world
    curl localhost:8000/retrieve -d '{"queries": ["who founded ashbury?"], "topk": 3, "return_scores": true}'

It answers {"result": [[{"document": {"contents": "..."}, "score": 4.3}, ...]]}, a list for each query, without
return_scores the documents alone. What it cannot read is answered with status 400 and {"error": "..."}.
"""

from __future__ import annotations

import argparse
import functools
import json
import socket
from pathlib import Path
from typing import Any

from hgpo_jax.envs import command_line
from hgpo_jax.envs.command_line import Parser, whole_number
from hgpo_jax.envs.search.makers import retriever
from hgpo_jax.envs.search.text import Retriever

TOP_K, MOST = 3, 100  # passages for a query
MAX_QUERIES, MAX_BODY = 1024, 4_000_000  # queries and bytes of a request


def application(passages: Retriever):
    """Returns the ASGI application over these passages. Raises ImportError without the packages of the extra `serve`."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def retrieve(request: Request) -> JSONResponse:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return JSONResponse({"error": f"the body has more than {MAX_BODY:,} bytes"}, 400)
        try:
            queries, k, scores = read_request(bytes(body))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        found = await run_in_threadpool(passages.retrieve, queries, k)
        return JSONResponse({"result": [[_item(*each, scores) for each in one] for one in found]})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def read_request(body: bytes) -> tuple[list[str], int, bool]:
    """Returns (queries, passages for each, whether scores are asked for) of a request's body. Raises ValueError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is no JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("the body is no JSON object")
    queries, k = fields.get("queries"), fields.get("topk")
    if not isinstance(queries, list) or len(queries) > MAX_QUERIES or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"queries: must be a list of at most {MAX_QUERIES} texts")
    k = TOP_K if k is None else k
    if type(k) is not int or not 1 <= k <= MOST:
        raise ValueError(f"topk: must be a whole number from 1 to {MOST}")
    return queries, k, fields.get("return_scores") is True


def _item(passage: str, score: float, scores: bool) -> dict[str, Any]:
    document = {"contents": passage}
    return {"document": document, "score": score} if scores else document


def main() -> None:
    p = Parser(
        prog="python -m hgpo_jax.envs.search_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--data", default="", metavar="FOLDER", help="folder with passages.jsonl; default: the generated world")
    number = functools.partial(whole_number, low=24)
    p.add_argument("--passages", type=number, default=3000, metavar="N", help="of the generated world; default: 3000")
    p.add_argument("--cache", type=Path, default=Path("runs/cache"), metavar="FOLDER", help="of indexes; default: runs/cache")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1, this machine alone")
    port = functools.partial(whole_number, low=0)
    p.add_argument("--port", type=port, default=8000, metavar="N", help="default: 8000; 0: any that is free")
    args = p.parse_args()
    try:
        import uvicorn

        print("indexing the passages, where no index is kept yet: 1.6 minutes for a million", flush=True)
        app = application(retriever(args.cache / "search", args.data, args.passages))
    except ValueError as error:
        raise ValueError(f"--data {args.data}: {error}" if args.data else str(error)) from None
    except ImportError as error:
        raise ValueError(f"search_server: needs the package {error.name}; pip install 'hgpo_jax[serve]'") from None
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listening = socket.create_server((args.host, args.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {args.host} --port {args.port}: cannot listen there: {error}; give another") from None
    with listening:
        print(f"passages: http://{args.host}:{listening.getsockname()[1]}/retrieve", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listening])


if __name__ == "__main__":
    command_line.run(main, (ValueError, ImportError))
