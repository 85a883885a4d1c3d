"""G2PO: steps valued by the mean values of the states that they join (Wang et al., 2026, arXiv 2606.22995)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.gagpo import among_peers, state_values
from hgpo_jax.advantages.gigpo import step_advantages, with_episode
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_magnitudes, episode_scores, following, last_steps


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
    V(s) is the mean over the visits of s in the prompt group of their trajectories' scores, times gamma for every step from
    there to the end. After a success's last step it is the score, after a failure's 0.
        A_NC, node-centric: V(s'), less the penalty of an invalid step, among the visits of s, as in `gigpo`.
        A_EC, edge-centric: V(s') - V(s), among all steps of the prompt group, without the penalty.
    normalize: `mean_std`, as on ALFWorld, divides all three parts by (sample std + 1e-6); WebShop's recipe is `mean`.
    The record's two levels are the prompt group (-1), whose advantage is the episode's, and the state's group (0) with
    A_NC + A_EC; its `returns` are what A_NC compares.
    """
    ended = last_steps(batch.mask)
    at_the_end = batch._replace(rewards=jnp.where(ended, episode_scores(batch), 0.0))
    values, _ = state_values(at_the_end, gamma)
    final = jnp.where(success[:, None], at_the_end.rewards, 0.0)
    after = jnp.where(ended, final, gamma * following(values, batch.mask))
    magnitudes = episode_magnitudes(batch, invalid_penalty)
    penalised = after - invalid_penalty * batch.invalid
    node, sizes = step_advantages(batch, penalised, magnitudes, normalize)
    edge = among_peers(batch, after - gamma * values, magnitudes, normalize)
    compared = jnp.where(batch.mask, penalised, 0.0)
    return with_episode(batch, compared, node + edge, sizes, step_weight, statistics, normalize, invalid_penalty)
