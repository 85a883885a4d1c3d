"""Recorded episodes against a plain loop over turns: the oracle of the rollout's tests, for any compiled environment."""

import jax
import numpy as np

from hgpo_jax.rollout.episodes import Episodes


def action_of(response: list[int], end: int, action_length: int) -> tuple[np.ndarray, bool]:
    """The words before the end token, and whether there was one; without one there is no action."""
    words = response[: response.index(end)] if end in response else []
    return np.array(words + [0] * (action_length - len(words)), np.int32), end in response


def check_against_plain_play(env, e: Episodes, tasks, history: int, end: int, act: int) -> None:
    """Plays the recorded responses in the environment, one at a time, and rebuilds every prompt by hand.

    tasks: the random key of each episode's task. history: K. end, act: token ids. State ids must be equal exactly where
    observations are. In a team a prompt shows the turns of its own role alone.
    """
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    pair = env.observation_length + env.action_length
    named = set()  # (state id, observation)
    for b in range(len(e.task)):
        state, seen = jax.device_get(reset(tasks[b]))
        goal, done, rewards = env.goal(state).tolist(), False, 0.0
        pasts = [[] for _ in getattr(env, "roles", ["agent"])]
        assert e.task[b] == state.task
        for t in range(env.max_turns):
            assert e.mask[b, t] == (not done), (b, t)
            if done:
                continue
            np.testing.assert_array_equal(e.observations[b, t], seen)
            named.add((int(e.states[b, t]), tuple(seen.tolist())))
            role = int(env.role(state)) if hasattr(env, "role") else 0
            assert e.agents[b, t] == role
            past = pasts[role]
            recent = past[max(0, len(past) - history) :]
            prompt = [*goal, *[0] * (pair * (history - len(recent))), *np.ravel(recent).astype(int), *seen, act]
            np.testing.assert_array_equal(e.prompts[b, t], prompt)
            assert e.prompt_lengths[b, t] == len(prompt)
            action, ended = action_of(e.responses[b, t, : e.response_lengths[b, t]].tolist(), end, env.action_length)
            past.append([*seen, *action])
            state, seen, reward, done, invalid = jax.device_get(step(state, action))
            assert e.rewards[b, t] == reward, (b, t)
            assert e.invalid[b, t] == (invalid or not ended), (b, t)
            named.add((int(e.next_states[b, t]), tuple(seen.tolist())))
            rewards += reward
        assert e.success[b] == (rewards > 0)
        assert e.truncated[b] == (not e.success[b])
        if e.truncated[b]:  # the prompt that would have come next
            past = pasts[int(env.role(state)) if hasattr(env, "role") else 0]
            recent = past[max(0, len(past) - history) :]
            prompt = [*goal, *[0] * (pair * (history - len(recent))), *np.ravel(recent).astype(int), *seen, act]
        np.testing.assert_array_equal(e.final_prompts[b], prompt if e.truncated[b] else 0)
        assert e.final_prompt_lengths[b] == len(prompt) * e.truncated[b]
    ids, observations = zip(*named, strict=True)
    assert len(set(ids)) == len(set(observations)) == len(named) > 1
