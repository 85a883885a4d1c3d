"""Whether two rollouts gave the same episodes."""

import numpy as np

SAME = ("prompts", "prompt_lengths", "responses", "response_lengths", "rewards", "mask", "invalid", "groups", "success", "task")


def assert_same(episodes, reference):
    for name in SAME:
        np.testing.assert_array_equal(getattr(episodes, name), getattr(reference, name), err_msg=name)
    np.testing.assert_allclose(episodes.logp, reference.logp, atol=1e-5)
    for name in ("states", "next_states"):
        ours, theirs = getattr(episodes, name)[episodes.mask], getattr(reference, name)[reference.mask]
        pairs = set(zip(ours.tolist(), theirs.tolist(), strict=True))
        assert len(pairs) == len(set(ours.tolist())) == len(set(theirs.tolist())), name
