"""A client of retrieval servers that speak Search-R1's protocol: its own, or `python -m hgpo_jax.envs.search_server`.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
    answers         {"result": [[{"document": {"contents": "..."}, "score": 1.5}, ...]]}, a list for each query

Without scores Search-R1's server leaves out the wrapping and gives the documents themselves.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from hgpo_jax.envs.command_line import one_line

TIME_LIMIT, TRIES = 10.0, 7  # seconds of a request; requests to a server that has never answered
WAIT, LONGEST_WAIT = 0.2, 5.0  # seconds before the second request, then twice as many up to the other
SLOW = 3  # requests that gave no answer in time, after which no other is sent
BUSY = (408, 429)  # what a server or proxy answers where a later try may help
REST = 30.0  # seconds for which a server that never answered is not asked again: other episodes would wait as long
MAX_BYTES = 16_000_000  # of an answer


class RetrievalError(RuntimeError):
    """Raised, in one line, for a server that gives no passages: it ends the episode, which is counted as failed."""


class _Unanswered(Exception):
    """The reason why another try may help. late: whether the time was over."""

    def __init__(self, reason: str, late: bool = False):
        super().__init__(reason)
        self.late = late


def without_user(url: str) -> str:
    """Returns a URL to be shown, without its user and password."""
    return re.sub("//[^/@]*@", "//...@", url[:200])


class RetrievalServer:
    """A retrieval server as a retriever.

    Args:
      url: http://HOST:PORT, with or without /retrieve.
      patience: seconds to wait for a server that has answered before, and restarts.
      time_limit: seconds to connect, and for a request and its answer, however slowly bytes arrive.
      tries: requests until a server answers for the first time; what an answer says is final.

    Raises ValueError for a URL that is none.
    """

    def __init__(self, url: str, patience: float = 60.0, *, time_limit: float = TIME_LIMIT, tries: int = TRIES):
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            parts, self._host = urlsplit(""), ""
        if parts.scheme not in ("http", "https") or not self._host:
            raise ValueError(f"{url:.200}: is no URL of a server; give http://HOST:PORT")
        if parts.username is not None:
            raise ValueError(f"{without_user(url)}: holds a user name, which cannot be sent; leave it out")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._path = (parts.path if parts.path.strip("/") else "/retrieve") + f"?{parts.query}" * bool(parts.query)
        self._url, self._patience, self._time_limit, self._tries = url, patience, time_limit, tries
        self._answered = False
        self._silent = -math.inf, ""  # when it failed to answer, and how

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """Returns the passages for each query with their scores, at most `k`, best first. Raises RetrievalError."""
        failed, reason = self._silent
        if time.monotonic() < failed + REST:
            raise RetrievalError(reason)
        body = json.dumps({"queries": list(queries), "topk": k, "return_scores": True}).encode()
        begin, tried, late, wait = time.monotonic(), 0, 0, WAIT
        while True:
            try:
                found = _read(self._post(body), len(queries), k)
                self._answered = True
                return found
            except _Unanswered as error:
                reason, late, tried = str(error), late + error.late, tried + 1
            except ValueError as error:
                raise RetrievalError(one_line(f"{self._url}: {error}")) from None
            waited = time.monotonic() + wait - begin
            if late == SLOW or (waited > self._patience if self._answered else tried == self._tries):
                break
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        self._silent = time.monotonic(), one_line(f"{self._url}: {reason}, {tried} times")
        raise RetrievalError(self._silent[1])

    def _post(self, body: bytes) -> bytes:
        """Posts a request and returns the answer. Raises _Unanswered, or ValueError for a refusal."""
        connection = self._connect(self._host, self._port, timeout=self._time_limit)
        late = threading.Event()

        def end() -> None:
            late.set()
            with contextlib.suppress(OSError, AttributeError):  # it has just been closed
                connection.sock.shutdown(socket.SHUT_RDWR)  # a read that waits ends at once

        timer = threading.Timer(self._time_limit, end)
        timer.daemon = True
        try:
            connection.connect()
            timer.start()
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read(MAX_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise _Unanswered(f"gave no answer in {self._time_limit:g} s", late=True) from None
            raise _Unanswered(f"cannot be asked ({type(error).__name__}: {error!s:.100})") from None
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            raise _Unanswered(f"gave no answer in {self._time_limit:g} s", late=True)
        if answer.status >= 500 or answer.status in BUSY:
            raise _Unanswered(f"answered with status {answer.status}")
        if answer.status != 200:
            raise ValueError(f"answered with status {answer.status}")
        if len(content) > MAX_BYTES:
            raise ValueError(f"answered with more than {MAX_BYTES:,} bytes")
        return content


def _read(content: bytes, queries: int, k: int) -> list[list[tuple[str, float]]]:
    """Reads an answer to so many queries. Raises ValueError for one that does not keep to the protocol."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"the answer is no JSON: {content[:60]!r}") from None
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or not all(isinstance(found, list) for found in result):
        raise ValueError('the answer has no "result", a list for each query')
    if len(result) != queries:
        raise ValueError(f"the answer is for {len(result)} queries, not {queries}")
    if longest := max((len(found) for found in result if len(found) > k), default=0):
        raise ValueError(f"the answer has {longest} passages for a query, not the {k} asked for")
    return [list(map(_passage, found)) for found in result]


def _passage(item: Any) -> tuple[str, float]:
    document, score = (item.get("document", item), item.get("score", 0.0)) if isinstance(item, dict) else (None, 0.0)
    contents = document.get("contents") if isinstance(document, dict) else document
    if not isinstance(contents, str):
        raise ValueError('a passage in the answer has no "contents"')
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError(f"a passage in the answer has the score {score!r:.50}")
    return contents, float(score)
