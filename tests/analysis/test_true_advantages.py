"""True advantages against those of a corridor whose values can be computed, because the policy always sees the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.analysis import diagnostics
from hgpo_jax.analysis.true_advantages import true_advantages
from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import network
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.tokenizer import ACT
from hgpo_jax.setup.build import build
from hgpo_jax.utils.errors import ConfigError
from tests.envs.test_user_code import COMPILED

SIZE, T, GAMMA = 4, 5, 0.9
LEFT, RIGHT = 1, 2


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corridor")
    (folder / "rooms.py").write_text(COMPILED)
    config = load(None, [
        f"env.name={folder}/rooms.py:Corridor", f"env.options.size={SIZE}", f"env.options.max_turns={T}", "warm_start=none",
        "rollout.history_length=0", "rollout.prompt_groups=4", "rollout.group_size=4", "policy.hidden_size=16",
        "policy.intermediate_size=16", "policy.num_hidden_layers=1", f"advantage.gamma={GAMMA}", f"cache_dir={folder}/cache",
    ])  # fmt: skip
    return build(config, make_mesh("data=1", jax.devices()[:1]))


@pytest.fixture(scope="module")
def played(job):
    """The weights, the tasks and the episodes of one rollout.

    The blocks add nothing to the embeddings, which are such that the policy often says one of the two words, and then ends.
    """
    tokenizer, params = job.tokenizer, jax.tree.map(jnp.zeros_like, job.given_params[SHARED])
    params["norm"] = jax.tree.map(jnp.ones_like, params["norm"])
    table = params["embed_tokens"]["embedding"]
    table = table.at[tokenizer.convert_tokens_to_ids(ACT), 0].set(0.5).at[tokenizer.eos_token_id, 1].set(2.0)
    params["embed_tokens"]["embedding"] = table.at[LEFT, :2].set(jnp.array([0.4, 0.5])).at[RIGHT, :2].set(0.5)
    inputs = job.episode_inputs(0)
    return {SHARED: params}, inputs[0], jax.device_get(job.runner.rollout({SHARED: params}, *inputs).episodes)


def probabilities(job, params, episodes) -> tuple[float, float]:
    """Of going left and right, which are a word and the end token after it."""
    assert (episodes.prompts[episodes.mask] == episodes.prompts[0, 0]).all()
    end = job.tokenizer.eos_token_id
    batch = TrainingBatch(
        prompts=np.tile(episodes.prompts[0, 0], (2, 1)), prompt_lengths=np.full(2, episodes.prompt_lengths[0, 0]),
        responses=np.array([[LEFT, end], [RIGHT, end]]), response_lengths=np.full(2, 2), old_logp=np.zeros((2, 2)),
        advantages=np.zeros(2),
    )  # fmt: skip
    model = nnx.merge(network(job.policy.model), params[SHARED])
    logp, _ = jax.jit(token_logprobs)(model, batch)
    left, right = np.exp(np.asarray(logp, float).sum(1))
    assert left > 0.1 and right > 0.15
    return left, right


def exact_values(left: float, right: float) -> np.ndarray:
    """V[turns taken, cell], by dynamic programming from the last turn."""
    values = np.zeros((T + 1, SIZE))
    for t in range(T - 1, -1, -1):
        for at in range(SIZE - 1):
            for cell, share in ((max(at - 1, 0), left), (at + 1, right), (at, 1 - left - right)):
                values[t, at] += share * (10.0 if cell == SIZE - 1 else GAMMA * values[t + 1, cell])
    return values


def exact(job, played) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and values of the steps that happened, in order."""
    params, tasks, e = played
    V, found = exact_values(*probabilities(job, params, e)), []
    end, starts = job.tokenizer.eos_token_id, jax.jit(jax.vmap(job.runner.env.reset))(tasks)[0].at
    for b in range(len(e.mask)):
        at = int(starts[b])
        for t in range(int(e.mask[b].sum())):
            words = e.responses[b, t, : e.response_lengths[b, t]].tolist()
            move = {LEFT: -1, RIGHT: 1}.get(words[0], 0) if end in words else 0
            after = min(max(at + move, 0), SIZE - 1)
            reward = 10.0 if after == SIZE - 1 else 0.0
            assert reward == e.rewards[b, t]
            found.append((reward + (0.0 if reward else GAMMA * V[t + 1, after]) - V[t, at], V[t, at]))
            at = after
    return tuple(np.array(found).T)


@pytest.mark.slow  # thousands of continuations
def test_advantages_and_values_are_the_true_ones_up_to_their_standard_errors(job, played):
    params, tasks, e = played
    advantages, values = exact(job, played)
    truth = true_advantages(job, params, tasks, e, continuations=256)
    mask = e.mask
    assert not truth.advantages[~mask].any() and not truth.standard_error[~mask].any()
    assert 0 < e.success.sum() < len(e.success) and np.abs(advantages).max() > 1
    error, noise = truth.advantages[mask] - advantages, truth.standard_error[mask]
    known = noise > 0  # the last turn's success, and states from which no sample succeeded
    assert known.mean() > 0.8
    z = error[known] / noise[known]
    assert np.abs(z).max() < 6 and 0.6 < np.mean(z**2) < 1.6
    assert abs(np.mean(truth.values[mask] - values)) < 0.1
    against = diagnostics.against_truth(advantages_in_place(advantages, mask), truth.advantages, truth.standard_error, mask)
    assert abs(against["mse"]) < 0.02 * against["spread"] and against["cosine"] > 0.98


def advantages_in_place(values, mask):
    placed = np.zeros(mask.shape)
    placed[mask] = values
    return placed


@pytest.mark.slow
def test_the_error_of_an_estimate_does_not_depend_on_the_noise_of_the_truth(job, played):
    """Twice the true advantages plus one have a mean square error of mean((A + 1)^2), however few continuations there are."""
    params, tasks, e = played
    advantages, _ = exact(job, played)
    wrong = advantages_in_place(2 * advantages + 1, e.mask)
    expected = np.mean((advantages + 1) ** 2)
    few = [true_advantages(job, params, tasks, e, continuations=4, seed=seed) for seed in range(8)]
    found = [diagnostics.against_truth(wrong, truth.advantages, truth.standard_error, e.mask) for truth in few]
    assert np.mean([one["mse"] for one in found]) == pytest.approx(expected, rel=0.15)
    uncorrected = [np.mean((wrong - truth.advantages)[e.mask] ** 2) for truth in few]
    assert np.mean(uncorrected) > 1.2 * expected
    again = true_advantages(job, params, tasks, e, continuations=4, seed=0)
    np.testing.assert_array_equal(few[0].advantages, again.advantages)
    assert (few[0].advantages != few[1].advantages).any()


def test_refusals_and_nothing_to_compare(job, played):
    with pytest.raises(ConfigError, match="continuations=1: give at least 2"):
        true_advantages(job, *played, continuations=1)
    nothing = np.zeros((2, 3))
    assert all(np.isnan(x) for x in diagnostics.against_truth(nothing, nothing, nothing, nothing.astype(bool)).values())
    assert np.isnan(diagnostics.against_truth(nothing, nothing + 1, nothing, nothing == 0)["cosine"])
