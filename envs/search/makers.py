"""The factories of `env.name=search` and `search_team`: of an environment to train in, and of one with held-out questions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hgpo_jax.envs.search.files import FileSearch, folder_passages, read_folder
from hgpo_jax.envs.search.retrieval_client import RetrievalError, RetrievalServer, without_user
from hgpo_jax.envs.search.team import FileTeam, GeneratedTeam
from hgpo_jax.envs.search.text import GeneratedSearch, SearchText, world_passages
from hgpo_jax.envs.search.world import World

Maker = Callable[[], SearchText]
Kinds = tuple[type[GeneratedSearch], type[FileSearch]]  # with a generated world, and with questions of a file
ALONE: Kinds = (GeneratedSearch, FileSearch)
TEAM: Kinds = (GeneratedTeam, FileTeam)


def search_makers(
    kinds: Kinds, cache: Path, data: str, url: str, passages: int, top_k: int, max_turns: int, patience: float = 60.0
) -> tuple[Maker, Maker]:
    """Returns the factories of an environment for training, and of one with held-out questions.

    Args:
      kinds: ALONE or TEAM.
      cache: folder of indexes.
      data: folder of questions and passages (`files.py`); "": the generated world.
      url: of a server that finds passages, which is asked once; "": an index here.
      passages: of the generated world.
      top_k, max_turns: as in `SearchText`. patience: as in `RetrievalServer`.

    Raises ValueError, in one line that begins with the field and its value.
    """
    options: dict[str, Any] = {"top_k": top_k, "max_turns": max_turns}
    if url:
        options["retriever"] = _server(url, top_k, patience)
    generated, listed = kinds
    make: Callable[..., SearchText] = functools.partial(generated.open, cache, passages, **options)
    if data:
        try:
            read_folder(data)  # faults are found before a run begins
            if not url:
                folder_passages(Path(data), cache, ", or give env.retriever=URL, too")
        except (ValueError, OSError) as error:
            raise ValueError(f"data={data}: {error}") from None
        make = functools.partial(listed.open, Path(data), cache, **options)
    return functools.partial(make, held_out=False), functools.partial(make, held_out=True)


def retriever(cache: Path, data: str, passages: int):
    """Returns the passages of a folder or, without one, of the generated world. Raises ValueError."""
    return folder_passages(Path(data), cache) if data else world_passages(cache, World(passages))


def _server(url: str, top_k: int, patience: float) -> RetrievalServer:
    try:
        server = RetrievalServer(url, patience)
        server.retrieve(["hello"], top_k)
    except (ValueError, RetrievalError) as error:
        reason = str(error).removeprefix(f"{without_user(url)}: ")
        raise ValueError(f"retriever={without_user(url)}: {reason}; python -m hgpo_jax.envs.search_server starts one") from None
    return server
