"""The batch of an oracle as lists, and groups of its steps as dictionaries of contexts; float64."""

import numpy as np

EPSILON = 1e-6


class Steps:
    """The batch as lists, one for each trajectory."""

    def __init__(self, rewards, mask, states, groups, invalid, by_role=None):
        self.length = [int(sum(row)) for row in mask]
        self.rewards = [[float(x) for x in row[:n]] for row, n in zip(rewards, self.length, strict=True)]
        self.states = [[int(x) for x in row[:n]] for row, n in zip(states, self.length, strict=True)]
        self.groups = [int(x) for x in groups]
        self.invalid = [[bool(x) for x in row[:n]] for row, n in zip(invalid, self.length, strict=True)]
        self.roles = by_role
        self.all = [(b, t) for b, n in enumerate(self.length) for t in range(n)]

    def peers(self, step):
        """Steps with the same are compared: their prompt group, or its steps of one role."""
        b, t = step
        return self.groups[b] if self.roles is None else (self.groups[b], int(self.roles[b, t]))

    def penalty(self, step, size):
        return size if self.invalid[step[0]][step[1]] else 0.0

    def returns(self, gamma, penalty=0.0):
        result = {}
        for b, t in self.all:
            later = self.rewards[b][t:]
            result[b, t] = sum(gamma**j * r for j, r in enumerate(later)) - self.penalty((b, t), penalty)
        return result

    def score(self, b):
        return sum(self.rewards[b])

    def context(self, step, k):
        b, t = step
        return tuple(self.states[b][t - k : t + 1]) if t >= k else None

    def padded_context(self, step, k):
        b, t = step
        return tuple(self.states[b][t - j] if t >= j else None for j in range(k + 1))


def grouped(steps, key):
    """{key(step): [steps]}, steps whose key is None left out."""
    found = {}
    for step in steps:
        if key(step) is not None:
            found.setdefault(key(step), []).append(step)
    return found


def group_means(values, steps, key):
    """{step: its group's mean}, exact where all are equal."""
    result = {}
    for members in grouped(steps, key).values():
        numbers = [values[step] for step in members]
        result |= dict.fromkeys(members, numbers[0] if len(set(numbers)) == 1 else sum(numbers) / len(numbers))
    return result


def deviations(values, members, ddof, normalize):
    """{step: (value - mean) [/ (std + 1e-6)]} over one group; 0 where all are equal."""
    numbers = [values[step] for step in members]
    if max(numbers) == min(numbers):
        return dict.fromkeys(members, 0.0)
    mean = sum(numbers) / len(numbers)
    scale = 1.0
    if normalize == "mean_std":
        scale = np.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - ddof)) + EPSILON
    return {step: (values[step] - mean) / scale for step in members}
