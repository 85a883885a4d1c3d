"""Graphs of observed transitions, for oracles: dictionaries of nodes, one graph for each prompt group; float64.

Nothing here is taken from `hgpo_jax`.
"""

import numpy as np


def goal_distances(data, next_states, success):
    """{step: distance of its next state to the node "success"}: breadth-first from there, by prompt group."""
    result = {}
    for group in set(data.groups):
        steps = [s for s in data.all if data.groups[s[0]] == group]
        after = {}
        for b, t in steps:
            reached = success[b] and t + 1 == data.length[b]
            after[b, t] = "success" if reached else int(next_states[b, t])
        edges = {(data.states[b][t], after[b, t]) for b, t in steps}
        distance, frontier = {"success": 0}, {"success"}
        while frontier:
            frontier = {a for a, b in edges if b in frontier and a not in distance}
            distance |= dict.fromkeys(frontier, max(distance.values()) + 1)
        for s in steps:
            reachable = "success" in after.values()
            result[s] = distance.get(after[s], max(distance.values()) + 1) if reachable else None
    return result


def closure(data, next_states, success, beta=0.98):
    """{step: discounted value of where it leads}: CRBC's V (eq. 8 and 9) by a linear system for each prompt group.

    Written from the paper's text by someone who had not seen `hgpo_jax`.
    """
    result = {}
    for group in set(data.groups):
        after, visits = {}, {}
        for b, t in data.all:
            if data.groups[b] != group:
                continue
            ended = t + 1 == data.length[b]
            after[b, t] = ("won" if success[b] else "lost") if ended else int(next_states[b, t])
            visits.setdefault(data.states[b][t], []).append(after[b, t])
        index = {s: i for i, s in enumerate(visits)}
        walk, won = np.zeros((len(index), len(index))), np.zeros(len(index))
        for s, all_after in visits.items():
            for x in all_after:
                if x == "won":
                    won[index[s]] += beta / len(all_after)
                elif x in index:
                    walk[index[s], index[x]] += 1 / len(all_after)
        value = np.linalg.solve(np.eye(len(index)) - beta * walk, won)
        for s, x in after.items():
            result[s] = beta * (1.0 if x == "won" else float(value[index[x]]) if x in index else 0.0)
    return result


def shares(values):
    """Of the largest absolute value."""
    largest = max(map(abs, values.values()), default=0)
    return {k: x / largest if largest else 0.0 for k, x in values.items()}


def potential(scores, distances):
    """The largest score, times 0.2 for each transition to its node."""
    return max([x * 0.2 ** distances[node] for node, x in shares(scores).items() if node in distances], default=0.0)


def milestone_returns(data, next_states, success, invalid_penalty, coverage, shrink, branch_alone):
    """MileGPO's returns of GraphGPO alone, and with milestones and traps (eq. 1 to 20), as ({step: return}, {step: return})."""
    plain, shaped = {}, {}

    def rate(users):
        return sum(bool(success[b]) for b in users) / len(users) if users else 0.0

    for group in set(data.groups):
        paths = {b: [*data.states[b], "g" if success[b] else int(next_states[b, n - 1])]
                 for b, n in enumerate(data.length) if n and data.groups[b] == group}  # fmt: skip
        steps = [(b, t) for b in paths for t in range(data.length[b])]
        after = {(b, t): "g" if success[b] and t + 1 == data.length[b] else int(next_states[b, t]) for b, t in steps}
        edge = {(b, t): (data.states[b][t], after[b, t]) for b, t in steps}
        edges = set(edge.values())
        nodes = {n for e in edges for n in e} | {n for path in paths.values() for n in path}
        distance = {n: {n: 0} for n in nodes}  # Floyd and Warshall's, over dictionaries
        for u, v in edges:
            distance[u].setdefault(v, 1)
        for k in nodes:
            for u in nodes:
                for v in nodes:
                    if k in distance[u] and v in distance[k]:
                        through = distance[u][k] + distance[k][v]
                        distance[u][v] = min(distance[u].get(v, through), through)

        won = [b for b in paths if success[b]]
        lost = [b for b in paths if not success[b]]
        base = rate(list(paths))
        visitors = {n: [b for b in paths if n in paths[b]] for n in nodes}
        winners = {n: [b for b in visitors[n] if success[b]] for n in nodes}
        users = {e: sorted({b for b, t in steps if edge[b, t] == e}) for e in edges}
        margin = {}
        for e in edges:
            siblings = [f for f in edges if f[0] == e[0] and f != e]
            mean = sum(rate(users[f]) for f in siblings) / len(siblings) if siblings else None
            margin[e] = None if mean is None else rate(users[e]) - mean
            margin[e] = 0.0 if margin[e] is not None and abs(margin[e]) < 1e-12 else margin[e]
        credit = shares({e: m or 0.0 for e, m in margin.items()})
        branch = {n: max([c for e, c in credit.items() if e[1] == n and c > 0], default=0.0) for n in nodes}
        progress = dict.fromkeys(nodes, 0.0)
        for u, v in edges:
            known = "g" in distance[u] and "g" in distance[v]
            nearer = distance[u]["g"] - distance[v]["g"] if known else 0
            excess = max(base - rate(visitors[v]), 0) if margin[u, v] is None else max(-margin[u, v], 0)
            gain = nearer + rate(visitors[v]) - base - excess
            if any(success[b] for b in users[u, v]) and gain > 1e-12:
                progress[v] = max(progress[v], gain)
        progress = shares(progress)
        milestones = [n for n in nodes if winners[n] and n != "g"]
        degree = shares({n: sum((e[0] == n) + (e[1] == n) for e in edges) for n in milestones})
        good, bad = {}, {}
        for n in milestones:
            covers = len(winners[n]) / max(len(won), 1)
            score = max(rate(visitors[n]) - base, 0) + covers + 0.25 * degree[n]
            retained = progress[n] > 0 or covers >= coverage or (branch_alone and branch[n] > 0)
            good[n] = score * (1 + branch[n] + progress[n]) if retained else shrink * score
        for n in nodes - set(milestones) - {"g"}:
            if visitors[n]:
                again = sum(paths[b].count(n) - 1 for b in visitors[n])
                score = base + 0.25 * len(visitors[n]) / max(len(lost), 1) * again / len(visitors[n])
                if score > 0.1 - 1e-12 and (len(visitors[n]) >= 2 or again):
                    bad[n] = score

        for s in steps:
            u, v = edge[s]
            penalty = data.penalty(s, invalid_penalty)
            plain[s] = (10 * 0.2 ** distance[v]["g"] if won and "g" in distance[v] else 0.0) - penalty
            rises = [max(potential(scores, distance[v]) - potential(scores, distance[u]), 0) for scores in (good, bad)]
            shaped[s] = plain[s] + 10 * 0.25 * (rises[0] - 0.25 * rises[1])
    return plain, shaped
