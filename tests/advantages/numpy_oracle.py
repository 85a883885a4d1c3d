"""The estimators as their definitions read: plain loops over steps and dictionaries, float64. Slow on purpose.

Nothing here is taken from `hgpo_jax`.
Each estimator takes a `Steps` and the further arrays of `estimate`, and gives {(trajectory, step): advantage}.
"""

import copy
from statistics import NormalDist

import numpy as np
from numpy_graphs import closure, goal_distances, milestone_returns
from numpy_steps import EPSILON, deviations, group_means, grouped


def hgpo(
    data, history_length=2, gamma=0.95, alpha=1.0, normalize="mean_std", weight_offset=2, base_group=False, invalid_penalty=0.1
):
    returns = data.returns(gamma, invalid_penalty)
    items = {step: [] for step in data.all}
    for k in range(history_length + 1):
        groups = grouped(data.all, lambda s, k=k: None if data.context(s, k) is None else (data.peers(s), data.context(s, k)))
        for members in groups.values():
            for step, advantage in deviations(returns, members, 0, normalize).items():
                items[step].append(((k + weight_offset) ** alpha, advantage))
    if base_group:
        for step, advantage in grpo(data, "per_step", normalize, invalid_penalty).items():
            items[step].append((float(weight_offset - 1) ** alpha, advantage))
    result = {}
    for step, pairs in items.items():
        kept = [(w, a) for w, a in pairs if a != 0]
        result[step] = sum(w * a for w, a in kept) / (sum(w for w, _ in kept) + EPSILON)
    return result


def episode_comparison(data, statistics, invalid_penalty, key):
    """{step: (score, steps or trajectories counted, deviation, sample std)}."""
    scores = {s: data.score(s[0]) - data.penalty(s, invalid_penalty) for s in data.all}
    result = {}
    for members in grouped(data.all, key).values():
        # What counts once: a step, or a trajectory as the average over its steps.
        units = [[s] for s in members] if statistics == "per_step" else list(grouped(members, lambda s: s[0]).values())
        mean = sum(sum(scores[s] for s in unit) / len(unit) for unit in units) / len(units)
        if len({scores[s] for s in members}) == 1:
            mean = scores[members[0]]
        squares = sum(sum((scores[s] - mean) ** 2 for s in unit) / len(unit) for unit in units)
        std = np.sqrt(squares / max(len(units) - 1, 1))
        for s in members:
            result[s] = (scores[s], len(units), scores[s] - mean, std)
    return result


def grpo(data, statistics="per_step", normalize="mean_std", invalid_penalty=0.1, agents=None):
    key = data.peers if agents is None else (lambda s: (data.peers(s), int(agents[s])))
    result = {}
    for step, (score, count, deviation, std) in episode_comparison(data, statistics, invalid_penalty, key).items():
        value, scale = (score, 1.0) if count == 1 else (deviation, std)
        result[step] = value / (scale + EPSILON) if normalize == "mean_std" else value
    return result


def dr_mas(data, agents, statistics="per_step", normalize="mean_std", invalid_penalty=0.1):
    return grpo(data, statistics, normalize, invalid_penalty, agents)


def rloo(data, statistics="per_step", invalid_penalty=0.1):
    compared = episode_comparison(data, statistics, invalid_penalty, data.peers)
    return {s: score if count == 1 else count / (count - 1) * deviation for s, (score, count, deviation, _) in compared.items()}


def state_group(data):
    return lambda s: (data.peers(s), data.states[s[0]][s[1]])


def step_part(data, values, normalize):
    result = {}
    for members in grouped(data.all, state_group(data)).values():
        result |= deviations(values, members, 1, normalize)
    return result


def gigpo(data, gamma=0.95, step_weight=1.0, statistics="per_step", normalize="mean_std", invalid_penalty=0.1):
    episode = grpo(data, statistics, normalize, invalid_penalty)
    step = step_part(data, data.returns(gamma, invalid_penalty), normalize)
    return {s: episode[s] + step_weight * step[s] for s in data.all}


