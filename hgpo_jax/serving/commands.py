"""The commands that play episodes: how they start, what ends them, and why an episode failed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hgpo_jax.serving.fork_server import Forked, ForkServer
from hgpo_jax.utils.errors import ConfigError, one_line

MAX_OUTPUT = 2**26  # bytes that a command may write to its terminal
# Variables that send an agent's requests elsewhere, or name who asks; what else its clients read stays as it is.
_ADDRESS = re.compile(
    r"(OPENAI|ANTHROPIC)_(\w*(BASE|BASE_URL|API_URL|KEY|TOKEN|HEADERS|SOCKET)|API_TYPE|API_VERSION|ORG_ID|ORGANIZATION|PROJECT\w*)"
    r"|CLAUDE_CODE_(USE_(BEDROCK|VERTEX|FOUNDRY)|OAUTH_TOKEN)"
)
USUAL = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a number in the system prompt that differs from request to request
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
MOMENT = 0.5  # seconds between looks at what a command does
# Kinds of failures. No answer is to blame for the first; the metrics have the share of each as `failed/KIND`.
KINDS = INFRASTRUCTURE, CRASH, CONTEXT, SILENCE, NO_REWARD = "infrastructure", "crash", "context", "silence", "no_reward"


class Failure(NamedTuple):
    """The reason why an episode failed: one of KINDS, and a description in a line."""

    kind: str
    reason: str


class Launcher:
    """Starts a command on this machine, again and again.

    Args:
      command: its words.
      preload: modules that one process imports, from which the command is forked; none: it is started anew.
      host: the address of the trainer's machine.

    Raises ConfigError for modules that cannot be imported.
    """

    def __init__(self, command: Sequence[str], preload: Sequence[str] = (), host: str = "127.0.0.1"):
        self._command, self._preload, self.host = command, preload, host
        self._forks = fork_server(command, preload) if preload else None

    def revive(self) -> None:
        """Replaces the process that forks, if it was killed. Raises ConfigError."""
        if self._forks and self._forks.ended:
            self._forks = fork_server(self._command, self._preload)

    def start(self, variables: dict[str, str]) -> Running:
        """Starts the command with these environment variables. Raises OSError."""
        variables = _environment(self.host) | variables
        with contextlib.ExitStack() as held:
            output = held.enter_context(tempfile.TemporaryFile())
            process = self._forks.start(variables, output) if self._forks else self._begin(variables, output)
            held.pop_all()
            return Running(process, output)

    def _begin(self, variables: dict[str, str], output: Any) -> subprocess.Popen:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )

    def close(self) -> None:
        """Ends the process that forks; commands end with their rollout."""
        if self._forks:
            self._forks.close()


class Running:
    """A command that runs on this machine, and the file with its output."""

    def __init__(self, process: subprocess.Popen | Forked, output: Any):
        self._process, self._output = process, output

    def wait(self) -> tuple[int | None, int]:
        """Waits a moment; returns the exit code, None if it has not ended, and how many bytes it has written."""
        try:
            code = self._process.wait(timeout=MOMENT)
        except subprocess.TimeoutExpired:
            code = None
        return code, os.fstat(self._output.fileno()).st_size

    def end(self) -> str:
        """Kills the command and its children; returns the last line that it wrote."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._output:
            return _last_line(self._output)


