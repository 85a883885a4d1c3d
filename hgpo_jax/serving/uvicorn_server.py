"""Uvicorn around the web application: sockets, limits on connections, and a server on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

KEEP_ALIVE = 30  # seconds that a connection may be without a request; official clients reuse theirs


def is_loopback(host: str) -> bool:
    """Whether only this machine's own programs can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket for clients. Raises OSError or OverflowError."""
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    # Connections inherit it; asyncio sets it only for sockets that it creates, and a piece would wait for the one before it.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def settings(app: Any, **more: Any) -> uvicorn.Config:
    """Returns uvicorn's settings for an application."""
    return uvicorn.Config(app, http="h11", lifespan="off", timeout_keep_alive=KEEP_ALIVE, **more)


@contextlib.contextmanager
def served(app: Any, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves an ASGI application on a thread, at an address of this machine; yields the URL of its API."""
    with listen(host, 0) as listening:
        server = uvicorn.Server(settings(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()
