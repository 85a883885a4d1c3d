"""Plain NumPy oracles of published estimators, written from the sources' own text and nothing else.

Sources that were read: PGPO (arXiv 2609.02236 v1, whole text), GraphGPO (arXiv 2605.26684: a summary with the paper's
equations, and its published code `recipe/GraphGPO/core_graph.py`), GAGPO (arXiv 2605.13217: abstract and summaries only, no
code was found), REINFORCE++ (arXiv 2501.03262 v9, sections 1 to 5.1), KPO (arXiv 2602.10609: its abstract, others' notes with
its equations, and its published code, github.com/shuohe1995/verl-kpo). Each docstring tells what a source says ("source") from
what it leaves open ("reading").

Common arguments: rewards f[B, T]; mask bool[B, T], a prefix of every row; states int[B, T], equal ids = equal observations;
groups int[B], the prompt group; invalid bool[B, T]; next_states int[B, T], the observation after each step, in the same ids;
success bool[B]. All return f[B, T], 0 outside mask.
"""

import math

import numpy as np

EPSILON = 1e-6  # GiGPO's and GRPO's published code


def _steps(mask):
    return [(i, t) for i in range(len(mask)) for t in range(len(mask[i])) if mask[i][t]]


def _step_groups(mask, states, groups):
    """GiGPO's anchor-state groups: the visits of one observation within one prompt group, whatever the episode and the time."""
    members = {}
    for i, t in _steps(mask):
        members.setdefault((int(groups[i]), int(states[i][t])), []).append((i, t))
    return members


def _row_groups(mask, groups):
    """All steps of a prompt group, one entry per step."""
    members = {}
    for i, t in _steps(mask):
        members.setdefault(int(groups[i]), []).append((i, t))
    return members


def _spread(values):
    """Sample standard deviation (n - 1), as torch.std in the published code; the papers say only "standard deviation"."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _normalized(values, normalize):
    """GiGPO's step part: value - mean, over std + 1e-6 unless normalize is "mean"; a group of one gives 0."""
    if len(values) == 1:
        return [0.0]
    mean = math.fsum(values) / len(values)
    scale = 1.0 if normalize == "mean" else _spread(values) + EPSILON
    return [(value - mean) / scale for value in values]


def _normalized_in(values, members, normalize):
    out = np.zeros(values.shape)
    for steps in members.values():
        for step, value in zip(steps, _normalized([values[step] for step in steps], normalize), strict=True):
            out[step] = value
    return out


def _returns(rewards, mask, gamma):
    out = np.zeros(np.shape(rewards))
    for i in range(len(mask)):
        running = 0.0
        for t in reversed(range(len(mask[i]))):
            if mask[i][t]:
                running = rewards[i][t] + gamma * running
                out[i, t] = running
    return out


def _penalties(mask, invalid, invalid_penalty):
    out = np.zeros(np.shape(mask))
    for i, t in _steps(mask):
        if invalid[i][t]:
            out[i, t] = invalid_penalty
    return out


def _last_step(mask, i):
    return sum(bool(valid) for valid in mask[i]) - 1


def _episode_part(rewards, mask, groups, penalties, normalize):
    """GRPO over step rows (verl-agent's default): every step is a row that carries its episode's score less its own penalty.

    Source (code): mean and sample std over all step rows of the prompt group; a prompt group with a single row has mean 0 and
    std 1, so its score stays (over 1 + 1e-6), unlike the step part, which gives 0.
    """
    scores = np.zeros(np.shape(rewards))
    for i, t in _steps(mask):
        scores[i, t] = math.fsum(rewards[i][u] for u in range(_last_step(mask, i) + 1)) - penalties[i, t]
    out = _normalized_in(scores, _row_groups(mask, groups), normalize)
    for steps in _row_groups(mask, groups).values():
        if len(steps) == 1:
            out[steps[0]] = scores[steps[0]] / (1.0 if normalize == "mean" else 1.0 + EPSILON)
    return out


