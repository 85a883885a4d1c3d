"""Statistics of episodes: their length, the length of their prompts, and HGPO's peers in groups of equal tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from hgpo_jax import advantages
from hgpo_jax.analysis.diagnostics import peer_share

GROUP = 8  # episodes of a task
FEW = 0.02  # of the steps after the first, with a peer
KEY = "give env.state_key=FILE.py:NAME, a function of the observation that leaves them out, or advantage.similarity"


@dataclasses.dataclass(frozen=True)
class Play:
    """B episodes of at most T turns by one player, as in Episodes.

    mask bool[B, T], states i32[B, T], invalid bool[B, T], prompts i32[B, T] (their lengths), groups i32[B].
    success f32[B]: nan where it is unknown. rewards f32[B]: in total.
    says_truncated: whether the environment itself reports which ends are due to a time limit.
    counts: whether a number in the observations, if these are texts, rises or falls with every step.
    """

    mask: np.ndarray
    states: np.ndarray
    invalid: np.ndarray
    prompts: np.ndarray
    success: np.ndarray
    groups: np.ndarray
    rewards: np.ndarray
    says_truncated: bool
    counts: bool = False

    def level_sizes(self, history_length: int) -> np.ndarray:
        """Returns the number of steps with the same task and the same last k + 1 observations, i32[B, T, K + 1], k = 0..K."""
        rewards = np.zeros(self.mask.shape, np.float32)
        steps = {"rewards": rewards, "mask": self.mask, "states": self.states, "groups": self.groups}
        return np.asarray(advantages.estimate("hgpo", **steps, history_length=history_length).level_sizes)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a check finds: faults, each in a line; the play by player, none if nothing could be played; steps per second."""

    faults: list[str]
    plays: dict[str, Play] = dataclasses.field(default_factory=dict)
    speed: float = 0.0


def warnings(play: Play, player: str = "") -> Iterator[str]:
    """Yields oddities of episodes that may be intended. player: as in `Report.plays`."""
    won, lost, total, length = play.success == 1, play.success == 0, play.rewards, play.mask.sum(1)
    judged, limit = won.sum() + lost.sum(), play.mask.shape[1]
    if player.startswith("expert") and judged and not won.any():
        yield f"{player}: wins none of {judged} episodes, and this is what the warm start clones; see that it can win"
    if play.invalid[play.mask].all():
        yield (
            "commands: none that was tried was admissible; where an environment lists none to choose from, random play says "
            "nothing of success and peers"
        )
    if not judged:
        yield "success: is unknown in all episodes; say it as won, or for gymnasium: give env.options.won_above"
    elif won.any() and total[won].max() <= 0:
        yield f"success: episodes that are won have rewards of at most {total[won].max():g} in total; see that both agree"
    elif not won.any() and total.max() > 0:
        yield (
            f"success: none of {judged} episodes is won, and rewards are up to {total.max():g} in total; if so much is a "
            "success, say it as won"
        )
    ends_early = won.any() and lost.any() and length[won].max() < limit and (length[lost] == limit).all()
    if ends_early and total[won].mean() < total[lost].mean():
        yield (
            f"success: episodes that are won end early with rewards of {total[won].mean():g}, others reach max_turns with "
            f"{total[lost].mean():g}; if lasting is the success, say there that it is won, and truncated"
        )
    if won.sum() > 1 and lost.any() and (length[won] == limit).all() and not play.says_truncated:
        yield (
            "truncated: episodes are won where max_turns are used up, which a critic takes for the end of the task; where they "
            "would go on, say truncated"
        )
    later = play.mask & (np.arange(limit) > 0)
    share = (play.level_sizes(0)[later, 0] > 1).mean() if later.any() else 1.0
    if play.counts:
        yield (
            "observation: a number in it changes with every step, as a step counter or a clock does, and states are equal at "
            f"the same count alone: {share:.1%} of the steps after the first have a peer; {KEY}"
        )
    elif share < FEW:
        yield (
            f"observation: {share:.1%} of the steps after the first have a peer, of which groups of equal states are made; "
            f"where parts of an observation do not matter, {KEY}"
        )


def table(plays: dict[str, Play], history_length: int, unit: str) -> str:
    """Formats a line for each player. unit: of the prompts' lengths. Shares of steps with a peer are those of levels 0 to K."""
    rows = []
    for name, play in plays.items():
        turns, prompts = play.mask.sum(1), play.prompts[play.mask]
        judged = play.success[~np.isnan(play.success)]
        row = {
            "player": name,
            "success": f"{judged.mean():.1%}" if len(judged) else "unknown",
            "invalid": f"{play.invalid[play.mask].mean():.1%}",
            "turns: least, median, most": f"{turns.min()}, {np.median(turns):g}, {turns.max()}",
            f"prompt: median, longest ({unit})": f"{np.median(prompts):.0f}, {prompts.max()}",
        }
        shares = peer_share(play.level_sizes(history_length), play.mask)
        rows.append(row | {f"peers: level {level}": f"{share:.1%}" for level, share in enumerate(shares)})
    widths = {column: max(len(row[column]) for row in rows) for column in rows[0]}
    lines = [{column: column for column in widths}, *rows]
    return "\n".join("  ".join(row[column].rjust(max(len(column), width)) for column, width in widths.items()) for row in lines)
