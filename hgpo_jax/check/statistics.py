"""Statistics of episodes: their length, the length of their prompts, and HGPO's peers in groups of equal tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from hgpo_jax import advantages
from hgpo_jax.analysis.diagnostics import peer_share

GROUP = 8  # episodes of a task


@dataclasses.dataclass(frozen=True)
class Play:
    """B episodes of at most T turns by one player, as in Episodes.

    mask bool[B, T], states i32[B, T], invalid bool[B, T], prompts i32[B, T] (their lengths), success bool[B], groups i32[B].
    rewards f32[B], in total; judged bool[B].
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
    judged: np.ndarray
    says_truncated: bool
    counts: bool = False


FEW = 0.02  # of the steps after the first, with a peer
KEY = "give env.state_key=FILE.py:NAME, a function of the observation that leaves them out, or advantage.similarity"


def warnings(play: Play) -> Iterator[str]:
    """Yields oddities of episodes that may be intended."""
    won, known, total, length = play.success, play.judged, play.rewards, play.mask.sum(1)
    lost, limit = known & ~won, play.mask.shape[1]
    if not known.any():
        yield "success: is unknown in all episodes; where the environment can tell, say it as won"
    elif won.any() and total[won].max() <= 0:
        yield f"success: episodes that are won have rewards of at most {total[won].max():g} in total; see that both agree"
    elif not won.any() and total.max() > 0:
        yield (
            f"success: none of {known.sum()} episodes is won, and rewards are up to {total.max():g} in total; if so much is a "
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
    share = later_peers(play)
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


def later_peers(play: Play) -> float:
    """Returns the share of steps after the first with another step of the same task and state; 1 if there are none."""
    later = play.mask.copy()
    later[:, 0] = False
    sizes = advantages.estimate(
        "hgpo",
        rewards=np.zeros(play.mask.shape, np.float32),
        mask=play.mask,
        states=play.states,
        groups=play.groups,
        history_length=0,
    ).level_sizes
    return float((np.asarray(sizes)[later, 0] > 1).mean()) if later.any() else 1.0


def table(plays: dict[str, Play], history_length: int, unit: str) -> str:
    """Formats a line for each player. unit: of the prompts' lengths. Shares of steps with a peer are those of levels 0 to K."""
    header = ("player", "success", "invalid", "turns: least, median, most", f"prompt: median, longest ({unit})")
    levels = "".join(f"{f'level {level}':>9s}" for level in range(history_length + 1))
    lines = [f"{header[0]:16s}{header[1]:>8s}{header[2]:>9s}{header[3]:>28s}{header[4]:>38s}   peers:{levels}"]
    for name, play in plays.items():
        turns, prompts = play.mask.sum(1), play.prompts[play.mask]
        lengths = f"{turns.min()}, {np.median(turns):g}, {turns.max()}"
        shown = f"{np.median(prompts):.0f}, {prompts.max()}"
        shares = "".join(f"{share:>9.1%}" for share in peers(play, history_length))
        success = f"{play.success[play.judged].mean():.1%}" if play.judged.any() else "unknown"
        lines.append(f"{name:16s}{success:>8s}{play.invalid[play.mask].mean():>9.1%}{lengths:>28s}{shown:>38s}{'':10s}{shares}")
    return "\n".join(lines)


def peers(play: Play, history_length: int) -> np.ndarray:
    """Returns the share of steps with another of the same task and the same last k + 1 observations, f64[K + 1], k = 0..K."""
    estimate = advantages.estimate(
        "hgpo",
        rewards=np.zeros(play.mask.shape, np.float32),
        mask=play.mask,
        states=play.states,
        groups=play.groups,
        history_length=history_length,
    )
    assert estimate.level_sizes is not None  # HGPO's has levels
    return peer_share(estimate.level_sizes, play.mask)
