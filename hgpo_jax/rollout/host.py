"""Host rollouts: a policy plays environments that are Python programs, all episodes of a batch together.

    settings = TextSettings(batch=128, history_length=2)
    rollout = HostRollout(make_env, ChatFormat(tokenizer, "alfworld"), {"": policy.graphdef}, mesh, settings)
    episodes, report = rollout({"": params}, tasks, keys, groups, Decoding())

A response that has ended becomes an action, its environment steps, and the episode's next prompt takes a slot of the sampler
while responses of other episodes go on (`sampling/`): no episode waits for the longest response of a turn. Decoding waits for
environments only while less than a fraction of the unfinished episodes is ready. A fraction of 1 waits for all, which makes a
rollout bit-identical however fast environments are. Token ids are kept as sampled. The samples of an episode depend on its
own key and turn alone, as in compiled rollouts.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.policy.pictures import PromptPictures
from hgpo_jax.rollout.chat_prompts import Prompt
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.process_workers import env_workers
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.shared_workers import SharedWorkers
from hgpo_jax.rollout.turn_budgets import BUDGET, with_budget
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, EnvSpec
from hgpo_jax.sampling.constraint import sets_of
from hgpo_jax.sampling.continuous_batching import SlotResponse, SlotSampler
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.sampling.slot_plan import SlotRequest
from hgpo_jax.sampling.slot_programs import SlotPrograms


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """Settings of rollouts of text environments, on the host or compiled.

    batch: B, episodes per call.
    history_length: K, observation-action pairs in a prompt.
    response_limit: R, tokens of the longest response.
    decode_batch_size: episodes that each index of the `data` axis decodes at a time.
    strict: whether an inadmissible action is invalid, like a malformed response.

    On the host alone:
    workers: processes that step the environments, or `ray:N`; 0 steps them in this process, where one that hangs hangs the run.
    time_limit: timeout in seconds, after which a worker's episode counts as hung.
    ready_fraction: fraction of the unfinished episodes whose environments must have answered before decoding goes on.
    keep: episodes played at a time, over the batch (`partial_rollout.py`).
    reread: whether an answer that a call leaves unfinished is read again by the weights of the next, or goes on in its slot.
    reuse: whether a prompt that begins with the last one of its episode is computed from there on (`held_prefixes.py`).
    store: bytes to keep what episodes have read when others take their slots; with `reuse`.
    budgets: `env.budgets`.
    words: W of `Episodes.allowed`, if only answers with an admissible command are sampled; 0: anything is.
    vision: how the policy sees the environment's pictures; None: it shows none.

    On the device alone:
    prompt_widths: widths of prompts at most (`compiled_text_rollout.widths`).
    """

    batch: int
    history_length: int
    response_limit: int = 512
    decode_batch_size: int = 64
    strict: bool = False
    workers: int | str = 0
    time_limit: float = 60.0
    ready_fraction: float = 1.0
    keep: int = 1
    reread: bool = True
    reuse: bool = False
    store: int = 0
    budgets: Sequence[int] = ()
    words: int = 0
    vision: VisionConfig | None = None
    prompt_widths: int = 13


class Carried(NamedTuple):
    """What lets episodes be played over several calls.

    going_on: episodes that have begun, and whose environments have answered.
    age: age(episode) -> its rank; those of the lowest come first.
    enough: called with the episodes that have ended together; True ends the call as soon as all environments have answered. The
      others are then at the beginning of a turn, or in an answer (`EpisodeBuffer.begun`).
    """

    going_on: Sequence[int] = ()
    age: Callable[[int], int] = lambda episode: 0
    enough: Callable[[Sequence[int]], bool] = lambda ended: False


NOTHING = Carried()


class HostRollout:
    """`rollout(params, tasks, keys, groups, decoding) -> RolloutResult` over text environments.

    Args:
      make_env: makes one environment (see `workers.py`); must be picklable if there are worker processes.
      format: prompts and actions, such as `chat_prompts.ChatFormat`; or {name of a policy: its own}, of
        one prompt limit.
      graphdefs: {name of a policy: graph definition of the `Qwen2` whose parameters are passed}. Each of several policies has
        as many slots as a single one would have.
      mesh: episodes are split over its `data` and `fsdp` axes.
      policies: the name of each role's policy, if roles have policies of their own.

    Attributes:
      task_types: names; `Episodes.task` is an index into them.
      num_tasks: number of tasks of the environment, None if it generates them.
      max_turns: T, turns of the longest episode.
      roles: names; `Episodes.agents` is an index into them.
      signals: the names of the environment's signals, in the order of `Episodes.signals`.

    Raises:
      ValueError: the environment cannot be made.
    """

    def __init__(
        self,
        make_env: Callable,
        format,
        graphdefs: dict[str, Any],
        mesh: Mesh | AbstractMesh,
        settings: TextSettings,
        policies: Sequence[str] = (),
    ):
        self._settings = settings
        self._formats = format if isinstance(format, dict) else dict.fromkeys(graphdefs, format)
        self._prompt_limit = next(iter(self._formats.values())).prompt_limit
        self._start_workers(make_env)
        self._policies = policies or (SHARED,) * len(self.roles)
        make = functools.partial(SlotPrograms, mesh=mesh, max_new=settings.response_limit)
        self._programs = {name: make(g, end_tokens=self._formats[name].end_tokens) for name, g in graphdefs.items()}
        self._slots = min(settings.batch * settings.keep, settings.decode_batch_size * mesh.shape["data"])
        self._kept: dict[str, SlotSampler] = {}  # the samplers of the last call, if answers go on in their slots

    def _start_workers(self, make_env: Callable) -> None:
        def make_workers():
            s = self._settings
            return env_workers(make_env, s.workers, s.batch * s.keep, s.time_limit)

        self._workers = SharedWorkers(make_workers) if jax.process_count() > 1 else make_workers()
        spec: EnvSpec = self._workers.spec
        self.task_types, self.num_tasks, self.max_turns, self.roles, self.signals, self._picture_size = spec
        if self._settings.budgets:
            self.signals = (BUDGET, *self.signals)

    def with_environment(self, make_env: Callable) -> HostRollout:
        """Returns the same rollout over another environment, such as held-out games, in which no more episodes are played than
        the batch has; compiled programs are shared."""
        other = copy.copy(self)
        other._settings, other._kept = dataclasses.replace(self._settings, keep=1, reread=True), {}
        other._slots = min(self._settings.batch, self._slots)
        other._start_workers(make_env)
        return other

    def abstract_episodes(self) -> Episodes:
        """Returns the shapes and dtypes of the episodes of a call."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._no_episodes())

    def _no_episodes(self, keep: int = 1) -> Episodes:
        slots = self._prompt_limit, self._settings.response_limit
        size = self._settings.batch * keep, self.max_turns
        return Episodes.zeros(*size, *slots, len(self.signals), self._settings.words, picture=self._picture_size)

    def __call__(self, params, tasks: Sequence[int] | np.ndarray, keys, groups, decoding: Decoding) -> RolloutResult:
        """Plays B episodes.

        Args:
          params: {name of a policy: its parameters}.
          tasks: [B], number of each episode's task (`tasks.task_numbers`); the members of a prompt group share one.
          keys: [B], a random key for each episode, or [B, 2] as for `sampling.turn_keys`.
          groups: i32[B], prompt groups.

        Returns: Episodes of NumPy arrays and their report. `observations` have one column, the index of a text in
          `report.texts`. An episode whose environment failed has no turns.
        """
        if len(tasks) != self._settings.batch:
            raise ValueError(f"tasks: has {len(tasks)} episodes, the rollout was built for batch={self._settings.batch}")
        buffer = self.new_buffer(groups)
        counts = self.play(buffer, range(self._settings.batch), params, tasks, keys, decoding)
        return buffer.result(counts)

    def new_buffer(self, groups, keep: int = 1) -> EpisodeBuffer:
        """Returns a buffer without episodes, with room for `keep` batches. groups: i32[keep B]."""
        settings = self._settings
        return EpisodeBuffer(self._no_episodes(keep), groups, settings.history_length, settings.strict)

    def play(
        self,
        buffer: EpisodeBuffer,
        episodes: Sequence[int],
        params,
        tasks: Sequence[int] | np.ndarray,
        keys,
        decoding: Decoding,
        carried: Carried = NOTHING,
    ) -> dict[str, float]:
        """Plays episodes from their beginning, and those carried from an earlier call, into a buffer; returns the sampler's
        figures."""
        tasks, samplers = [int(task) for task in tasks], self._samplers(params, keys, decoding)
        self._kept = {}
        self._begin(episodes, tasks)
        prompts = self._go_on(buffer, carried.going_on, samplers)  # for the episodes in a slot
        stops, ready = False, [e for e in carried.going_on if e not in prompts]  # episodes whose prompt waits for a slot
        # What their responses may be, and the commands that these mean.
        answers: dict[int, dict[tuple[int, ...], str]] = {episode: {} for episode in prompts}
        truncated: list[int] = []  # episodes that a time limit has ended
        pending = len(episodes)  # episodes whose environments have yet to answer
        while (pending or ready or prompts) and (pending or not stops):
            unfinished, can_decode = len(ready) + pending + len(prompts), len(ready) + len(prompts)
            minimum = pending if stops else max(0, math.ceil(self._settings.ready_fraction * unfinished) - can_decode)
            ended = []
            for episode, output in self._receive(minimum):
                pending -= 1
                if buffer.add_output(episode, output):
                    ready.append(episode)
                else:
                    ended.append(episode)
            truncated += [episode for episode in ended if buffer.truncated(episode)]
            stops |= carried.enough(sorted(ended))
            if minimum or stops:
                continue  # some of these may have been the last of their episodes
            ready.sort(key=lambda episode: (carried.age(episode), buffer.turn(episode), episode))  # furthest behind first
            requests = []
            for name, sampler in samplers.items():
                if self._settings.reread:  # otherwise the next call needs as many slots
                    sampler.shrink(unfinished)
                begin = [episode for episode in ready if self._policies[buffer.role(episode)] == name][: sampler.free]
                prompts |= self._prompts(buffer, begin)
                answers |= {episode: self._answers(buffer, episode) for episode in begin}
                ready = [episode for episode in ready if episode not in prompts]
                sampler.add([self._request(buffer, episode, prompts[episode], answers[episode]) for episode in begin])
                for response in map(buffer.whole, sampler.step() if sampler.active else ()):
                    episode = response.episode
                    actions = self._act(buffer, response, prompts.pop(episode), answers.pop(episode))
                    requests.append((episode, tasks[episode], actions))
            self._workers.send(requests)
            pending += len(requests)
        self._add_final_prompts(buffer, truncated)
        counts = self._counts(list(samplers.values()))
        self._interrupt(buffer, [*prompts], samplers)
        return counts

    def _go_on(self, buffer: EpisodeBuffer, episodes: Sequence[int], samplers: dict[str, SlotSampler]) -> dict[int, Prompt]:
        """Returns the prompts of those of these episodes whose answers are still in their slots; no others stay there."""
        in_slots = []
        for sampler in samplers.values():
            for episode in sampler.episodes:
                if episode in episodes:
                    buffer.continues(episode, len(sampler.so_far(episode)[0]))
                    in_slots.append(episode)
                else:
                    sampler.cancel(episode)
        return self._prompts(buffer, in_slots)

    def _interrupt(self, buffer: EpisodeBuffer, episodes: Sequence[int], samplers: dict[str, SlotSampler]) -> None:
        """Records what the answers of these episodes have begun with; with `reread=False` they stay in their slots."""
        for episode in episodes if not self._settings.words else ():
            tokens, logp = samplers[self._policies[buffer.role(episode)]].so_far(episode)
            said = SlotResponse(episode, np.array(tokens, np.int32), np.array(logp, np.float32))
            first, _ = buffer.begun.get(episode, (buffer.version or 0, None))
            buffer.begun |= {episode: (first, buffer.whole(said))} if len(said.tokens) else {}
        if not self._settings.reread and episodes:
            self._kept = samplers
            for sampler in samplers.values():
                sampler.pause()

    def forget(self) -> None:
        """Frees the caches of unfinished answers."""
        self._kept = {}

    def replay(
        self, buffer: EpisodeBuffer, tasks: Sequence[int], recorded: dict[int, list[tuple[int, SlotResponse]]]
    ) -> list[int]:
        """Plays the beginning of episodes again; returns those that have ended.

        recorded: for each episode its responses so far, each with its `EpisodeBuffer.version`.
        """
        self._begin(recorded, tasks)
        pending, ended = len(recorded), []
        while pending:
            requests = []
            for episode, output in self._receive(pending):
                pending -= 1
                if not buffer.add_output(episode, output):
                    ended.append(episode)
                elif (turn := buffer.turn(episode)) < len(recorded[episode]):
                    buffer.version, response = recorded[episode][turn]
                    prompt = self._prompts(buffer, [episode])[episode]
                    actions = self._act(buffer, response, prompt, self._answers(buffer, episode))
                    requests.append((episode, tasks[episode], actions))
            self._workers.send(requests)
            pending += len(requests)
        self._add_final_prompts(buffer, [episode for episode in ended if buffer.truncated(episode)])
        return ended

    def _begin(self, episodes: Iterable[int], tasks: Sequence[int]) -> None:
        """Has the environments of these episodes begin."""
        self._workers.discard_answers()
        self._workers.send([(episode, tasks[episode], ()) for episode in episodes])

    def _receive(self, minimum: int) -> Iterator[tuple[int, EnvOutput | EnvFailure]]:
        """Yields (episode, answer) of environments that have answered, at least `minimum`."""
        for episode, answer in self._workers.receive(minimum):
            yield episode, with_budget(answer, episode, self._settings.budgets)

    def _request(self, buffer: EpisodeBuffer, episode: int, prompt: Prompt, answers: dict) -> SlotRequest:
        """Returns the request of an episode's response; one that has begun goes on after what was sampled."""
        turn, said = buffer.turn(episode), buffer.begun[episode][1].tokens.tolist() if episode in buffer.begun else []
        ids, pictures = [*prompt.ids, *said], None
        if self._settings.vision:
            pictures = PromptPictures.of([buffer.picture(episode)], self._settings.vision)
            ids = pictures.mark(ids)
        return SlotRequest(episode, turn, ids, said=len(said), answers=[*answers], pictures=pictures)

    def _samplers(self, params, keys, decoding: Decoding) -> dict[str, SlotSampler]:
        """Returns a sampler for each policy, that of the last call where answers go on in their slots."""
        for name, sampler in self._kept.items():
            sampler.use(params[name], keys, decoding)
        if self._kept:
            return self._kept
        sizes = {"slots": self._slots, "prompt_limit": self._prompt_limit}
        if self._settings.keep > 1:  # answers that have begun are read, too
            sizes["read_limit"] = self._prompt_limit + self._settings.response_limit
        sizes |= {"reuse": self._settings.reuse, "store": self._settings.store, "words": self._settings.words}
        return {name: SlotSampler(programs, params[name], keys, decoding, **sizes) for name, programs in self._programs.items()}

    def _add_final_prompts(self, buffer: EpisodeBuffer, truncated: Sequence[int]) -> None:
        for episode, prompt in self._prompts(buffer, truncated).items():
            buffer.add_final_prompt(episode, prompt.ids)

    def _act(self, buffer: EpisodeBuffer, response: SlotResponse, prompt: Prompt, commands: dict[tuple[int, ...], str]):
        """Records a response; returns the episode's actions so far. commands: what `_answers` returned for it."""
        ids, form = response.tokens.tolist(), self._formats[self._policies[buffer.role(response.episode)]]
        parsed = form.parse(ids)
        if (command := commands.get(tuple(ids))) is not None:
            parsed = parsed._replace(action=command, well_formed=True)
        allowed = sets_of([*commands], ids, self._settings.words) if self._settings.words else None
        return buffer.add_response(prompt, response, parsed, ids[-1] in form.end_tokens, allowed)

    def _counts(self, samplers: Sequence[SlotSampler]) -> dict[str, float]:
        """Returns the figures of all policies' samplers together."""
        total = lambda name: sum(getattr(sampler, name) for sampler in samplers)  # noqa: E731
        counts = {"decode_steps": total("steps"), "slot_use": total("busy") / max(1, total("steps"))}
        if self._settings.reuse:
            counts["reused_share"] = total("reused_tokens") / max(1, total("prompt_tokens"))
        return counts

    def _prompts(self, buffer: EpisodeBuffer, episodes: Sequence[int]) -> dict[int, Prompt]:
        """Builds the next prompts of these episodes."""
        prompts: dict[int, Prompt] = {}
        for name, form in self._formats.items():
            own = [episode for episode in episodes if self._policies[buffer.role(episode)] == name]
            prompts |= zip(own, form.build([buffer.prompt_input(episode) for episode in own]), strict=True)
        return prompts

    def _answers(self, buffer: EpisodeBuffer, episode: int) -> dict[tuple[int, ...], str]:
        """Returns what an episode's next response may be, and the command that each means. Empty: anything.

        Answers that are longer than a response are left out.
        """
        commands = buffer.commands(episode) if self._settings.words else ()
        form = self._formats[self._policies[buffer.role(episode)]]
        answers = zip(map(tuple, form.answers(commands) if commands else ()), commands, strict=True)
        return {answer: command for answer, command in answers if len(answer) <= self._settings.response_limit}

    def close(self) -> None:
        """Ends the worker processes."""
        self._workers.close()
