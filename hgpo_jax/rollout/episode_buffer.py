"""The buffer of a host rollout's episodes while they are played."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

import jax
import numpy as np

from hgpo_jax.rollout.chat_prompts import ParsedResponse, PastTurn, Prompt, PromptInput
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutReport, RolloutResult
from hgpo_jax.rollout.turn_budgets import goal_of
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput
from hgpo_jax.sampling.continuous_batching import SlotResponse

log = logging.getLogger(__name__)


def matched(action: str, commands: Sequence[str]) -> str:
    """Returns the command that an action means: itself, or else the only one that equals it up to case; else the action."""
    if action in commands:
        return action
    same = {command for command in commands if command.lower() == action.lower()}
    return same.pop() if len(same) == 1 else action


class EpisodeBuffer:
    """Collects environment outputs and responses, and builds the RolloutResult from them.

    Args:
      episodes: `Episodes.zeros`, written in place.
      groups: i32[B], prompt groups.
      history_length: K, observation-action pairs in a prompt.
      strict: whether an inadmissible action is invalid, like a malformed response.

    Attributes:
      excluded: episode -> the reason why the result leaves it out.
      version: the number of the weights that sample, which is recorded with every response; None: it is not.
      versions: these numbers, of an episode's turns so far.
      begun: of an episode's answer that has not ended: the version that began it, and what has been sampled of it.
      episodes: the first argument.
    """

    def __init__(self, episodes: Episodes, groups, history_length: int, strict: bool):
        self.episodes, self._history_length, self._strict = episodes, history_length, strict
        episodes.groups[:] = groups
        self.version: int | None = None
        # What is collected of each episode, by its number.
        self._latest: dict[int, EnvOutput] = {}  # of those that have not failed
        self._observations: dict[int, list[str]] = defaultdict(list)
        self._digests: dict[int, list[bytes]] = defaultdict(list)  # of the pictures beside the observations
        self._commands: dict[int, list[Sequence[str]]] = defaultdict(list)
        self._actions: dict[int, list[str]] = defaultdict(list)
        self._unshown: dict[int, Counter[int]] = defaultdict(Counter)  # by role: its oldest turns, which a chat has dropped
        self._responses: dict[int, list[str]] = defaultdict(list)
        self._admissible: dict[int, list[bool]] = defaultdict(list)  # for each action whose output has arrived
        self.versions: dict[int, list[int]] = defaultdict(list)
        self._counts: dict[int, Counter[str]] = defaultdict(Counter)
        self.begun: dict[int, tuple[int, SlotResponse]] = {}
        self.excluded: dict[int, str] = {}

    def take(self, rows: Sequence[int], groups) -> EpisodeBuffer:
        """Moves these episodes to a buffer of their own, in which they have the numbers 0, 1, ...; their rows are free then."""
        taken = jax.tree.map(lambda values: values[list(rows)], self.episodes)
        other = EpisodeBuffer(taken, groups, self._history_length, self._strict)
        other.version = self.version
        for name, mine in vars(self).items():
            if isinstance(mine, dict):
                getattr(other, name).update({number: mine.pop(row) for number, row in enumerate(rows) if row in mine})
        for values in self.episodes.arrays().values():
            values[list(rows)] = 0
        return other

    def turn(self, episode: int) -> int:
        """Returns the number of actions taken in an episode."""
        return len(self._actions[episode])

    def role(self, episode: int) -> int:
        """Returns the role that has the next turn in an episode."""
        return self._latest[episode].role

    def add_output(self, episode: int, output: EnvOutput | EnvFailure) -> bool:
        """Takes an environment's output; returns whether its episode continues."""
        if isinstance(output, EnvFailure):
            self.exclude(episode, output.reason)
            log.warning("episode %d is excluded: %s", episode, output.reason)
            return False
        self._latest[episode] = output
        self._observations[episode].append(output.observation)
        self._digests[episode].append(b"" if output.picture is None else hashlib.sha256(output.picture.tobytes()).digest())
        self._commands[episode].append(output.commands)
        self._counts[episode]["inadmissible"] += not output.admissible
        turn, e = self.turn(episode), self.episodes
        if turn:
            e.rewards[episode, turn - 1] = output.reward
            if e.signals is not None:
                e.signals[episode, turn - 1] = output.signals
            e.invalid[episode, turn - 1] |= self._strict and not output.admissible
            self._admissible[episode].append(bool(output.admissible))
        last = turn == e.mask.shape[1]
        if not output.done and not last:
            return True
        # An environment that counts its turns itself need not report it: all turns are used up, and the episode is not won.
        used_up = last and not output.won if output.truncated is None else output.truncated
        e.truncated[episode] = used_up or not output.done
        return False

    def commands(self, episode: int) -> Sequence[str]:
        """Returns what can be done now in an episode."""
        return self._latest[episode].commands

    def picture(self, episode: int) -> np.ndarray:
        """Returns what an environment with pictures shows now, u8[H, W, 3]."""
        picture = self._latest[episode].picture
        assert picture is not None
        return picture

    def truncated(self, episode: int) -> bool:
        """Whether a time limit has ended an episode."""
        return bool(self.episodes.truncated[episode])

    def add_final_prompt(self, episode: int, ids: Sequence[int]) -> None:
        """Stores the prompt of the turn that a truncated episode would have had next."""
        self.episodes.final_prompts[episode, : len(ids)] = ids
        self.episodes.final_prompt_lengths[episode] = len(ids)

    def exclude(self, episode: int, reason: str) -> None:
        """Leaves an episode out of the result."""
        self.excluded[episode] = reason
        self._latest.pop(episode, None)

    def prompt_input(self, episode: int) -> PromptInput:
        """Returns the information of the role that acts next in an episode: only its own past turns."""
        output, e = self._latest[episode], self.episodes
        responses = map(lambda ids, length: ids[:length], e.responses[episode], e.response_lengths[episode])
        texts = self._observations[episode], self._commands[episode], self._actions[episode]
        past = zip(map(PastTurn, *texts, responses), e.agents[episode], strict=False)
        turns = [turn for turn, role in past if role == output.role]
        history = [(turn.observation, turn.action) for turn in turns[max(0, len(turns) - self._history_length) :]]
        chat = turns[self._unshown[episode][output.role] :]
        return PromptInput(goal_of(output), history, len(turns), output.observation, output.commands, chat)

    def whole(self, response: SlotResponse) -> SlotResponse:
        """Returns a response, or a part of one, behind the part that has `begun`."""
        if response.episode not in self.begun:
            return response
        _, (_, *before) = self.begun[response.episode]
        return SlotResponse(response.episode, *map(np.append, before, response[1:]))

    def continues(self, episode: int, tokens: int) -> None:
        """Notes that the sampler will return the last `tokens` of what an answer has begun with again, before the others."""
        first, said = self.begun[episode]
        earlier = len(said.tokens) - tokens  # which the sampler has been given
        self.begun[episode] = first, said._replace(tokens=said.tokens[:earlier], logp=said.logp[:earlier])

    def add_response(
        self,
        prompt: Prompt,
        response: SlotResponse,
        parsed: ParsedResponse,
        ended: bool,
        allowed: np.ndarray | None = None,
        picture: np.ndarray | None = None,
    ) -> tuple[str, ...]:
        """Adds a response to its episode's prompt; returns all the episode's actions including the new one (`matched`).

        ended: whether the response ended by itself, not at its limit. allowed: u32[n, W], what each of its tokens could be, if
        that was constrained. picture: u8[H, W, 3], what the prompt shows, if it shows another one than the output's.
        """
        episode, e, length = response.episode, self.episodes, len(response.tokens)
        turn = self.turn(episode)
        e.prompts[episode, turn, : len(prompt.ids)] = prompt.ids
        e.prompt_lengths[episode, turn] = len(prompt.ids)
        e.responses[episode, turn, :length] = response.tokens
        e.response_lengths[episode, turn] = length
        e.logp[episode, turn, :length] = response.logp
        if e.allowed is not None:
            e.allowed[episode, turn, :length] = allowed
        if e.pictures is not None:
            e.pictures[episode, turn] = self.picture(episode) if picture is None else picture
        e.mask[episode, turn] = True
        e.agents[episode, turn] = self._latest[episode].role
        e.invalid[episode, turn] = not parsed.well_formed
        if e.finished is not None:
            e.finished[episode, turn] = ended
        self._counts[episode].update(
            malformed=not parsed.well_formed,
            unfinished=not ended,
            pairs_dropped=prompt.pairs_dropped,
            prompts_cut=prompt.tokens_cut > 0,
        )
        self._unshown[episode][self._latest[episode].role] += prompt.pairs_dropped
        if self.version is not None:
            self.versions[episode].append(self.begun.pop(episode, (self.version, None))[0])
        self._actions[episode].append(matched(parsed.action, self._latest[episode].commands))
        self._responses[episode].append(parsed.text)
        return tuple(self._actions[episode])

    def result(self, sampling: dict[str, float] | None = None) -> RolloutResult:
        """Returns the episodes, of which failed ones are empty, and the report, with the figures of `sampling` added."""
        e, batch = self.episodes, len(self.episodes.mask)
        for episode in self.excluded:
            e.leave_out(episode)
        scores = np.zeros(batch, np.float32)
        for episode, output in self._latest.items():
            e.success[episode], e.judged[episode], e.task[episode] = bool(output.won), output.won is not None, output.task_type
            scores[episode] = np.nan if output.score is None else output.score
        texts, states = self._number_states()
        for episode, ids in states.items():
            e.states[episode, : len(ids) - 1], e.next_states[episode, : len(ids) - 1] = ids[:-1], ids[1:]
        e.observations[:, :, 0] = e.states
        numbers: dict[str, int] = {}
        for episode in sorted(self._latest):
            done = self._actions[episode]
            e.actions[episode, : len(done)] = [numbers.setdefault(action, len(numbers)) for action in done]
        kinds = ("malformed", "unfinished", "pairs_dropped", "prompts_cut", "inadmissible")
        counts: dict[str, float] = (
            {kind: sum(counts[kind] for counts in self._counts.values()) for kind in kinds}
            | (sampling or {})
            | {
                "excluded": len(self.excluded),
                "prompt_tokens": int(e.prompt_lengths.sum()),
                "response_tokens": int(e.response_lengths.sum()),
                "longest_prompt": int(e.prompt_lengths.max()),
            }
        )
        report = RolloutReport(
            texts=texts,
            goals=[self._latest[episode].goal if episode in self._latest else "" for episode in range(batch)],
            responses=self._of_kept(self._responses),
            actions=self._of_kept(self._actions),
            admissible=self._of_kept(self._admissible),
            scores=scores,
            failures=self.excluded,
            counts=counts,
            versions=[] if self.version is None else self._of_kept(self.versions),
        )
        return RolloutResult(e, report)

    def _of_kept(self, turns: dict[int, list]) -> list[list]:
        """Groups the items collected turn by turn by episode; failed episodes have none."""
        return [turns[episode] if episode in self._latest else [] for episode in range(len(self.episodes.mask))]

    def _number_states(self) -> tuple[list[str], dict[int, list[int]]]:
        """Returns all texts observed in episodes that have not failed, and for each such episode their numbers, turn by turn.

        Texts are numbered by episode and turn, so the order does not depend on which environment was faster. A text beside
        another picture has another number.
        """
        numbers: dict[tuple[str, bytes], int] = {}
        ids = {
            episode: [
                numbers.setdefault(seen, len(numbers))
                for seen in zip(self._observations[episode], self._digests[episode], strict=True)
            ]
            for episode in sorted(self._latest)
        }
        return [text for text, _ in numbers], ids