def ecpo(
    data, actions, gamma=0.95, step_weight=1.0, prior_count=2.0, gate_count=4.0, statistics="per_step", normalize="mean_std",
    invalid_penalty=0.1,
):  # fmt: skip
    returns = data.returns(gamma, invalid_penalty)
    result = grpo(data, statistics, normalize, invalid_penalty)
    for members in grouped(data.all, state_group(data)).values():
        mean = sum(returns[s] for s in members) / len(members)
        spread = np.sqrt(sum((returns[s] - mean) ** 2 for s in members) / max(len(members) - 1, 1))
        chosen = grouped(members, lambda s: "invalid" if data.invalid[s[0]][s[1]] else int(actions[s]))
        means = {action: sum(returns[s] for s in tries) / len(tries) for action, tries in chosen.items()}
        between = sum(len(tries) * (means[action] - mean) ** 2 for action, tries in chosen.items()) / len(members)
        within = sum((returns[s] - means[action]) ** 2 for action, tries in chosen.items() for s in tries) / len(members)
        gate = np.tanh(len(members) / gate_count) * between / (between + within + EPSILON)
        for action, tries in chosen.items():
            calibrated = (len(tries) * means[action] + prior_count * mean) / (len(tries) + prior_count)
            advantage = (calibrated - mean) / (spread + EPSILON if normalize == "mean_std" else 1.0)
            for s in tries:
                result[s] += step_weight * gate * advantage
    return result


def himac(data, agents, actions, gamma=0.95, statistics="per_step", normalize="mean_std", invalid_penalty=0.1):
    returns, begin = data.returns(gamma), {}
    for b, t in data.all:  # who acts first plans
        begin[b, t] = (b, t) if agents[b, t] == agents[b, 0] else begin[b, t - 1]
    blueprints = [s for s in data.all if begin[s] == s]
    written_alike = grouped(blueprints, lambda s: (state_group(data)(s), int(actions[s])))
    worth = group_means(returns, blueprints, lambda s: (state_group(data)(s), int(actions[s])))
    result = {}
    for members in grouped(blueprints, state_group(data)).values():
        result |= deviations(worth, members, 1, normalize)
    for members in written_alike.values():
        steps = [s for s in data.all if begin[s] in members and begin[s] != s]
        numbers = [returns[begin[s]] for s in (steps if statistics == "per_step" else members)]
        if len(set(numbers)) <= 1:
            result |= dict.fromkeys(steps, 0.0)
            continue
        mean = sum(numbers) / len(numbers)
        std = np.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
        for s in steps:
            result[s] = (returns[begin[s]] - mean) / (std + EPSILON if normalize == "mean_std" else 1.0)
    return {s: result[s] - data.penalty(s, invalid_penalty) for s in data.all}


def whitened(values):
    numbers = list(values.values())
    if not numbers or max(numbers) == min(numbers):
        return dict.fromkeys(values, 0.0)
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return {s: (x - mean) / np.sqrt(variance + 1e-8) for s, x in values.items()}


def reinforce_pp(data, gamma=0.95, invalid_penalty=0.1):
    returns, result = data.returns(gamma, invalid_penalty), {}
    for members in grouped(data.all, lambda s: 0 if data.roles is None else int(data.roles[s])).values():
        result |= whitened({s: returns[s] for s in members})
    return result


def reinforce_pp_baseline(data, statistics="per_step", invalid_penalty=0.1):
    return whitened(grpo(data, statistics, "mean", invalid_penalty))


def stream(data, signals, k):
    """The same steps with signal k in place of the rewards."""
    result = copy.copy(data)
    result.rewards = [[float(x) for x in row[:n, k]] for row, n in zip(signals, data.length, strict=True)]
    return result


