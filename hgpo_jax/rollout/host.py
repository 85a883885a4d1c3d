"""Host rollouts: a policy plays environments that are Python programs, all episodes of a batch together.

    rollout = HostRollout(make_env, ChatFormat(tokenizer, "alfworld"), policy.graphdef, mesh, batch=128, history_length=2)
    episodes, report = rollout(params, tasks, keys, groups, Decoding())

As soon as enough environments have answered, their episodes' prompts are tokenized, sorted by length and padded to a few
shapes; one compiled program prefills and decodes; responses become actions, and these environments step while responses to
others are sampled. Enough is a fraction of all unfinished episodes; a fraction of 1 makes a rollout synchronous, turn by
turn. Token ids are kept as sampled. What an episode samples depends on its own key and turn alone, as in compiled rollouts.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.process_workers import ProcessWorkers
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.shared_workers import SharedWorkers
from hgpo_jax.rollout.workers import EnvSpec, LocalWorkers
from hgpo_jax.sampling import Decoding, Responses, buckets, generate

log = logging.getLogger(__name__)


class HostRollout:
    """`rollout(params, tasks, keys, groups, decoding) -> RolloutResult` over text environments.

    Args:
      make_env: makes one environment (see `workers.py`); must be picklable if there are worker processes.
      format: prompts and actions, such as `chat_format.ChatFormat` or `words.WordFormat`.
      graphdef: of the `Qwen2` whose parameters will be given.
      mesh: prompts are split over its `data` axis.
      batch: B, episodes per call.
      history_length: K, observation-action pairs in a prompt.
      response_limit: R, tokens of the longest response.
      decode_batch_size: prompts that each device decodes at a time.
      strict: whether an inadmissible action is invalid, like a malformed response.
      workers: processes that step the environments; 0 steps them in this process, where one that hangs hangs the run.
      time_limit: seconds after which a worker's episode counts as hung.
      ready_fraction: fraction of the unfinished episodes whose environments must have answered before these are sampled for.

    Attributes:
      task_types: the environment's, named; `Episodes.task` is an index into it.
      num_tasks: how many tasks the environment has, None if it generates them.
      max_turns: T, turns of the longest episode.

    Raises:
      ValueError: the environment cannot be made.
    """

    def __init__(
        self, make_env: Callable, format, graphdef, mesh: Mesh | AbstractMesh, *, batch: int, history_length: int,
        response_limit: int = 512, decode_batch_size: int = 64, strict: bool = False, workers: int = 0,
        time_limit: float = 60.0, ready_fraction: float = 1.0,
    ):  # fmt: skip
        self._batch, self._num_workers, self._time_limit = batch, workers, time_limit
        self._start_workers(make_env)
        self._format, self._strict, self._ready_fraction = format, strict, ready_fraction
        self._history_length, self._response_limit = history_length, response_limit
        self._decode_blocks = make_decode_blocks(graphdef)
        self._sample = make_sampler(graphdef, mesh, response_limit, format.end_tokens)
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        largest = min(math.ceil(batch * ready_fraction / shards), max(1, decode_batch_size * mesh.shape["data"] // shards))
        self._batch_sizes = [shards * size for size in buckets(largest, factor=4, smallest=1)]
        self._widths = buckets(format.prompt_limit, factor=2, smallest=128)
        self._compiled: dict[tuple[int, int], float] = {}  # (batch size, width) -> seconds of the first call

    def _start_workers(self, make_env: Callable) -> None:
        def make_workers():
            if not self._num_workers:
                return LocalWorkers(make_env)
            return ProcessWorkers(make_env, self._num_workers, self._batch, self._time_limit)

        self._workers = SharedWorkers(make_workers) if jax.process_count() > 1 else make_workers()
        spec: EnvSpec = self._workers.spec
        self.task_types, self.num_tasks, self.max_turns = spec

    def with_environment(self, make_env: Callable) -> HostRollout:
        """The same rollout over another environment, such as held-out games; what is compiled is shared."""
        other = copy.copy(self)
        other._start_workers(make_env)
        return other

    def abstract_episodes(self) -> Episodes:
        """Shapes and dtypes of the episodes that a call returns."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._no_episodes())

    def _no_episodes(self) -> Episodes:
        return Episodes.zeros(self._batch, self.max_turns, self._format.prompt_limit, self._response_limit)

    def __call__(self, params, tasks: Sequence[int] | np.ndarray, keys, groups, decoding: Decoding) -> RolloutResult:
        """Plays B episodes.

        Args:
          params: the policy's.
          tasks: [B], number of each episode's task (`tasks.task_numbers`); the members of a prompt group share one.
          keys: [B], a random key for each episode.
          groups: i32[B], prompt groups.

        Returns: Episodes of NumPy arrays and their report. `observations` have one column, the index of a text in
          `report.texts`. An episode whose environment failed has no turns.
        """
        tasks = [int(task) for task in tasks]
        if len(tasks) != self._batch:
            raise ValueError(f"tasks: has {len(tasks)} episodes, the rollout was built for batch={self._batch}")
        buffer = EpisodeBuffer(self._no_episodes(), groups, self._history_length, self._strict)
        blocks = self._decode_blocks(params)
        self._workers.discard_answers()
        self._workers.send([(episode, task, ()) for episode, task in enumerate(tasks)])
        ready: list[int] = []
        pending = self._batch  # unfinished episodes to sample for; environments that have yet to answer
        while ready or pending:
            minimum = max(0, math.ceil(self._ready_fraction * (len(ready) + pending)) - len(ready))
            for episode, output in self._workers.receive(minimum):
                pending -= 1
                if buffer.add_output(episode, output):
                    ready.append(episode)
            if minimum:
                continue  # some of these may have been the last of their episodes
            episodes, ready = self._next_batch(ready, buffer, pending)
            turns = [buffer.turn(episode) for episode in episodes]
            prompts = self._format.build([buffer.prompt_input(episode) for episode in episodes])
            for index, out in self._generate(params, blocks, prompts, episodes, turns, keys, decoding):
                requests = []
                for i, at in enumerate(index):
                    ids = out.tokens[i, : int(out.lengths[i])].tolist()
                    ended, episode = ids[-1] in self._format.end_tokens, episodes[at]
                    actions = buffer.add_response(episode, prompts[at], out, i, self._format.parse(ids), ended)
                    requests.append((episode, tasks[episode], actions))
                self._workers.send(requests)
                pending += len(requests)
        return buffer.result()

    def _next_batch(self, ready: list[int], buffer: EpisodeBuffer, pending: int) -> tuple[list[int], list[int]]:
        """(episodes to sample for now, those that wait): those that are furthest behind come first.

        While environments have yet to answer, the batch fills a shape: no row is spent on padding.
        """
        ready = sorted(ready, key=lambda episode: (buffer.turn(episode), episode))
        full = max((size for size in self._batch_sizes if size <= len(ready)), default=len(ready))
        count = full if pending else len(ready)
        return ready[:count], ready[count:]

    def _generate(self, params, blocks, prompts, episodes, turns, keys, decoding) -> Iterator[tuple[list[int], Responses]]:
        """Samples a response to each prompt: (indices of some prompts, their responses on the host), until all are done."""
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at].ids))
        running = []
        for begin in range(0, len(order), self._batch_sizes[-1]):
            index = order[begin : begin + self._batch_sizes[-1]]
            size = next(size for size in self._batch_sizes if size >= len(index))
            width = next(width for width in self._widths if width >= len(prompts[index[-1]].ids))
            # Padding rows repeat a real one, so that they end with it.
            padded = index + index[:1] * (size - len(index))
            tokens = np.zeros((size, width), np.int32)
            for i, at in enumerate(padded):
                tokens[i, : len(prompts[at].ids)] = prompts[at].ids
            lengths = np.array([len(prompts[at].ids) for at in padded], np.int32)
            episode, turn = np.array([[episodes[at], turns[at]] for at in padded], np.int32).T
            began = time.perf_counter()
            out = self._sample(params, blocks, tokens, lengths, keys, episode, turn, decoding)
            if (size, width) not in self._compiled:
                jax.block_until_ready(out)
                seconds = self._compiled[size, width] = time.perf_counter() - began
                log.info("sampler for %d prompts of up to %d tokens: first call took %.1f s", size, width, seconds)
            running.append((index, out))
        for index, out in running:
            yield index, jax.device_get(out)

    def close(self) -> None:
        """Ends the worker processes."""
        self._workers.close()


