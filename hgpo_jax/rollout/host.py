"""Host rollouts: a policy plays environments that are Python programs, all episodes of a batch together.

    rollout = HostRollout(make_env, ChatFormat(tokenizer, "alfworld"), policy.graphdef, mesh, batch=128, history_length=2)
    episodes, report = rollout(params, tasks, keys, groups, Decoding())

A response that has ended becomes an action, its environment steps, and the episode's next prompt takes a slot of the sampler
while responses of other episodes go on (`sampling/`): no episode waits for the longest response of a turn. Decoding waits for
environments only while less than a fraction of the unfinished episodes is ready. A fraction of 1 waits for all, which makes a
rollout bit-identical however fast environments are. Token ids are kept as sampled. The samples of an episode depend on its
own key and turn alone, as in compiled rollouts.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from hgpo_jax.rollout.chat_prompts import Prompt
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.process_workers import ProcessWorkers
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.shared_workers import SharedWorkers
from hgpo_jax.rollout.workers import EnvSpec, LocalWorkers
from hgpo_jax.sampling.continuous_batching import SlotPrograms, SlotRequest, SlotSampler
from hgpo_jax.sampling.generate import Decoding


class HostRollout:
    """`rollout(params, tasks, keys, groups, decoding) -> RolloutResult` over text environments.

    Args:
      make_env: makes one environment (see `workers.py`); must be picklable if there are worker processes.
      format: prompts and actions, such as `chat_format.ChatFormat` or `words.WordFormat`.
      graphdef: that of the `Qwen2` whose parameters are passed. If roles have weights of their own, params and graphdef are
        dicts by the weights' name, and each of them has as many slots as a single one would have.
      mesh: episodes are split over its `data` and `fsdp` axes.
      batch: B, episodes per call.
      history_length: K, observation-action pairs in a prompt.
      response_limit: R, tokens of the longest response.
      decode_batch_size: episodes that each index of the `data` axis decodes at a time.
      strict: whether an inadmissible action is invalid, like a malformed response.
      workers: processes that step the environments; 0 steps them in this process, where one that hangs hangs the run.
      time_limit: timeout in seconds, after which a worker's episode counts as hung.
      ready_fraction: fraction of the unfinished episodes whose environments must have answered before decoding goes on.
      weights: the name of each role's weights, if roles have weights of their own.

    Attributes:
      task_types: names; `Episodes.task` is an index into them.
      num_tasks: number of tasks of the environment, None if it generates them.
      max_turns: T, turns of the longest episode.
      roles: names; `Episodes.agents` is an index into them.

    Raises:
      ValueError: the environment cannot be made.
    """

    def __init__(
        self,
        make_env: Callable,
        format,
        graphdef,
        mesh: Mesh | AbstractMesh,
        *,
        batch: int,
        history_length: int,
        response_limit: int = 512,
        decode_batch_size: int = 64,
        strict: bool = False,
        workers: int = 0,
        time_limit: float = 60.0,
        ready_fraction: float = 1.0,
        weights: Sequence[str] = (),
    ):
        self._batch, self._num_workers, self._time_limit = batch, workers, time_limit
        self._start_workers(make_env)
        self._format, self._strict, self._ready_fraction = format, strict, ready_fraction
        self._history_length, self._response_limit = history_length, response_limit
        self._weights = weights or ("",) * len(self.roles)
        make = functools.partial(SlotPrograms, mesh=mesh, max_new=response_limit, end_tokens=format.end_tokens)
        self._programs: SlotPrograms | dict[str, SlotPrograms] = (
            {name: make(one) for name, one in graphdef.items()} if isinstance(graphdef, dict) else make(graphdef)
        )
        self._slots = min(batch, decode_batch_size * mesh.shape["data"])

    def _start_workers(self, make_env: Callable) -> None:
        def make_workers():
            if not self._num_workers:
                return LocalWorkers(make_env, self._time_limit)
            return ProcessWorkers(make_env, self._num_workers, self._batch, self._time_limit)

        self._workers = SharedWorkers(make_workers) if jax.process_count() > 1 else make_workers()
        spec: EnvSpec = self._workers.spec
        self.task_types, self.num_tasks, self.max_turns, self.roles = spec

    def with_environment(self, make_env: Callable) -> HostRollout:
        """Returns the same rollout over another environment, such as held-out games; compiled programs are shared."""
        other = copy.copy(self)
        other._start_workers(make_env)
        return other

    def abstract_episodes(self) -> Episodes:
        """Returns the shapes and dtypes of the episodes of a call."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._no_episodes())

    def _no_episodes(self) -> Episodes:
        return Episodes.zeros(self._batch, self.max_turns, self._format.prompt_limit, self._response_limit)

    def __call__(self, params, tasks: Sequence[int] | np.ndarray, keys, groups, decoding: Decoding) -> RolloutResult:
        """Plays B episodes.

        Args:
          params: those of the policy.
          tasks: [B], number of each episode's task (`tasks.task_numbers`); the members of a prompt group share one.
          keys: [B], a random key for each episode, or [B, 2] as for `sampling.turn_keys`.
          groups: i32[B], prompt groups.

        Returns: Episodes of NumPy arrays and their report. `observations` have one column, the index of a text in
          `report.texts`. An episode whose environment failed has no turns.
        """
        if len(tasks) != self._batch:
            raise ValueError(f"tasks: has {len(tasks)} episodes, the rollout was built for batch={self._batch}")
        buffer = EpisodeBuffer(self._no_episodes(), groups, self._history_length, self._strict)
        counts = self.play(buffer, range(self._batch), params, tasks, keys, decoding)
        return buffer.result(counts)

    def play(
        self,
        buffer: EpisodeBuffer,
        episodes: Sequence[int],
        params,
        tasks: Sequence[int] | np.ndarray,
        keys,
        decoding: Decoding,
    ) -> dict[str, float]:
        """Plays some of a call's episodes, from their beginning, into its buffer; returns the sampler's figures."""
        tasks = [int(task) for task in tasks]
        programs = self._programs
        if not isinstance(programs, dict):
            programs, params = {"": programs}, {"": params}
        samplers = {
            name: SlotSampler(
                programs[name], params[name], keys, decoding, slots=self._slots, prompt_limit=self._format.prompt_limit
            )
            for name in programs
        }
        self._workers.discard_answers()
        self._workers.send([(episode, tasks[episode], ()) for episode in episodes])
        ready: list[int] = []  # episodes whose prompt waits for a slot
        prompts: dict[int, Prompt] = {}  # for the episodes in a slot
        truncated: list[int] = []  # episodes that a time limit has ended
        pending = len(episodes)  # episodes whose environments have yet to answer
        while ready or pending or prompts:
            unfinished, going_on = len(ready) + pending + len(prompts), len(ready) + len(prompts)
            minimum = max(0, math.ceil(self._ready_fraction * unfinished) - going_on)
            for episode, output in self._workers.receive(minimum):
                pending -= 1
                if buffer.add_output(episode, output):
                    ready.append(episode)
                elif buffer.truncated(episode):
                    truncated.append(episode)
            if minimum:
                continue  # some of these may have been the last of their episodes
            ready.sort(key=lambda episode: (buffer.turn(episode), episode))  # episodes that are furthest behind come first
            requests = []
            for name, sampler in samplers.items():
                sampler.shrink(unfinished)
                begin = [episode for episode in ready if self._weights[buffer.role(episode)] == name][: sampler.free]
                prompts |= self._prompts(buffer, begin)
                ready = [episode for episode in ready if episode not in prompts]
                sampler.add([SlotRequest(episode, buffer.turn(episode), prompts[episode].ids) for episode in begin])
                for response in sampler.step() if sampler.active else ():
                    ids, episode = response.tokens.tolist(), response.episode
                    ended = ids[-1] in self._format.end_tokens
                    actions = buffer.add_response(prompts.pop(episode), response, self._format.parse(ids), ended)
                    requests.append((episode, tasks[episode], actions))
            self._workers.send(requests)
            pending += len(requests)
        for episode, prompt in self._prompts(buffer, truncated).items():
            buffer.add_final_prompt(episode, prompt.ids)
        steps = sum(sampler.steps for sampler in samplers.values())
        return {"decode_steps": steps, "slot_use": sum(sampler.busy for sampler in samplers.values()) / max(1, steps)}

    def _prompts(self, buffer: EpisodeBuffer, episodes: Sequence[int]) -> dict[int, Prompt]:
        """Builds the next prompts of these episodes."""
        prompts = self._format.build([buffer.prompt_input(episode) for episode in episodes])
        return dict(zip(episodes, prompts, strict=True))

    def close(self) -> None:
        """Ends the worker processes."""
        self._workers.close()