def pgpo(rewards, mask, states, groups, invalid, *, success, gamma=0.95, invalid_penalty=0.1):
    """PGPO: A = A^S + beta (1 - p_succ)^alpha A^Phi (eqs. 10, 11), no episode part (section 4.5).

    Source: R is the return discounted by eta (`gamma` here; eq. 1, 0.95 in B.3); A^S its z-score in the group of the current
    observation (eq. 3); Phi the mean of R over the visits of an observation in the rollout group (eq. 6);
    delta = gamma_phi Phi(s') - Phi(s) (eq. 7, gamma_phi = 1 by default); at the terminal step, which has no successor group,
    delta = gamma_phi r_final - Phi(s) (text below eq. 7); A^Phi the z-score of delta in the group of the current observation, 0
    for groups of one and of no variance (eq. 8); p_succ the share of the task's trajectories with r_final > 0 (eq. 9; here
    `success`); alpha = 2, beta = 1 (5.1); invalid actions cost 0.1 (B.3).
    Reading: sample std and epsilon 1e-6 (GiGPO's code; the paper: "a small constant"); the last step is terminal however the
    episode ended, so r_final = 0 after a cut at the horizon even where the next observation has a group; r_final is the reward
    of the last step without the penalty; the penalty lowers R at its step only, and is not in Phi (the paper's Phi is a mean of
    R, its analysis leaves penalties out); the successor is the next row's state.
    """
    penalties = _penalties(mask, invalid, invalid_penalty)
    plain = _returns(rewards, mask, gamma)
    members = _step_groups(mask, states, groups)
    potential = {key: math.fsum(plain[step] for step in steps) / len(steps) for key, steps in members.items()}
    delta = np.zeros(np.shape(rewards))
    for i, t in _steps(mask):
        after = rewards[i][t] if t == _last_step(mask, i) else potential[int(groups[i]), int(states[i][t + 1])]
        delta[i, t] = after - potential[int(groups[i]), int(states[i][t])]
    step_part = _normalized_in(plain - penalties, members, "mean_std")
    potential_part = _normalized_in(delta, members, "mean_std")
    out = np.zeros(np.shape(rewards))
    for i, t in _steps(mask):
        peers = [j for j in range(len(groups)) if groups[j] == groups[i] and _last_step(mask, j) >= 0]
        failed = 1.0 - sum(bool(success[j]) for j in peers) / len(peers)
        out[i, t] = step_part[i, t] + failed**2 * potential_part[i, t]
    return out


def graph_distances(edges):
    """Steps from each node of `edges` (pairs) to the node "success"; unreachable: the largest finite distance + 1.

    Source (code): all edge weights 1; "success" counts with distance 0 even if no episode reached it, so without any success
    every node is at 1.
    """
    distance = {"success": 0}
    frontier = ["success"]
    while frontier:
        found = []
        for node in frontier:
            for before, after in edges:
                if after == node and before not in distance:
                    distance[before] = distance[node] + 1
                    found.append(before)
        frontier = found
    furthest = max(distance.values())
    for edge in edges:
        for node in edge:
            distance.setdefault(node, furthest + 1)
    return distance


def graphgpo(rewards, mask, states, groups, invalid, *, next_states, success, normalize="mean_std", invalid_penalty=0.1):
    """GraphGPO: step part on distances in the prompt group's transition graph, plus GRPO's episode part.

    Source: one graph a prompt, its nodes the observations, its edges the observed transitions; d = shortest distance to the
    success state, unreachable = largest + 1; outgoing steps of an equal state form a group, normalised, 0 for groups of one;
    A = beta_G A^G + beta_E A^E. Source (code only): the next observation of the last step of a successful episode is replaced
    by the string "success" (no observation is ever the goal); step return 10 * omega ** d(next); weights 1 and 1. Omega 0.1 is
    the value of a public reproduction (a helper script of the recipe has 0.2). The paper's own reward is r_succ * omega **
    (d(next) + 1): ten times smaller. The z-score hides that but for epsilon and the penalty, "mean" does not.
    Reading: the penalty is subtracted from the step return and from the row's score (verl-agent's generic step; the trainer of
    the recipe was not found).
    """
    penalties = _penalties(mask, invalid, invalid_penalty)
    after = {(i, t): int(next_states[i][t]) for i, t in _steps(mask)}
    after |= {(i, t): "success" for i, t in after if success[i] and t == _last_step(mask, i)}
    step_return = np.zeros(np.shape(rewards))
    for steps in _row_groups(mask, groups).values():
        distance = graph_distances([(int(states[i][t]), after[i, t]) for i, t in steps])
        for step in steps:
            step_return[step] = 10.0 * 0.1 ** distance[after[step]]
    step_part = _normalized_in(step_return - penalties, _step_groups(mask, states, groups), normalize)
    return step_part + _episode_part(rewards, mask, groups, penalties, normalize)


