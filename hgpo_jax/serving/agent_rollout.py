"""User programs as players: every episode starts a command that talks to the policy through OpenAI's or Anthropic's API.

    python -m hgpo_jax.train policy=smollm2 warm_start=none env.name=agent env.command="python my_agent.py" learner.lr=1e-6

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

With `env.workers=ray:N` commands run on the nodes of a Ray cluster (`ray_commands.py`), in a folder of the same path, with the
variables of the node. An episode whose node or actor dies is left out.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from hgpo_jax.config import Config
from hgpo_jax.config.policies import SHARED
from hgpo_jax.config.workers import workers_of
from hgpo_jax.policy import ModelConfig, Policy, network
from hgpo_jax.policy.chat_template import ChatFrame, end_tokens
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.requirements import ONE_ROLE
from hgpo_jax.rollout.result import RolloutResult, Story
from hgpo_jax.rollout.runners import check_context
from hgpo_jax.rollout.tasks import task_numbers
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.sampling.slot_programs import SlotPrograms
from hgpo_jax.serving.commands import (
    CONTEXT,
    CRASH,
    INFRASTRUCTURE,
    KINDS,
    NO_REWARD,
    Commands,
    Failure,
    Launcher,
    command_of,
    variables_of,
)
from hgpo_jax.serving.engine import Engine
from hgpo_jax.utils.errors import ConfigError, RunError

log = logging.getLogger(__name__)

# Its log-probabilities are of other distributions than the learner's, who would need a set of tokens for each one sampled: at a
# vocabulary of 49,152 that is 6 KiB.
NOT_LEARNED = "what constrains an answer is not learned from; describe the JSON in the prompt, or make it a tool"
ANSWER_LIMIT = 3600.0  # timeout of a request in seconds, most of which it may wait for a slot


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
            ends = self._frame.end_tokens if self._frame else end_tokens(tokenizer, rollout.stop)
        except ValueError as error:
            raise ConfigError(f"policy.source={config.policy.source}: {error}") from None
        self.end_tokens = (ends,)
        self._programs = SlotPrograms(network(model), mesh, max_new=rollout.response_limit, end_tokens=ends)
        self._model, self._tokenizer, self._mesh = model, tokenizer, cast(Mesh, mesh)  # a rollout needs real devices
        self._store = rollout.store * 2**20
        self._prompt_limit, self._turns, self._time_limit = rollout.prompt_limit, env.max_turns, env.time_limit
        self._excludes, self._played = env.failed == "exclude", False  # whether an episode has ever ended properly
        self._batch = rollout.prompt_groups * rollout.group_size
        self._slots = min(self._batch, rollout.decode_batch_size * mesh.shape["data"])
        workers = workers_of(env.workers)
        self._at_a_time = workers.number or self._slots
        self.num_tasks, self.num_held_out_tasks = None, env.num_held_out_tasks or None
        # Last, so that what is refused above leaves no process.
        self._launcher: Any
        if workers.ray:
            from hgpo_jax.serving.ray_commands import RayLauncher  # who needs no cluster needs no ray

            self._launcher = RayLauncher(env.command, env.preload, workers.number, env.time_limit)
        else:
            self._launcher = Launcher(command_of(env.command), env.preload)

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
            waiting_limit=self._batch * self._turns,  # all that may be asked for: none of the trainer's own agents is refused
            store=self._store,
            programs=self._programs,
        )
        api = Api(
            engine,
            self._tokenizer,
            "",
            key="",
            time_limit=ANSWER_LIMIT,
            sessions=Sessions(sessions),
            grammars=NOT_LEARNED,
            frame=self._frame,
        )
        self._launcher.revive()
        with engine, served(api, self._launcher.host) as url, Commands(self._launcher, self._time_limit) as commands:
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
        left_out = self._left_out(sessions, failures)
        counts["out_of_turns"] = sum(session.spent for session in sessions)
        kinds = [failure.kind for failure in failures.values()]
        counts |= {f"failed/{kind}": kinds.count(kind) / len(sessions) for kind in KINDS}
        goals = [f"task {task} of {split}" for task in tasks]
        return episodes_of(sessions, goals, groups, empty, left_out, counts)

    def _left_out(self, sessions: Sequence, failures: dict[int, Failure]) -> dict[int, str]:
        """Returns the reason of each failed episode that is left out, and marks the others as lost. Raises RunError."""
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
        return left_out

    def _no_episodes(self) -> Episodes:
        return Episodes.zeros(self._batch, self._turns, self._prompt_limit, self._programs.max_new, finished=True)

    def select_tasks(self, stream: str, seed: int | None, indices) -> list[int]:
        return task_numbers(stream, seed, np.asarray(indices), self.num_held_out_tasks if stream == "held_out" else None)

    def close(self) -> None:
        """Ends the processes that start commands; the commands end with their rollout."""
        self._launcher.close()

    def abstract_episodes(self, params, inputs: tuple) -> Episodes:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._no_episodes())

    def has_expert(self) -> bool:
        return False

    def compile(self, params, inputs: tuple) -> None:
        """Does nothing: shapes depend on the prompts, and each compiles when it first occurs."""

    def story(self, result: RolloutResult, index: int) -> Story:
        assert result.report is not None
        return result.report.story(result.episodes, index, self.roles)


def _play(commands: Commands, url: str, split: str, engine, session, task: int) -> Failure | None:
    """Plays one episode; returns its failure, if any."""
    failure = commands.run(session, variables_of(url, session, task, split))
    if engine.failure:
        raise RunError("the sampler has failed; what it said is above")
    if not session.turns and session.overflowed:
        return Failure(CONTEXT, "its first prompt is longer than rollout.prompt_limit")
    if not session.turns:
        asked_nothing = failure.reason if failure else "its command asked the policy nothing"
        return Failure(INFRASTRUCTURE, session.refused or asked_nothing)
    if session.ended or session.spent:
        return None
    if session.refused:  # no fault of the policy's
        return Failure(INFRASTRUCTURE, session.refused)
    failure = failure or Failure(NO_REWARD, "its command ended without a reward")
    return failure._replace(kind=CONTEXT) if session.overflowed and failure.kind in (CRASH, NO_REWARD) else failure
