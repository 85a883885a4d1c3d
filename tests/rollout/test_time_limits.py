"""How an episode ends: by its task or by a time limit, with a success that is known or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from odd_env import Counting

from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.compiled import is_truncated
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.workers import EnvOutput, LocalWorkers
from hgpo_jax.sampling.continuous_batching import SlotResponse
from hgpo_jax.trainer.metrics import rollout_metrics, rollout_sums
from tests.rollout.test_compiled import Ring

T = 3
START = EnvOutput("at 2", ["go"], "goal", 0)
STEP = START._replace(observation="on")
# What the last output says, after how many turns: whether the episode was cut off, and its success.
ENDS = [
    (STEP._replace(done=True, won=True), 2, False, True),
    (STEP._replace(done=True), 2, False, False),  # lost before the limit: the task ended
    (STEP._replace(done=True), T, True, False),  # an environment that counts its turns
    (STEP, T, True, False),  # one that does not
    (STEP._replace(done=True, won=True), T, False, True),
    (STEP._replace(done=True, truncated=False), T, False, False),  # lost in the very last turn
    (STEP._replace(done=True, won=True, truncated=True), 2, True, True),  # survival is the success
    (STEP._replace(won=True), T, True, True),
    (STEP._replace(done=True, won=None), 2, False, None),
    (STEP._replace(done=True, won=None, truncated=True), 2, True, None),
]  # fmt: skip


@pytest.mark.parametrize(("output", "turns", "truncated", "won"), ENDS)
def test_the_end_of_an_episode(output, turns, truncated, won):
    buffer = EpisodeBuffer(Episodes.zeros(1, T, 4, 2), [0], history_length=1, strict=False)
    assert buffer.add_output(0, START)
    for turn in range(turns):
        response = SlotResponse(0, np.array([1, 2]), np.zeros(2))
        buffer.add_response(Prompt([1, 2, 3]), response, ParsedResponse("go", "go", True), True)
        last = turn == turns - 1
        assert buffer.add_output(0, output if last else STEP) == (not last)
    assert buffer.truncated(0) == truncated
    episodes, report = buffer.result()
    assert (episodes.truncated[0], episodes.success[0], episodes.judged[0]) == (truncated, bool(won), won is not None)
    assert report.story(episodes, 0, ["agent"]).outcome == {True: "success", False: "failure", None: "unknown"}[won]


def test_what_an_environments_info_says():
    class Telling(Counting):
        def step(self, action):
            *answer, _, info = super().step(action)
            return *answer, True, info | {"won": None, "truncated": np.True_}

    workers = LocalWorkers(Telling)
    workers.send([(0, 2, ("add 1",))])
    ((_, output),) = workers.receive(1)
    assert (output.won, output.score, output.truncated) == (None, None, True)


class Cut(Ring):
    def truncated(self, state):
        return state.turn % 2 == 1


@pytest.mark.parametrize(("env", "expected"), [(Ring(), [False, False, True, False]), (Cut(), [False, True, False, True])])
def test_a_compiled_one_may_say_it(env, expected):
    """By default where its turns are used up and it is not won."""
    last = env.max_turns
    state, _ = env.reset(jax.random.key(0))
    won = jnp.array([False, False, False, True])
    states = jax.vmap(lambda won: state.replace(cell=jnp.where(won, state.goal, state.goal + 1)))(won)
    turns = jnp.array([2, last - 1, last, last])
    states = states.replace(turn=jnp.array([2, 1, 2, 3]))
    assert jax.vmap(lambda *one: is_truncated(env, *one))(states, turns).tolist() == expected


def test_shares_of_episodes_that_are_known_and_what_they_are_if_failed_ones_are_lost():
    e = Episodes.zeros(6, T, 4, 2)
    e.mask[:4, 0] = e.judged[:3] = e.success[:2] = True  # of six: two won, one lost, one unknown, two failed
    e.rewards[0, 0], e.rewards[2, 0] = -1, 0.1
    metrics = lambda e: rollout_metrics([rollout_sums(e, 0.95, ("agent",))])  # noqa: E731
    known = metrics(e)
    assert known["success"] == pytest.approx(2 / 3) and known["success_at_least"] == pytest.approx(2 / 5)
    assert known["rewarded"] == pytest.approx(1 / 4) and known["won_unrewarded"] == 1
    e.judged[:] = e.success[:] = False
    assert np.isnan([metrics(e)[name] for name in ("success", "success_at_least")]).all()
