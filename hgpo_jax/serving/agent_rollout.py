"""User programs as players: every episode starts a command that talks to the policy through OpenAI's or Anthropic's API.

    python -m hgpo_jax.train policy=smollm2 warm_start=none env.name=agent env.command="python my_agent.py"

The policy is served during a rollout (`serving/`), and every request of an episode is one of its turns. A command finds these
variables in its environment:

    OPENAI_BASE_URL, OPENAI_API_KEY    address of the policy; the key belongs to the episode and identifies its requests
    ANTHROPIC_BASE_URL, ..._API_KEY    the same for Anthropic's client, whose address is without /v1
    HGPO_TASK, HGPO_SPLIT              the number of the task to play, and its split, `train` or `held_out`
    HGPO_TURNS                         how many requests it may make
    HGPO_SESSION                       the episode's name: the program ends by posting its reward to /sessions/NAME/reward

The samples of a turn depend on the episode's key, the turn and the prompt alone, in the rollout's distribution, whatever
temperature a program asks for. A command that fails costs only its own episode, which is left out if it never made a request.
After an answer, a crash, a conversation that exceeds a prompt, silence or a missing final reward is the policy's failure: the
episode is lost and keeps the rewards that were posted; with `env.failed=exclude` it is left out, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from hgpo_jax.config import Config
from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy import ModelConfig, Policy, network
from hgpo_jax.policy.chat_template import ChatFrame, end_tokens
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.requirements import ONE_ROLE
from hgpo_jax.rollout.result import RolloutResult, Story
from hgpo_jax.rollout.runners import check_context
from hgpo_jax.rollout.tasks import task_numbers
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.sampling.slot_programs import SlotPrograms
from hgpo_jax.serving.engine import Engine
from hgpo_jax.serving.fork_server import Forked, ForkServer
from hgpo_jax.utils.errors import ConfigError, RunError, one_line

log = logging.getLogger(__name__)

ANSWER_LIMIT = 3600.0  # timeout of a request in seconds, most of which it may wait for a slot
MAX_OUTPUT = 2**26  # bytes that a command may write to its terminal
# Kinds of failures. No answer is to blame for the first; the metrics have the share of each as `failed/KIND`.
KINDS = INFRASTRUCTURE, CRASH, CONTEXT, SILENCE, NO_REWARD = "infrastructure", "crash", "context", "silence", "no_reward"


class Failure(NamedTuple):
    """The reason why an episode failed: one of KINDS, and a description in a line."""

    kind: str
    reason: str


class AgentRunner:
    """Runs `env.command` for each episode; otherwise like a `runners.TextRunner`.

    Raises ConfigError for a command that cannot be started, for several processes, or for a missing package.
    """

    task_types, roles = ("agent",), ONE_ROLE
    signals: tuple[str, ...] = ()

    def __init__(self, config: Config, models: dict[str, ModelConfig], tokenizer, mesh: Mesh | AbstractMesh):
        env, rollout = config.env, config.rollout
        check_context(config, models)
        (model,) = models.values()  # an agent has one role
        self._command = command_of(env.command)
        self._preload = env.preload
        try:
            import hgpo_jax.serving.uvicorn_server  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"env.name=agent: needs the package {error.name}; pip install 'hgpo_jax[serve]'") from None
        if jax.process_count() > 1:
            raise ConfigError("env.name=agent: cannot run as one of several processes")
        if tokenizer is None:
            raise ConfigError(f"policy.source={config.policy.source}: has no tokenizer")
        self._frame: ChatFrame | None = None
        try:
            if getattr(tokenizer, "chat_template", None):
                self._frame = ChatFrame(tokenizer, thinking=rollout.thinking, stop=rollout.stop)
            self.end_tokens = self._frame.end_tokens if self._frame else end_tokens(tokenizer, rollout.stop)
        except ValueError as error:
            raise ConfigError(f"policy.source={config.policy.source}: {error}") from None
        self._programs = SlotPrograms(network(model), mesh, max_new=rollout.response_limit, end_tokens=self.end_tokens)
        self._model, self._tokenizer, self._mesh = model, tokenizer, cast(Mesh, mesh)  # a rollout needs real devices
        self._store = rollout.store * 2**20
        self._prompt_limit, self._turns, self._time_limit = rollout.prompt_limit, env.max_turns, env.time_limit
        self._excludes, self._played = env.failed == "exclude", False  # whether an episode has ever ended properly
        self._batch = rollout.prompt_groups * rollout.group_size
        self._slots = min(self._batch, rollout.decode_batch_size * mesh.shape["data"])
        self._at_a_time = env.workers or self._slots
        self.num_tasks, self.num_held_out_tasks = None, env.num_held_out_tasks or None
        # Last, so that what is refused above leaves no process.
        self._forks = fork_server(self._command, env.command, env.preload) if env.preload else None

    def rollout(self, params, tasks, keys, groups, decoding: Decoding, *, held_out: bool = False) -> RolloutResult:
        """Plays B episodes.

        Raises RunError if all are left out, or if all have failed, for any reason, before one ever ended properly.
        """
        # These need packages of the extra serve, whose absence is told above.
        from hgpo_jax.serving.sessions import Session, Sessions, episodes_of
        from hgpo_jax.serving.uvicorn_server import served
        from hgpo_jax.serving.web_app import Api

        jax.block_until_ready(params)  # from here on another thread uses the devices
        seeds, split = np.asarray(jax.random.key_data(keys)), "held_out" if held_out else "train"
        sessions = [Session(secrets.token_hex(16), self._turns, decoding, seed) for seed in seeds]
        policy, empty = Policy(self._model, params[SHARED], self._tokenizer), self._no_episodes()
        engine = Engine(
            policy,
            self._mesh,
            slots=self._slots,
            prompt_limit=self._prompt_limit,
            response_limit=self._programs.max_new,
            waiting_limit=self._batch,
            store=self._store,
            programs=self._programs,
        )
        api = Api(engine, self._tokenizer, "", key="", time_limit=ANSWER_LIMIT, sessions=Sessions(sessions), frame=self._frame)
        if self._forks and self._forks.ended:  # it was killed
            self._forks = fork_server(self._command, " ".join(self._command), self._preload)
        with engine, served(api) as url, Commands(self._command, self._time_limit, self._forks) as commands:
            play = functools.partial(_play, commands, url, split, engine)
            with ThreadPoolExecutor(self._at_a_time, "agents") as threads:
                try:
                    outcomes = list(threads.map(play, sessions, tasks))
                except BaseException:  # possibly a signal
                    commands.stop()
                    threads.shutdown(cancel_futures=True)
                    raise
            counts = engine.counts
        failures = {number: failure for number, failure in enumerate(outcomes) if failure}
        left_out = {
            n: failure.reason
            for n, failure in failures.items()
            if self._excludes or failure.kind == INFRASTRUCTURE or not sessions[n].turns
        }
        self._played |= len(failures) < len(sessions)
        if len(left_out) == len(sessions) or not self._played:
            raise RunError(f"env.command: failed in all {len(sessions)} episodes, in the first one: {failures[0].reason}")
        if lost := failures.keys() - left_out.keys():
            log.warning("%d of %d episodes are lost, the first one: %s", len(lost), len(sessions), failures[min(lost)].reason)
        for number in lost:
            sessions[number].lost = True
        counts["out_of_turns"] = sum(session.spent for session in sessions)
        kinds = [failure.kind for failure in failures.values()]
        counts |= {f"failed/{kind}": kinds.count(kind) / len(sessions) for kind in KINDS}
        goals = [f"task {task} of {split}" for task in tasks]
        return episodes_of(sessions, goals, groups, empty, self._programs.end_tokens, left_out, counts)

    def _no_episodes(self) -> Episodes:
        return Episodes.zeros(self._batch, self._turns, self._prompt_limit, self._programs.max_new)

    def select_tasks(self, stream: str, seed: int | None, indices) -> list[int]:
        return task_numbers(stream, seed, np.asarray(indices), self.num_held_out_tasks if stream == "held_out" else None)

    def close(self) -> None:
        """Ends the process that forks commands; the commands end with their rollout."""
        if self._forks:
            self._forks.close()

    def abstract_episodes(self, params, inputs: tuple) -> Episodes:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._no_episodes())

    def has_expert(self) -> bool:
        return False

    def compile(self, params, inputs: tuple) -> None:
        """Does nothing: shapes depend on the prompts, and each compiles when it first occurs."""

    def story(self, result: RolloutResult, index: int) -> Story:
        assert result.report is not None
        return result.report.story(result.episodes, index, self.roles)


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


def fork_server(command: list[str], text: str, preload: Sequence[str]) -> ForkServer:
    """Starts the process that imports modules and forks the commands. Raises ConfigError. text: the command as it was given."""
    found = Path(shutil.which(command[0], path=_path()) or "")
    ours = found.parent == Path(sys.executable).parent and found.name.startswith("python")
    if not (ours and len(command) > 1 and (not command[1].startswith("-") or (command[1] == "-m" and len(command) > 2))):
        given = f"env.preload={','.join(preload)}"
        raise ConfigError(f"{given}: needs a command `python FILE` or `python -m MODULE`, not env.command={text}")
    try:
        return ForkServer(command[1:], preload, _environment())
    except ValueError as error:
        raise ConfigError(f"env.preload={error}") from None


def _environment() -> dict[str, str]:
    """Returns a command's environment: an agent needs no accelerator, must not use a proxy for this machine, and asks nobody
    but the policy."""
    local = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), "127.0.0.1"]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    return kept | {"JAX_PLATFORMS": "cpu", "NO_PROXY": local, "no_proxy": local, "PATH": _path()}


def _path() -> str:
    """Returns the search path for programs, in which `python` is the interpreter that runs this."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def variables_of(url: str, session, task: int, split: str) -> dict[str, str]:
    """Returns the environment variables that tell a command where the policy is, and what to play."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": session.name,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.name,
        "HGPO_SESSION": session.name,
        "HGPO_TASK": str(task),
        "HGPO_SPLIT": split,
        "HGPO_TURNS": str(session.max_turns),
    }


def _play(commands: Commands, url: str, split: str, engine, session, task: int) -> Failure | None:
    """Plays one episode; returns its failure, if any."""
    failure = commands.run(session, variables_of(url, session, task, split))
    if engine.failure:
        raise RunError("the sampler has failed; what it said is above")
    if not session.turns and session.overflowed:
        return Failure(CONTEXT, "its first prompt is longer than rollout.prompt_limit")
    if not session.turns:
        return Failure(INFRASTRUCTURE, failure.reason if failure else "its command asked the policy nothing")
    if session.ended or session.spent:
        return None
    failure = failure or Failure(NO_REWARD, "its command ended without a reward")
    return failure._replace(kind=CONTEXT) if session.overflowed and failure.kind in (CRASH, NO_REWARD) else failure


class Commands:
    """Runs a command repeatedly, several at a time; a context manager that ends all of them.

    Processes that a command detaches (`setsid`) are not ended.

    time_limit: timeout in seconds after which a command that neither asks the policy nor ends is killed.
    forks: forks the command from a process that has imported its modules; None: it is started anew.
    """

    def __init__(self, command: list[str], time_limit: float, forks: ForkServer | None = None):
        self._command, self._time_limit, self._forks = command, time_limit, forks
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
        stopped = Failure(INFRASTRUCTURE, "stopped")
        if self._stopping.is_set():
            return stopped
        variables = _environment() | variables
        with tempfile.TemporaryFile() as output:
            try:
                process = self._started(variables, output)
            except OSError as error:
                return Failure(INFRASTRUCTURE, f"its command could not be started: {error.strerror}")
            session.started()
            try:
                while (code := _wait(process)) is None:
                    if self._stopping.is_set():
                        return stopped
                    if os.fstat(output.fileno()).st_size > MAX_OUTPUT:
                        return Failure(CRASH, f"its command wrote more than {MAX_OUTPUT:,} bytes")
                    if session.silent > self._time_limit:
                        return Failure(SILENCE, f"its command neither asked nor ended in {self._time_limit:g} s")
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the command and its children
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code < 0:
                return Failure(CRASH, f"its command was ended by signal {-code}")
            return Failure(CRASH, f"its command ended with {code}: {_last_line(output)}") if code else None

    def _started(self, variables: dict[str, str], output) -> subprocess.Popen | Forked:
        """Starts the command. Raises OSError."""
        if self._forks:
            return self._forks.start(variables, output)
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )


def _wait(process: subprocess.Popen | Forked) -> int | None:
    """Returns the exit code; None if the process does not end within a moment."""
    try:
        return process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return None


def _last_line(file) -> str:
    """Returns the last line that a command has written, for a message."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4000))
    lines = file.read().decode(errors="replace").split("\n")
    return one_line(next((line for line in reversed(lines) if line.strip()), "it said nothing"))[:500]
