"""Python programs that start in a moment: one process imports what they need, and forks a process of its own for each start.

    server = ForkServer(["agent.py", "argument"], ["openai"], os.environ)    # or ["-m", "my.agent", "argument"]
    process = server.start(os.environ | {"NAME": "value"}, output)           # like a subprocess.Popen

What a program changes in its process ends with it; it leads a session of its own. Only the modules are shared, as they are
after their import: a random generator or a client that one makes there is the same in every program. The server ends, and kills
what runs, when the process that made it ends.

This file is also the program of the server, which therefore imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

NUMBER = struct.Struct("i")
READY = b"\0"


class Forked:
    """A running program, with the methods of a subprocess.Popen that `commands.Running` uses."""

    def __init__(self, pid: int, connection: socket.socket):
        self.pid, self._connection = pid, connection
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, or minus the signal's number. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                code = self._connection.recv(NUMBER.size)
            except TimeoutError:
                assert timeout is not None
                raise subprocess.TimeoutExpired("a forked program", timeout) from None
            self._connection.close()
            self.returncode = NUMBER.unpack(code)[0] if code else -signal.SIGKILL  # the server was killed
        return self.returncode


class ForkServer:
    """Starts one Python program again and again; may be used by several threads.

    Args:
      program: a file or `-m` and a module, and the arguments.
      preload: modules to import once.
      environment: the server's environment variables, which the import finds.

    Raises ValueError, in a line that begins with a module's name, if it cannot be imported or starts a thread of Python's.
    """

    def __init__(self, program: Sequence[str], preload: Sequence[str], environment: Mapping[str, str]):
        self._connection, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            arguments = [str(theirs.fileno()), json.dumps([list(program), list(preload)])]
            self._process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is for the parent
            )
        if (answer := self._connection.recv(1000)) != READY:
            self.close()
            raise ValueError(answer.decode(errors="replace") or f"{','.join(preload)}: the process died while it was imported")

    @property
    def ended(self) -> bool:
        """Whether the server has died."""
        return self._process.poll() is not None

    def start(self, environment: Mapping[str, str], output) -> Forked:
        """Starts the program, whose output is written to an open file. Raises OSError."""
        ours, theirs = socket.socketpair()
        request = json.dumps([dict(environment), os.getcwd()]).encode()
        with theirs, self._lock:
            socket.send_fds(self._connection, [NUMBER.pack(len(request))], [output.fileno(), theirs.fileno()])
            self._connection.sendall(request)
        if not (pid := ours.recv(NUMBER.size)):
            raise OSError(errno.ECHILD, "the process that forks it has failed")
        return Forked(NUMBER.unpack(pid)[0], ours)

    def close(self) -> None:
        """Ends the server, and what still runs."""
        self._connection.close()
        self._process.wait()


def _serve(connection: socket.socket) -> tuple[dict[str, str], str] | None:
    """Forks until the connection ends. Returns, in each forked process, its environment variables and its folder."""
    awake, waker = os.pipe()  # a byte for every child that has ended
    os.set_blocking(awake, False)
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    running: dict[int, socket.socket] = {}
    waits: list[Any] = [connection, awake]
    while True:
        ready, _, _ = select.select(waits, [], [])
        if awake in ready:
            os.read(awake, 4096)
            _tell_codes(running)
        if connection not in ready:
            continue
        length, files, _, _ = socket.recv_fds(connection, NUMBER.size, 2)
        if not length:
            break
        request = _receive(connection, NUMBER.unpack(length)[0])
        output, parent = files[0], socket.socket(fileno=files[1])
        try:
            pid = os.fork()
        except OSError:  # the parent finds its connection closed
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (connection, *running.values()):
                other.close()
            _detach(output, parent)
            os.close(awake)
            os.close(waker)
            return json.loads(request)
        os.close(output)
        if pid < 0:
            parent.close()
        else:
            running[pid] = parent
    for pid in running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receives so many bytes, also where signals arrive between them; fewer if the connection ends."""
    received = b""
    while len(received) < size and (part := connection.recv(size - len(received))):
        received += part
    return received


def _tell_codes(running: dict[int, socket.socket]) -> None:
    """Tells the exit codes of the programs that have ended."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if parent := running.pop(ended[0], None):  # not a process that an import has started
                with parent, contextlib.suppress(OSError):
                    parent.send(NUMBER.pack(os.waitstatus_to_exitcode(ended[1])))


def _detach(output: int, parent: socket.socket) -> None:
    """Makes a forked process the leader of a session, which writes to a file, and tells its number."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    with parent:
        parent.send(NUMBER.pack(os.getpid()))


def _become(program: list[str], environment: dict[str, str], folder: str) -> None:
    """Runs the program in a forked process, which ends as a newly started one would."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:  # `random` does so itself
        sys.modules["numpy"].random.seed()
    if program[0] == "-m":
        sys.argv = program[1:]
        if not hasattr(sys.modules.get(program[1]), "__path__"):  # of a package runpy runs its __main__
            sys.modules.pop(program[1], None)  # it may be imported, of which runpy would warn
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(os.path.abspath(program[0]), run_name="__main__")


def _import(modules: Sequence[str]) -> str:
    """Imports modules; returns what is wrong with one, "" if nothing is."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            return " ".join(f"{name}: cannot be imported: {error!r}".split())[:900]
        if (count := threading.active_count()) > 1:
            return f"{name}: its import starts {count - 1} threads, which a forked process would lack; leave it out"
    return ""


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    program, preload = json.loads(sys.argv[2])
    sys.path[0] = os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.abspath(program[0]))
    if wrong := _import(preload):
        connection.sendall(wrong.encode())
        return
    gc.collect()
    gc.freeze()  # else every program's end would look through all of the modules, and copy their memory
    sys.stdout.flush()  # else every program would write it again
    connection.sendall(READY)
    if request := _serve(connection):
        _become(program, *request)


if __name__ == "__main__":
    _main()