def dvao(data, signals, signal_weights=(), statistics="per_step", invalid_penalty=0.1):
    above, spread = dict.fromkeys(data.all, 0.0), dict.fromkeys(data.all, 0.0)
    streams = [(1.0, data, invalid_penalty)]
    streams += [(weight, stream(data, signals, k), 0.0) for k, weight in enumerate(signal_weights or [1.0] * signals.shape[-1])]
    for weight, one, penalty in streams:
        for step, (_, _, deviation, std) in episode_comparison(one, statistics, penalty, data.peers).items():
            above[step] += weight * deviation
            spread[step] += abs(weight) * std
    return {step: above[step] / (spread[step] + EPSILON) for step in data.all}


def adora(data, success, lengths, length_limit=None, statistics="per_step", normalize="mean_std", invalid_penalty=0.1):
    tokens = [sum(int(x) for x in row[:n]) for row, n in zip(lengths, data.length, strict=True)]
    result = grpo(data, statistics, normalize, invalid_penalty)
    for b, t in data.all:
        group = [i for i, n in enumerate(data.length) if n and data.groups[i] == data.groups[b]]
        won = [tokens[i] for i in group if success[i]]
        lost = [tokens[i] for i in group if not success[i] and (length_limit is None or tokens[i] < length_limit)]
        longer = won and (not lost or max(won) > sum(lost) / len(lost))
        result[b, t] *= 1.0 if longer else 0.1
    return result


def beacon(data, signals, gamma=0.95, step_weight=1.0, statistics="per_step", normalize="mean", invalid_penalty=0.1):
    returns, before = {}, {}
    for b, n in enumerate(data.length):
        most, milestones = 0, []
        for t in range(n):
            before[b, t] = most
            if signals[b, t, 0] > most:
                most = int(signals[b, t, 0])
                milestones.append(t)
        for t in range(n):
            ahead = [m for m in milestones if m >= t]
            returns[b, t] = (10 * gamma ** (ahead[0] - t) if ahead else 0.0) - data.penalty((b, t), invalid_penalty)
    result = grpo(data, statistics, normalize, invalid_penalty)
    for members in grouped(data.all, lambda s: (data.peers(s), before[s])).values():
        for s, advantage in deviations(returns, members, 1, normalize).items():
            result[s] += step_weight * advantage
    return result


def normal_scores(values, groups):
    """{b: the mean of the quantiles of a normal distribution at the ranks of the values equal to b's, in its group}."""
    result = {}
    for b, value in values.items():
        rest = sorted(values[i] for i in values if groups[i] == groups[b])
        places = [j for j, other in enumerate(rest) if abs(other - value) < 1e-9]
        quantiles = [NormalDist().inv_cdf((j + 0.5) / len(rest)) for j in places]
        result[b] = sum(quantiles) / len(quantiles)
    return result


def g2rpo(data, task, invalid_penalty=0.1):
    scores = {b: data.score(b) for b, n in enumerate(data.length) if n}
    result = normal_scores(normal_scores(scores, data.groups), task)
    return {s: result[s[0]] - data.penalty(s, invalid_penalty) for s in data.all}


def gdpo(data, signals, signal_weights=(), statistics="per_step", invalid_penalty=0.1):
    total = grpo(data, statistics, "mean_std", invalid_penalty)
    for k, weight in enumerate(signal_weights or [1.0] * signals.shape[-1]):
        for step, advantage in grpo(stream(data, signals, k), statistics, "mean_std", 0.0).items():
            total[step] += weight * advantage
    return whitened(total)


def gbpo_margins(data, statistics="per_step", invalid_penalty=0.1):
    result = {}
    for step, (score, count, _, std) in episode_comparison(data, statistics, invalid_penalty, data.peers).items():
        rest = [data.score(b) for b, n in enumerate(data.length) if n and data.groups[b] == data.groups[step[0]]]
        median, scale = (0.0, 1.0) if count == 1 else (float(np.median(rest)), std)
        result[step] = (score - median) / (scale + EPSILON)
    return result


def gbpo(data, statistics="per_step", invalid_penalty=0.1):
    return grpo(data, statistics, "mean_std", invalid_penalty)