def gagpo(rewards, mask, states, groups, invalid, *, gamma=0.95, lam=0.95, normalize="mean_std", invalid_penalty=0.1):
    """GAGPO: GAE on V(s) = mean discounted return of an observation's visits, normalised over the prompt group.

    Source: V from the steps of all sampled trajectories whose text state is equal; TD residuals and GAE's recursion for each
    environment step; no trajectory-level term (adding one hurts); group normalisation, which removes differences of scale
    between tasks (normalising over the batch, or not at all, hurts); lambda = 0 hurts, and one hyperparameter at 1.0 does too.
    Reading: "group" = prompt group, all its steps; mean and sample std + 1e-6; V = 0 after the last step, cut or not; the
    value of lambda; all of the penalty, of which the text that was found says nothing: it is subtracted from its own step after
    the recursion, so that nothing flows back in time, and V is a mean of returns without it.
    """
    penalties = _penalties(mask, invalid, invalid_penalty)
    returns = _returns(rewards, mask, gamma)
    members = _step_groups(mask, states, groups)
    value = {step: math.fsum(returns[s] for s in steps) / len(steps) for steps in members.values() for step in steps}
    advantages = np.zeros(np.shape(rewards))
    for i in range(len(mask)):
        running = 0.0
        for t in reversed(range(_last_step(mask, i) + 1)):
            running = rewards[i][t] + gamma * value.get((i, t + 1), 0.0) - value[i, t] + gamma * lam * running
            advantages[i, t] = running
    return _normalized_in(advantages - penalties, _row_groups(mask, groups), normalize)


def reinforce_pp(rewards, mask, states, groups, invalid, *, gamma=0.95, invalid_penalty=0.1):
    """REINFORCE++: A_t = r(o) - beta * sum of the KL from t to the end (eq. 4), whitened over the whole batch (eq. 5).

    Source: mean and std over all A of the batch, std + epsilon outside the root; gamma = lambda = 1 (section 3.3).
    Reading: a unit of T is a token in the paper, a step here; r(o) = the return from t on; sample std; the penalty at its own
    step; beta = 0 (the project has the KL in the loss).
    """
    raw = _returns(rewards, mask, gamma) - _penalties(mask, invalid, invalid_penalty)
    return _normalized_in(raw, _row_groups(mask, np.zeros(len(mask))), "mean_std")


def kalman_filtered(log_ratios, process_noise, observation_noise, initial_variance=0.0):
    """The posterior means of a scalar random walk from 0, seen through noise: one response's log-ratios, from left to right.

    Source: state rho_t = rho_{t-1} + N(0, Q), observation z_t = rho_t + N(0, V), prior mean 0; predict P + Q, gain
    P / (P + V), update mean and variance. The prior's variance P_0 = 0 is the published code's; no text was found that says it.
    """
    mean, variance, out = 0.0, initial_variance, []
    for observed in log_ratios:
        predicted = variance + process_noise
        gain = predicted / (predicted + observation_noise)
        mean, variance = mean + gain * (observed - mean), (1.0 - gain) * predicted
        out.append(mean)
    return out


def kpo_objective(
    new_logp, old_logp, token_mask, advantages, process_noise=1e-6, observation_noise=1.0, clip_low=3e-4, clip_high=4e-4
):
    """(objective, its derivative by each new log probability f[N, L]); advantages f[N]. To be maximised.

    Source: min(r A, clip(r, 1 - low, 1 + high) A) with the filtered ratio r, averaged over a response's tokens and then over
    responses; Q = 1e-6, V = 1, clips 3e-4 and 4e-4, GRPO's advantages. The published code multiplies r by
    exp(logp - the same logp held constant) and holds the filter constant: a token's derivative is r A, or 0 where clipped.
    """
    objective, derivative = 0.0, np.zeros(np.shape(new_logp))
    for row, advantage in enumerate(advantages):
        tokens = [t for t, valid in enumerate(token_mask[row]) if valid]
        log_ratios = [float(new_logp[row][t]) - float(old_logp[row][t]) for t in tokens]
        share = 1.0 / (len(tokens) * len(advantages))
        for t, smoothed in zip(tokens, kalman_filtered(log_ratios, process_noise, observation_noise), strict=True):
            ratio = math.exp(smoothed)
            clipped = min(max(ratio, 1.0 - clip_low), 1.0 + clip_high)
            objective += share * min(ratio * advantage, clipped * advantage)
            if ratio * advantage <= clipped * advantage:
                derivative[row, t] = share * ratio * advantage
    return objective, derivative