class Commands:
    """Runs a command repeatedly, several at a time; a context manager that ends all of them.

    Processes that a command detaches (`setsid`) are not ended.

    launcher: a Launcher, or a ray_commands.RayLauncher.
    time_limit: timeout in seconds after which a command that neither asks the policy nor ends is killed.
    """

    def __init__(self, launcher: Any, time_limit: float):
        self._launcher, self._time_limit = launcher, time_limit
        self._stopping = threading.Event()

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the running commands, and starts no others."""
        self._stopping.set()

    def run(self, session, variables: dict[str, str]) -> Failure | None:
        """Runs the command for one session; returns its failure, if any."""
        if self._stopping.is_set():
            return Failure(INFRASTRUCTURE, "stopped")
        try:
            running = self._launcher.start(variables)
        except OSError as error:
            return Failure(INFRASTRUCTURE, f"its command could not be started: {error.strerror}")
        session.started()
        code = None
        try:
            code = self._watch(running, session)
        finally:
            said = running.end()
        if not isinstance(code, int):
            return code
        if code < 0:
            return Failure(CRASH, f"its command was ended by signal {-code}")
        return Failure(CRASH, f"its command ended with {code}: {said}") if code else None

    def _watch(self, running, session) -> Failure | int:
        """Waits for the end of a command; returns its exit code, or why it must be ended."""
        while True:
            try:
                code, written = running.wait()
            except OSError as error:  # its node of a cluster
                return Failure(INFRASTRUCTURE, f"{error.strerror}")
            if code is not None:
                return code
            if self._stopping.is_set():
                return Failure(INFRASTRUCTURE, "stopped")
            if written > MAX_OUTPUT:
                return Failure(CRASH, f"its command wrote more than {MAX_OUTPUT:,} bytes")
            if session.silent > self._time_limit:
                return Failure(SILENCE, f"its command neither asked nor ended in {self._time_limit:g} s")


def command_of(text: str) -> list[str]:
    """Splits a command into words. Raises ConfigError for one that cannot be started."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"env.command={text}: {error}") from None
    if not words:
        raise ConfigError('env.command=: env.name=agent needs the command of an episode, as in env.command="python agent.py"')
    if shutil.which(words[0], path=_path()) is None:
        raise ConfigError(f"env.command={text}: there is no program {words[0]}")
    program, file = Path(words[0]).name, (words[1:] or ["-"])[0]
    if program.startswith("python") and not file.startswith("-") and not Path(file).exists():
        raise ConfigError(f"env.command={text}: there is no file {file} in {Path.cwd()}")
    return words


def fork_server(command: Sequence[str], preload: Sequence[str]) -> ForkServer:
    """Starts the process that imports modules and forks the commands. Raises ConfigError."""
    found = Path(shutil.which(command[0], path=_path()) or "")
    ours = found.parent == Path(sys.executable).parent and found.name.startswith("python")
    if not (ours and len(command) > 1 and (not command[1].startswith("-") or (command[1] == "-m" and len(command) > 2))):
        given = f"env.preload={','.join(preload)}"
        raise ConfigError(f"{given}: needs a command `python FILE` or `python -m MODULE`, not env.command={' '.join(command)}")
    try:
        return ForkServer(command[1:], preload, _environment("127.0.0.1"))
    except ValueError as error:
        raise ConfigError(f"env.preload={error}") from None


def _environment(host: str) -> dict[str, str]:
    """Returns a command's environment: an agent needs no accelerator, must not use a proxy for the trainer's machine and asks
    nobody but the policy. Unless variables say otherwise, it reports to nobody, and Claude Code asks for its task alone,
    with equal prompts at equal states. host: that machine's address."""
    local = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), host]))
    kept = {name: value for name, value in os.environ.items() if not _ADDRESS.fullmatch(name)}
    ours = {"JAX_PLATFORMS": "cpu", "NO_PROXY": local, "no_proxy": local, "PATH": _path()}
    return USUAL | kept | ours


def _path() -> str:
    """Returns the search path for programs, in which `python` is the interpreter that runs this."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def variables_of(url: str, session, task: int, split: str) -> dict[str, str]:
    """Returns the environment variables that tell a command where the policy is, and what to play."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,  # as older clients and LiteLLM call it
        "OPENAI_API_KEY": session.name,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.name,
        "HGPO_SESSION": session.name,
        "HGPO_TASK": str(task),
        "HGPO_SPLIT": split,
        "HGPO_TURNS": str(session.max_turns),
    }


def _last_line(file) -> str:
    """Returns the last line that a command has written, for a message."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4000))
    lines = file.read().decode(errors="replace").split("\n")
    return one_line(next((line for line in reversed(lines) if line.strip()), "it said nothing"))[:500]
