"""G2PO: steps valued by the mean values of the states that they join (Wang et al., 2026, arXiv 2606.22995)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.gagpo import among_peers, state_values
from hgpo_jax.advantages.gigpo import step_advantages, with_episode
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_scores, following, last_steps, return_magnitudes, step_returns


def g2po(
    batch: Batch,
    *,
    success: jax.Array,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO's advantage plus `step_weight (A_NC + A_EC)` of the step from state s to s'.

    success: bool[B].
    V(s) is gamma times the mean return of the state's visits in the prompt group: the return is discounted once before the last
    step, too. After a success V is the trajectory's score, after a failure 0.
        A_NC, node-centric: V(s'), less the penalty of an invalid step, among the visits of s, as in `gigpo`.
        A_EC, edge-centric: V(s') - V(s), among all steps of the prompt group, without the penalty.
    normalize: `mean_std`, as on ALFWorld, divides all three parts by (sample std + 1e-6); WebShop's recipe is `mean`.
    The released code discounts the whole score from the last step on; here each reward is discounted from its own step.
    The record's two levels are the prompt group (-1), whose advantage is the episode's, and the state's group (0) with
    A_NC + A_EC.
    """
    values, _ = state_values(batch, gamma)
    ended = last_steps(batch.mask)
    final = jnp.where(success[:, None], episode_scores(batch), 0.0)
    after = jnp.where(ended, final, gamma * following(values, batch.mask))
    magnitudes = return_magnitudes(batch, gamma, invalid_penalty) + jnp.abs(after)
    penalised = after - invalid_penalty * batch.invalid
    node, sizes = step_advantages(batch, penalised, magnitudes, normalize)
    edge = among_peers(batch, after - gamma * values, magnitudes + jnp.abs(values), normalize)
    returns = step_returns(batch, gamma, invalid_penalty)
    return with_episode(batch, returns, node + edge, sizes, step_weight, statistics, normalize, invalid_penalty)
