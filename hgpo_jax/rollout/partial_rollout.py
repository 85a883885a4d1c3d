"""Partial rollouts: more prompt groups are played than learned from, and what is unfinished goes on under the next weights.

With `rollout.keep=2` twice the prompt groups of an iteration are played at a time. A rollout ends as soon as enough of them are
complete, so that no iteration waits for its longest episodes. The others go on in the next rollout, whose weights read their
prompts again and what has been sampled of their answers, unless `rollout.reread` is false: answers then go on in their slots,
from what earlier weights computed. Constrained answers (`rollout.constrain`) begin anew. Every token
keeps the log-probability of the weights that sampled it, and every prompt group is learned from once. With `ready_fraction=1`
decode steps alone decide which groups are complete, not the clock.

Source: partial rollouts of Kimi k1.5 (arXiv 2501.12599, 2.6.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from hgpo_jax.rollout.host import Carried, HostRollout
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.sampling.continuous_batching import SlotResponse

NONE = -1
RECORDED = ("responses", "response_lengths", "logp", "mask")  # what is played again when a run is resumed


class PartialRollout:
    """`rollout(params, iteration) -> RolloutResult` over a text environment on the host.

    Args:
      host: plays the episodes; a result has as many as its batch, of which `keep` times as many are played at a time.
      inputs: `inputs(n) -> (tasks, keys, groups, decoding)` of batch n, as in `Job.episode_inputs`.
      group_size: episodes of a prompt group.

    A failed episode counts as complete, and is left out as in any rollout.
    """

    def __init__(self, host: HostRollout, keep: int, inputs: Callable[[int], tuple], group_size: int):
        self._host, self._keep, self._inputs, self._size = host, keep, inputs, group_size
        _, _, groups, self._decoding = inputs(0)
        self._groups = np.asarray(groups)  # of every result
        self._batch = len(self._groups)
        self._buffer = host.new_buffer(np.zeros(keep * self._batch, np.int32), keep)
        self._wanted = self._batch // group_size
        self._started = np.full(
            keep * self._wanted, NONE, np.int32
        )  # the number in the run of the prompt group in each place; NONE: free
        self._new: list[int] = []  # episodes that have not begun
        self._ended: set[int] = set()
        self._complete: list[int] = []  # places, in the order in which their groups were completed

    def __call__(self, params, iteration: int) -> RolloutResult:
        """Plays until as many prompt groups are complete as a batch has.

        params: as for `HostRollout`. Iterations follow one another, from 0 or from that of `resume`.
        """
        going_on = self._under_way()
        self._new += self._start(range(self._keep) if iteration == 0 else [iteration + self._keep - 1])
        self._buffer.version = iteration

        def enough(ended: Sequence[int]) -> bool:
            self._end(ended)
            return len(self._complete) >= self._wanted

        counts = {"decode_steps": 0.0, "slot_use": 0.0}
        if not enough(()):
            carried = Carried(going_on, lambda episode: int(self._started[episode // self._size]), enough)
            given = params, *self._tasks_and_keys(), self._decoding
            counts = self._host.play(self._buffer, self._new, *given, carried)
            self._new = []
        learned, self._complete = self._complete[: self._wanted], self._complete[self._wanted :]
        self._started[learned] = NONE
        rows = self._rows(learned)
        self._ended -= set(rows)
        return self._buffer.take(rows, self._groups).result(counts)

    def close(self) -> None:
        """Frees the caches of unfinished answers; no call follows."""
        self._host.forget()

    def _start(self, batches: Sequence[int]) -> list[int]:
        """Puts the prompt groups of some batches in the free places; returns their episodes."""
        free = np.flatnonzero(self._started == NONE)
        numbers = np.concatenate([np.arange(n * self._wanted, (n + 1) * self._wanted) for n in batches])
        self._started[free] = numbers
        return self._rows(free)

    def _tasks_and_keys(self) -> tuple[list[int], jax.Array]:
        """Returns the task and the random key of every episode, [keep B]; anything for those of free places."""
        numbers = np.maximum(self._started, 0)
        batches = np.unique(numbers // self._wanted)
        given = [self._inputs(int(batch)) for batch in batches]
        groups = np.searchsorted(batches, numbers // self._wanted) * self._wanted + numbers % self._wanted
        rows = np.array(self._rows(groups))
        keys = np.concatenate([jax.random.key_data(keys) for _, keys, *_ in given])[rows]
        tasks = [task for tasks, *_ in given for task in tasks]  # those of generated environments exceed NumPy's integers
        return [int(tasks[row]) for row in rows], jax.random.wrap_key_data(keys)

    def _end(self, episodes: Sequence[int]) -> None:
        """Notes that these episodes have ended together, and which prompt groups are complete by that, oldest first."""
        self._ended |= set(episodes)
        places = {episode // self._size for episode in episodes}
        complete = [p for p in places.difference(self._complete) if self._ended.issuperset(self._rows([p]))]
        self._complete += sorted(complete, key=lambda place: self._started[place])

    def _under_way(self) -> list[int]:
        """Returns the episodes that have begun and not ended."""
        others = self._ended.union(self._new)
        return [row for row in self._rows(np.flatnonzero(self._started != NONE)) if row not in others]

    def _rows(self, places) -> list[int]:
        return [int(place) * self._size + member for place in places for member in range(self._size)]

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, np.ndarray]:
        """Returns what the next call begins with, as arrays of fixed shapes, for `resume`."""
        episodes = self._buffer.episodes
        versions = np.zeros(episodes.mask.shape, np.int32)
        for row, of_turns in self._buffer.versions.items():
            versions[row, : len(of_turns)] = of_turns
        complete = np.full(len(self._started), NONE, np.int32)
        complete[: len(self._complete)] = self._complete
        failed = np.zeros(len(versions), bool)
        failed[[*self._buffer.excluded]] = True
        recorded = {name: getattr(episodes, name).copy() for name in RECORDED} | {"versions": versions}
        for row, (version, said) in self._buffer.begun.items():  # as the turn after the last one that happened
            turn, n = self._buffer.turn(row), len(said.tokens)
            recorded["responses"][row, turn, :n], recorded["logp"][row, turn, :n] = said.tokens, said.logp
            recorded["response_lengths"][row, turn], versions[row, turn] = n, version
        return recorded | {"failed": failed, "started": self._started.copy(), "complete": complete}

    def resume(self, arrays: dict[str, np.ndarray]) -> None:
        """Plays what a snapshot holds again, in the environments alone, so that the next call goes on from there."""
        saved = {name: np.asarray(values) for name, values in arrays.items()}
        self._started = saved["started"].copy()
        self._complete = saved["complete"][saved["complete"] != NONE].tolist()
        rows = self._rows(np.flatnonzero(self._started != NONE))
        failed = [row for row in rows if saved["failed"][row]]
        for row in failed:
            self._buffer.exclude(row, "it failed before the run was resumed")
        answers = {row: _responses(saved, row) for row in rows if row not in failed}
        happened = saved["mask"].sum(1)
        recorded = {row: of_row[: happened[row]] for row, of_row in answers.items()}
        ended = self._host.replay(self._buffer, self._tasks_and_keys()[0], recorded)
        self._buffer.begun |= {
            row: of_row[-1] for row, of_row in answers.items() if len(of_row) > happened[row] and row not in ended
        }
        self._end([*failed, *ended])


def _responses(saved: dict[str, np.ndarray], row: int) -> list[tuple[int, SlotResponse]]:
    """Returns an episode's responses in a snapshot, each with its version; the last one may not have ended."""
    tokens, logp, lengths = (saved[name][row] for name in ("responses", "logp", "response_lengths"))
    parts = [SlotResponse(row, tokens[t, :n], logp[t, :n]) for t, n in enumerate(lengths) if n]
    return [(int(saved["versions"][row, t]), part) for t, part in enumerate(parts)]