def hapo(data, lengths, statistics="per_step", invalid_penalty=0.1):
    result = {}
    plain = grpo(data, statistics, "mean_std", invalid_penalty)
    for members in grouped(data.all, data.peers).values():
        values = {s: data.score(s[0]) - data.penalty(s, invalid_penalty) for s in members}
        tokens = [s for s in members for _ in range(int(lengths[s]))]
        mean, std = np.mean([values[s] for s in tokens]), np.std([values[s] for s in tokens])
        equal = len(set(values.values())) == 1
        own = {s: 0.0 if equal else (values[s] - mean) / (std + EPSILON) for s in members}
        result |= {s: plain[s] for s in members} if max(map(abs, own.values())) >= 5 else own
    return result


def hbpo(data, signals, success, statistics="per_step", invalid_penalty=0.1):
    limit = signals.shape[1]
    budget = [float(row[0, 0]) for row in signals]

    def score(n, b):
        return 4 * np.cos(np.pi * b / (2 * limit)) if n <= b else 4 * np.cos(np.pi * n / (2 * limit)) - (n - b) / limit

    scored = copy.copy(data)
    scored.rewards = [[score(n, budget[b]) if success[b] and n else 0.0] for b, n in enumerate(data.length)]
    result = grpo(scored, statistics, "mean_std", invalid_penalty)
    subgroups = episode_comparison(scored, statistics, 0.0, lambda s: (data.peers(s), budget[s[0]]))
    for s, (value, _, deviation, _) in subgroups.items():
        result[s] += value - deviation - 4 * np.cos(np.pi * budget[s[0]] / (2 * limit))
    return result


def temporal(data, values, gamma, lam, final_values=None):
    """GAE as the explicit double sum over later temporal differences."""
    result = {}
    for b, n in enumerate(data.length):
        after = [*(values[b, t] for t in range(1, n)), 0.0 if final_values is None else float(final_values[b])]
        delta = [data.rewards[b][t] + gamma * after[t] - values[b, t] for t in range(n)]
        for t in range(n):
            result[b, t] = sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, n))
    return result


def gae(data, values, final_values, gamma=0.95, lam=0.95, whiten=True, invalid_penalty=0.1):
    advantages = temporal(data, {s: float(values[s]) for s in data.all}, gamma, lam, final_values)
    advantages = {s: a - data.penalty(s, invalid_penalty) for s, a in advantages.items()}
    return whitened(advantages) if whiten else advantages


def hiper(
    data, switches, high_values, low_values, term_values, final_values, gamma=0.95, lam=0.95, whiten=True, invalid_penalty=0.1
):
    """HiPER with every segment as a list of its steps: [(advantages, targets)] of the switch, subgoal and action parts.

    The sums over later temporal differences are written out, by segment and inside each.
    """
    term, high, low = ({s: float(values[s]) for s in data.all} for values in (term_values, high_values, low_values))
    switch, subgoal, action = {}, {}, {}
    for b, n in enumerate(data.length):
        begins = [t for t in range(n) if t == 0 or switches[b][t]]
        segments = [list(range(begin, end)) for begin, end in zip(begins, [*begins[1:], n], strict=True)] if n else []
        after = [high[b, begin] for begin in begins[1:]] + [float(final_values[b])]  # V_high where each segment ends
        length = [len(segment) for segment in segments]
        collected = [sum(gamma**j * data.rewards[b][t] for j, t in enumerate(segment)) for segment in segments]
        by_segment = [collected[k] + gamma ** length[k] * after[k] - high[b, segment[0]] for k, segment in enumerate(segments)]
        for k, segment in enumerate(segments):
            later = [np.prod([lam * gamma ** length[i] for i in range(k, m)]) * by_segment[m] for m in range(k, len(segments))]
            subgoal[b, segment[0]] = sum(later)
            follows = [low[b, t] for t in segment[1:]] + [after[k]]
            by_step = [data.rewards[b][t] + gamma * value - low[b, t] for t, value in zip(segment, follows, strict=True)]
            for j, t in enumerate(segment):
                rest = segment[j:]
                action[b, t] = sum((gamma * lam) ** i * by_step[j + i] for i in range(len(rest)))
                reached = sum(gamma**i * data.rewards[b][u] for i, u in enumerate(rest)) + gamma ** len(rest) * after[k]
                switch[b, t] = reached - term[b, t]
    result = []
    for advantages, values in ((switch, term), (subgoal, high), (action, low)):
        found = {s: a - data.penalty(s, invalid_penalty) for s, a in advantages.items()}
        result.append((whitened(found) if whiten else found, {s: a + values[s] for s, a in found.items()}))
    return result


