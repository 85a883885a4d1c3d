"""KPO in plain NumPy, written from the text of its sources and nothing else.

Read were KPO's abstract (arXiv 2602.10609), others' notes with its equations, and its published code,
github.com/shuohe1995/verl-kpo. Each docstring tells what a source says ("source") from what it leaves open ("reading").
"""

import math

import numpy as np


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
