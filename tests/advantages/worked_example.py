"""The three trajectories of the worked example, padded to T = 6.

Its numbers are worked out by hand. The first: from its first step the first trajectory reaches a return of 48 / 2^3 = 6. The
seven visits of A have the returns 6, 24, 11, 0, 3, 6 and 48, whose mean is 14, so that step's advantage at level 0 is -8.
"""

import numpy as np

PATHS = ("ABAC", "ABAD", "AACBA")
REWARDS = ((0, 0, 0, 48), (11, 0, 0, 0), (0, 0, 0, 0, 48))


def worked_example(**changes):
    """Keyword arguments for `estimate`, gamma = 1/2."""
    rewards, states, mask = np.zeros((3, 6), np.float32), np.zeros((3, 6), np.int32), np.zeros((3, 6), bool)
    for row, (path, reward) in enumerate(zip(PATHS, REWARDS, strict=True)):
        states[row, : len(path)] = ["ABCD".index(letter) for letter in path]
        rewards[row, : len(path)] = reward
        mask[row, : len(path)] = True
    groups = np.zeros(3, np.int32)
    return {"rewards": rewards, "mask": mask, "states": states, "groups": groups, "gamma": 0.5, **changes}


def ragged(*rows):
    """f64[3, 6] from the rows' numbers, zero padded."""
    table = np.zeros((3, 6))
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