def state_means(data, gamma):
    return group_means(data.returns(gamma), data.all, state_group(data))


def gagpo(data, gamma=0.95, lam=0.95, normalize="mean_std", invalid_penalty=0.1):
    advantages = temporal(data, state_means(data, gamma), gamma, lam)
    advantages = {s: a - data.penalty(s, invalid_penalty) for s, a in advantages.items()}
    result = {}
    for members in grouped(data.all, data.peers).values():
        result |= deviations(advantages, members, 1, normalize)
    return result


def pgpo(data, success, gamma=0.95, normalize="mean_std", invalid_penalty=0.1):
    potential = state_means(data, gamma)
    delta = {}
    for b, t in data.all:
        ended = t + 1 == data.length[b]
        delta[b, t] = (data.rewards[b][t] if ended else potential[b, t + 1]) - potential[b, t]
    z = step_part(data, delta, "mean_std")
    step = step_part(data, data.returns(gamma, invalid_penalty), normalize)
    result = {}
    for b, t in data.all:
        peers = [i for i, n in enumerate(data.length) if n and data.groups[i] == data.groups[b]]
        rate = sum(bool(success[i]) for i in peers) / len(peers)
        result[b, t] = step[b, t] + (1 - rate) ** 2 * z[b, t]
    return result


def graphgpo(data, next_states, success, step_weight=1.0, statistics="per_step", normalize="mean_std", invalid_penalty=0.1):
    distances = goal_distances(data, next_states, success)
    returns = {s: (0.0 if d is None else 10 * 0.1**d) - data.penalty(s, invalid_penalty) for s, d in distances.items()}
    step = step_part(data, returns, normalize)
    episode = grpo(data, statistics, normalize, invalid_penalty)
    return {s: episode[s] + step_weight * step[s] for s in data.all}


def crbc(
    data, next_states, success, actions, step_weight=5.0, statistics="per_step", normalize="mean_std", invalid_penalty=0.1
):
    after = closure(data, next_states, success)
    act = {(b, t): "invalid" if data.invalid[b][t] else int(actions[b, t]) for b, t in data.all}
    result = grpo(data, statistics, normalize, invalid_penalty)
    for visits in grouped(data.all, lambda s: (data.peers(s), data.states[s[0]][s[1]])).values():
        value = np.mean([after[s] for s in visits])
        gain = {s: np.mean([after[o] for o in visits if act[o] == act[s]]) - value for s in visits}
        sigma = np.sqrt(np.mean([x * x for x in gain.values()]))
        if len({act[s] for s in visits}) > 1:
            result |= {s: result[s] + step_weight * gain[s] / max(sigma, 0.1) for s in visits}
    return result


def g2po(data, success, gamma=0.95, step_weight=1.0, statistics="per_step", normalize="mean_std", invalid_penalty=0.1):
    left = {(b, t): gamma ** (data.length[b] - t) * data.score(b) for b, t in data.all}
    value, after = group_means(left, data.all, state_group(data)), {}
    for b, t in data.all:
        ended = t + 1 == data.length[b]
        after[b, t] = value[b, t + 1] if not ended else data.score(b) if success[b] else 0.0
    node = step_part(data, {s: v - data.penalty(s, invalid_penalty) for s, v in after.items()}, normalize)
    edge = {}
    for members in grouped(data.all, data.peers).values():
        edge |= deviations({s: after[s] - value[s] for s in members}, members, 1, normalize)
    episode = grpo(data, statistics, normalize, invalid_penalty)
    return {s: episode[s] + step_weight * (node[s] + edge[s]) for s in data.all}


