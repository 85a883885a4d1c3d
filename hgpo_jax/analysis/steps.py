"""Explanations of a step's advantage: its groups at every level, its peers there, and tables over all steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from hgpo_jax.advantages import Estimate, parameters
from hgpo_jax.analysis import diagnostics
from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.rollout.episodes import Episodes


def group_ids(episodes: Episodes, record: Estimate, level: int, rows: Sequence[int] | slice = slice(None)) -> np.ndarray:
    """Returns dense ids of the groups of a level, i64[B, T]; -1 where a step is in none; `level` -1 is the prompt groups.

    rows: the episodes to look at, B of them, such as those of a prompt group, which no group leaves.

    Steps with t < level are in groups of their own, with steps of the same short past; estimators may leave them out
    (`level_sizes` 0). Whole contexts are compared, one column at a time.
    """
    peers = np.asarray(record.peers)[rows]
    states, mask = np.asarray(episodes.states if record.states is None else record.states)[rows], peers >= 0
    columns = [peers]
    for lag in range(level + 1):
        before = np.full(mask.shape, -1, np.int64)
        before[:, lag:] = states[:, : max(mask.shape[1] - lag, 0)]
        columns.append(before)
    ids = np.full(mask.shape, -1, np.int64)
    if mask.any():
        _, index = np.unique(np.stack([column[mask] for column in columns], axis=1), axis=0, return_inverse=True)
        ids[mask] = index.ravel()
    return ids


def step_value(dump: Dump, record: Estimate, level: int) -> jax.Array | np.ndarray:
    """Returns f32[B, T], the quantity that a level compares: returns; in the prompt group episode scores less step penalties.

    `eb_gae` compares returns in the prompt group too, and subtracts penalties only after it has compared.
    """
    e = dump.episodes
    if "rho" in record.stats:
        return record.returns + np.where(e.invalid & e.mask, np.float32(dump.config.advantage.invalid_penalty), np.float32(0))
    return record.returns if level >= 0 or record.scores is None else record.scores


def step_weights(record: Estimate, level: int, ids: np.ndarray, rows: Sequence[int] | slice = slice(None)) -> np.ndarray:
    """Returns f64[B, T], how much each step counts in the mean of its group; ids: from `group_ids` with the same rows.

    With `advantage.statistics=per_trajectory` the steps of an episode share the weight of one in the prompt group.
    """
    counted = record.by_level()[1][rows][..., record.levels.index(level)]
    count = lambda these: np.where(these >= 0, np.bincount(these[these >= 0], minlength=max(ids.max(), 0) + 1)[these], 1)  # noqa: E731
    in_episode = np.stack([count(row) for row in ids])  # a team's episode has steps in several groups
    return np.where((level < 0) & (counted != count(ids)), 1 / in_episode, 1.0)


def step_groups(dump: Dump, record: Estimate, episode: int, turn: int) -> list[dict]:
    """Returns the groups of one step, one dict per level that the step has in `record`.

    level; history: the observations by which its members are grouped, oldest first; advantage and weight of the level; mean of
    the compared values; members: episode and turn, return, value (which the level compares), and the advantage that the level
    gives to that member. The step itself is one of them. A record without levels gives [].
    """
    e = dump.episodes
    if not e.mask[episode, turn]:
        raise ValueError(f"episode {episode} has {dump.turns(episode)} turns, and turn {turn} is not one of them")
    groups = []
    for column, level in enumerate(record.levels):
        advantages, sizes, weights = record.by_level()
        if not sizes[episode, turn, column]:
            continue
        ids, value = group_ids(e, record, level), step_value(dump, record, level)
        share = step_weights(record, level, ids)
        members = np.argwhere(ids == ids[episode, turn]).tolist()
        shared = range(max(turn - level, 0), turn + 1) if level >= 0 and record.states is None else range(0)
        groups.append(
            {
                "level": level,
                "history": [dump.observation(episode, t) for t in shared],
                "advantage": float(advantages[episode, turn, column]),
                "weight": float(weights[episode, turn, column]),
                "mean": float(np.average([value[b, t] for b, t in members], weights=[share[b, t] for b, t in members])),
                "members": [
                    {
                        "episode": b,
                        "turn": t,
                        "return": float(record.returns[b, t]),
                        "value": float(value[b, t]),
                        "advantage": float(advantages[b, t, column]),
                    }
                    for b, t in members
                ],
            }
        )
    return groups


def step_text(dump: Dump, record: Estimate, episode: int, turn: int, shown: int = 8) -> str:
    """Formats `step_groups`; for each level the `shown` members with the highest and lowest values, and the step itself."""
    lines = [
        f"episode {episode}, turn {turn}: {dump.observation(episode, turn)}",
        f"    {dump.response_with_role(episode, turn)}",
        f"return {record.returns[episode, turn]:.3g}, advantage {record.advantages[episode, turn]:+.3g}",
    ]
    for group in step_groups(dump, record, episode, turn):
        members = group["members"]
        name = "prompt group" if group["level"] < 0 else f"level {group['level']}"
        used = f"weight {group['weight']:.2f}" if group["weight"] else "says nothing and is left out"
        lines.append(f"\n{name}: {len(members)} steps, mean {group['mean']:.3g}, advantage {group['advantage']:+.3g}, {used}")
        if group["level"] > 0:
            lines.append("  after " + "  |  ".join(group["history"][:-1]))
        # The members that differ most are the most informative.
        order = sorted(members, key=lambda m: -m["value"])
        ends = {*range(shown - shown // 2), *range(len(order) - shown // 2, len(order))}
        last = -1
        for place, member in enumerate(order):
            here = "  <- this step" if (member["episode"], member["turn"]) == (episode, turn) else ""
            if len(order) > shown and place not in ends and not here:
                continue
            if place > last + 1:
                lines.append(f"    ... {place - last - 1} more")
            last = place
            action = " ".join(dump.action(member["episode"], member["turn"]).split())
            where = f"episode {member['episode']:3d}, turn {member['turn']:2d}"
            lines.append(f"    {where}: {member['value']:7.3f} ({member['advantage']:+.3f})  > {action[-60:]}{here}")
    return "\n".join(lines)


def steps_table(dump: Dump, record: Estimate) -> dict[str, np.ndarray]:
    """Returns one row per step that happened: its place, its numbers, and for each level group size, advantage and weight.

    success means something where the episode is `judged`. The place of an agent's step is also its branch, and the turn from
    which it goes on (`parent`), -1 if it begins anew.
    """
    e = dump.episodes
    rows, turns = np.nonzero(e.mask)
    places = {"episode": rows, "turn": turns, "group": e.groups[rows], "task": e.task[rows]}
    places |= {"success": e.success[rows], "judged": e.judged[rows]}
    fields: dict[str, jax.Array] = {"state": e.states, "role": e.agents, "invalid": e.invalid, "reward": e.rewards}
    fields |= {"return": record.returns, "advantage": record.advantages}
    for column, level in enumerate(record.levels):
        name = "prompt_group" if level < 0 else f"level{level}"
        for part in ("sizes", "advantages", "weights"):
            fields[f"{name}_{part.removesuffix('s')}"] = getattr(record, f"level_{part}")[..., column]
    if dump.report and dump.report.get("branches"):
        for place, name in (("branch", "branches"), ("parent", "parents")):
            numbers = [number for of_turns in dump.report[name] for number in of_turns]
            places[place] = np.array([-1 if number is None else number for number in numbers], np.int64)
    table = {name: np.asarray(values) for name, values in places.items()}
    return table | {name: np.asarray(values)[rows, turns] for name, values in fields.items()}


def transitions(dump: Dump, record: Estimate, group: int) -> dict[str, np.ndarray]:
    """Returns the graph that a prompt group walked: one row per edge between states that some step took.

    state, next_state: ids; count: steps; advantage: their mean; ends: number of them that ended their episode with success.
    """
    e = dump.episodes
    steps = e.mask & (e.groups == group)[:, None]
    last = np.arange(e.mask.shape[1]) == e.mask.sum(1)[:, None] - 1
    pairs = np.stack([e.states[steps], e.next_states[steps]], axis=1)
    edges, edge = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
    count = np.bincount(edge.ravel(), minlength=len(edges))
    total = np.bincount(edge.ravel(), record.advantages[steps], minlength=len(edges))
    ends = np.bincount(edge.ravel(), (last & e.success[:, None])[steps], minlength=len(edges))
    return {
        "state": edges[:, 0],
        "next_state": edges[:, 1],
        "count": count,
        "advantage": total / np.maximum(count, 1),
        "ends": ends.astype(int),
    }


def compare(dump: Dump, names: tuple[str, ...] = ("grpo", "gigpo", "hgpo"), **options) -> dict[str, jax.Array | np.ndarray]:
    """Returns the advantages of several estimators, one row per step: episode, turn and, for each name, its advantage.

    Advantages are divided by their root mean square over the batch, because the scales of estimators differ.
    """
    e = dump.episodes
    rows, turns = np.nonzero(e.mask)
    table: dict[str, jax.Array | np.ndarray] = {"episode": rows, "turn": turns}
    for name in names:
        values = dump.estimate(name, **options).advantages[rows, turns]
        table[name] = values / max(float(np.sqrt(np.mean(values**2))), 1e-12)
    return table


def oracle_errors(dump: Dump, estimators: dict[str, dict], group_size: int = 0) -> dict[str, dict[str, float]]:
    """Computes each estimator's error against the Oracle groups of the same episodes (`diagnostics.against_oracle`).

    estimators: displayed name -> options, with the estimator's own name as `name`. If possible, they only centre
    (`normalize="mean"`), because the scales must agree.
    group_size: prompt groups are split into groups of this many episodes for the estimators, while the Oracle compares all of
    them. By default they are not split.
    """
    e = dump.episodes
    ids = diagnostics.oracle_groups(e.states, e.mask, e.groups)
    returns = dump.estimate("hgpo").returns
    if group_size:
        place = np.empty(len(e.groups), np.int64)  # of each episode in its prompt group
        for group in np.unique(e.groups):
            place[e.groups == group] = np.arange((e.groups == group).sum())
        _, dealt = np.unique(np.stack([e.groups, place // group_size]), axis=1, return_inverse=True)
        dump = dataclasses.replace(dump, episodes=e.replace(groups=dealt.ravel().astype(np.int32)))
    errors = {}
    for label, options in estimators.items():
        centred = {"normalize": "mean"} if "normalize" in parameters(options["name"])[1] else {}
        record = dump.estimate(**options | centred)
        errors[label] = diagnostics.against_oracle(record.advantages, returns, ids)
    return errors
