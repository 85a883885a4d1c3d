"""Limits on clients' connections: who may connect, and for how long."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.h11_impl import H11Protocol

GRACE = 30.0  # timeout in seconds for a body to arrive, and for the rest of an answer to be read


def is_loopback(host: str) -> bool:
    """Whether only this machine's own programs can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local(header: bytes) -> bool:
    """Whether a Host or an Origin names this machine itself."""
    text = header.decode("latin-1")
    try:
        return is_loopback(urlsplit(text if "://" in text else f"//{text}").hostname or "")
    except ValueError:
        return False


class Connection(H11Protocol):
    """Uvicorn's connection, closed without a request within one to two times GRACE seconds: its own timer starts after one.

    An answer that is not read is not kept for longer, either.
    """

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        # asyncio does this only for sockets that it creates; without it a piece waits up to 40 ms for the one before it.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._look(object(), 0)

    def _look(self, cycle: Any, unread: int) -> None:
        """Compares with the state GRACE seconds ago: the latest request, and bytes of answers that the client had not read."""
        now = self.transport.get_write_buffer_size()
        if self.cycle is cycle and not self.transport.is_closing():
            busy = self.cycle is not None and not self.cycle.response_complete
            if not busy or (self.flow.write_paused and now == unread):
                self.transport.close()
        if self.transport.is_closing():
            self.loop.call_later(GRACE, self._leave)
        else:
            self.loop.call_later(GRACE, self._look, self.cycle, now)

    def _leave(self) -> None:
        if self in self.connections:  # closing alone waits until the client has read everything
            self.transport.abort()