def milegpo(
    data, next_states, success, residual=0.2, coverage=1.1, shrink=0.0, branch_alone=False, statistics="per_step",
    normalize="mean_std", invalid_penalty=0.1,
):  # fmt: skip
    plain, shaped = milestone_returns(data, next_states, success, invalid_penalty, coverage, shrink, branch_alone)
    graph, mixed = step_part(data, plain, normalize), step_part(data, shaped, normalize)
    episode = grpo(data, statistics, normalize, invalid_penalty)
    return {s: episode[s] + graph[s] + residual * (mixed[s] - graph[s]) for s in data.all}


def eb_shrink(data, values, history_length):
    """(b_K by step, tau2 list, s2 list) from the sums as they are written."""
    keys = [lambda s: (data.peers(s),)]
    keys += [lambda s, k=k: (data.peers(s), data.padded_context(s, k)) for k in range(history_length + 1)]
    mean, size, ssw, s2, number = [], [], [], [], []
    for key in keys:
        found = grouped(data.all, key)
        mean.append(group_means(values, data.all, key))
        size.append({s: len(members) for members in found.values() for s in members})
        ssw.append(sum((values[s] - mean[-1][s]) ** 2 for s in data.all))
        number.append(sum(1 / size[-1][s] for s in data.all))
        s2.append(ssw[-1] / max(len(data.all) - number[-1], 1))
    value, tau2 = dict(mean[0]), []
    for j in range(1, len(keys)):
        d = len(data.all) - sum(size[j][s] / size[j - 1][s] for s in data.all)
        if abs(d) < 1e-9:
            tau2.append(0.0)
        else:
            tau2.append(max(0.0, (ssw[j - 1] - ssw[j] - (number[j] - number[j - 1]) * s2[j]) / d))
        for s in data.all:
            top = size[j][s] * tau2[-1]
            w = top / (top + s2[j]) if top + s2[j] > 0 else 0.0
            value[s] = w * mean[j][s] + (1 - w) * value[s]
    return value, tau2, s2


def eb_gae(data, history_length=2, gamma=0.95, lam=0.65, invalid_penalty=0.1):
    value, _, _ = eb_shrink(data, data.returns(gamma), history_length)
    advantages = temporal(data, value, gamma, lam)
    returns = data.returns(gamma)
    for members in grouped(data.all, lambda s: data.groups[s[0]]).values():
        if len({returns[s] for s in members}) == 1:
            advantages |= dict.fromkeys(members, 0.0)
    return {s: a - data.penalty(s, invalid_penalty) for s, a in advantages.items()}


def eb_td_offset(data, gamma):
    """o by step: beta * turn * the prompt group's mean return, beta the slope within level-0 groups."""
    returns = data.returns(gamma)
    mean = group_means(returns, data.all, data.peers)
    x = {(b, t): t * mean[b, t] for b, t in data.all}
    x_mean, return_mean = (group_means(values, data.all, state_group(data)) for values in (x, returns))
    top = sum((x[s] - x_mean[s]) * (returns[s] - return_mean[s]) for s in data.all)
    bottom = sum((x[s] - x_mean[s]) ** 2 for s in data.all)
    return {s: top / bottom * x[s] if bottom > 0 else 0.0 for s in data.all}


def eb_td(data, history_length=2, gamma=0.95, lam=0.35, invalid_penalty=0.1):
    offset = eb_td_offset(data, gamma)
    returns = data.returns(gamma)
    target = dict(returns)
    for _ in range(3):
        rest = {s: target[s] - offset[s] for s in data.all}
        shrunken, *_ = eb_shrink(data, rest, history_length)
        value = {s: offset[s] + shrunken[s] for s in data.all}
        advantages = temporal(data, value, gamma, lam)
        target = {s: value[s] + advantages[s] for s in data.all}
    for members in grouped(data.all, lambda s: data.groups[s[0]]).values():
        if all(returns[s] == 0 for s in members):
            advantages |= dict.fromkeys(members, 0.0)
    return {s: a - data.penalty(s, invalid_penalty) for s, a in advantages.items()}