def make_decode_blocks(graphdef):
    """Jitted `decode_blocks(params) -> blocks`: the copy of the weights that decoding reads, one set of arrays per layer."""
    return jax.jit(lambda params: nnx.merge(graphdef, params).decode_blocks())


def make_sampler(graphdef, mesh: Mesh | AbstractMesh, max_new: int, end_tokens: tuple[int, ...]):
    """Jitted `sample(params, blocks, prompts, lengths, keys, episodes, turns, decoding) -> Responses`.

    blocks are those of `make_decode_blocks` for the params. prompts i32[M, P] and lengths i32[M] belong to the episodes
    i32[M], whose random keys are keys[episodes] of [B], at their turns, i32[M] or one for all. M is split over the mesh's
    `data` axis, and each shard ends when its own rows have ended.
    """

    def sample_shard(params, blocks, prompts, lengths, keys, decoding):
        model = nnx.merge(graphdef, params)
        return generate(model, blocks, prompts, lengths, keys, max_new=max_new, end_tokens=end_tokens, decoding=decoding)

    split = jax.shard_map(
        sample_shard,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data"), P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )

    # The responses are small; every process reads all of them.
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def sample(params, blocks, prompts, lengths, keys, episodes, turns, decoding):
        keys = jax.vmap(jax.random.fold_in)(keys[episodes], jnp.broadcast_to(turns, episodes.shape))
        return split(params, blocks, prompts, lengths, keys, decoding)

    return sample
