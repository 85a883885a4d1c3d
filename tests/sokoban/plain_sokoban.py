"""Sokoban's rules told again in plain Python, and a solver: sets of (row, column), no arrays, no code of `envs/sokoban`."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
FAR = 10**9
Cell = tuple[int, int]


def beside(cell: Cell, way: str) -> Cell:
    return cell[0] + WAYS[way][0], cell[1] + WAYS[way][1]


@dataclass(frozen=True)
class PlainSokoban:
    """One episode."""

    floor: frozenset[Cell]  # every cell that is not a wall
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    agent: Cell
    turn: int = 0

    @classmethod
    def read(cls, size: int, state) -> PlainSokoban:
        """From a JAX state."""

        def cells(flags):
            return frozenset((index // size, index % size) for index in np.flatnonzero(np.asarray(flags)).tolist())

        agent = divmod(int(state.agent), size)
        return cls(cells(~np.asarray(state.walls)), cells(state.targets), cells(state.boxes), agent, int(state.turn))

    @property
    def won(self) -> bool:
        return self.boxes == self.targets

    def move(self, way: str) -> PlainSokoban | None:
        """The state after a move, None where it is blocked (or no move). The turn is not counted."""
        if way not in WAYS:
            return None
        ahead = beside(self.agent, way)
        if ahead not in self.floor:
            return None
        if ahead not in self.boxes:
            return replace(self, agent=ahead)
        behind = beside(ahead, way)
        if behind not in self.floor or behind in self.boxes:
            return None
        return replace(self, agent=ahead, boxes=self.boxes - {ahead} | {behind})

    def step(self, way: str, gym: bool, max_turns: int) -> tuple[PlainSokoban, float, bool, bool]:
        """(state, reward, done, invalid)."""
        moved = self.move(way)
        after = replace(moved or self, turn=self.turn + 1)
        before_on, after_on = len(self.boxes & self.targets), len(after.boxes & self.targets)
        reward = 10.0 if after.won else 0.0
        if gym:
            reward -= 0.1
            reward += 1.0 if after_on > before_on else -1.0 if after_on < before_on else 0.0
        return after, reward, after.won or after.turn >= max_turns, moved is None

    def draw_all(self, size: int) -> str:
        """The room with the letters of Sokoban level files."""
        return "\n".join("".join(self._letter((r, c)) for c in range(size)) for r in range(size))

    def _letter(self, cell: Cell) -> str:
        if cell not in self.floor:
            return "#"
        kind = "@" if cell == self.agent else "$" if cell in self.boxes else "-"
        return {"@": "+", "$": "*", "-": "."}[kind] if cell in self.targets else kind


def push_distances(start: PlainSokoban) -> dict[Cell, int]:
    """For each cell the fewest pushes that bring a lone box from there to any target; cells that are not in it are lost."""
    distance = dict.fromkeys(start.targets, 0)
    queue = deque(start.targets)
    while queue:
        cell = queue.popleft()
        for way in WAYS:  # the box came from `before`, pushed from `stand`
            before = (cell[0] - WAYS[way][0], cell[1] - WAYS[way][1])
            stand = (before[0] - WAYS[way][0], before[1] - WAYS[way][1])
            if before in start.floor and stand in start.floor and before not in distance:
                distance[before] = distance[cell] + 1
                queue.append(before)
    return distance


def solve(start: PlainSokoban, weight: float = 1.0, limit: int = 1_000_000) -> list[str] | None:
    """Moves that solve a room, the fewest possible for weight 1 (A*); None where there are none.

    A weight above 1 finds longer solutions sooner. Raises RuntimeError after looking at `limit` states.
    """
    pushes = push_distances(start)

    def guess(state: PlainSokoban) -> float:
        return weight * sum(pushes.get(box, FAR) for box in state.boxes)

    seen = {(start.agent, start.boxes): (0, None, "")}
    heap = [(guess(start), 0, 0, start)]
    order = 0
    while heap:
        _, _, moves, state = heapq.heappop(heap)
        if moves > seen[state.agent, state.boxes][0]:
            continue
        if state.won:
            path, at = [], (state.agent, state.boxes)
            while seen[at][1] is not None:
                path.append(seen[at][2])
                at = seen[at][1]
            return path[::-1]
        if order > limit:
            raise RuntimeError(f"no solution among {limit} states")
        for way in WAYS:
            after = state.move(way)
            if after is None or guess(after) >= FAR:
                continue
            known = seen.get((after.agent, after.boxes))
            if known is None or moves + 1 < known[0]:
                seen[after.agent, after.boxes] = (moves + 1, (state.agent, state.boxes), way)
                order += 1
                heapq.heappush(heap, (moves + 1 + guess(after), -order, moves + 1, after))
    return None
