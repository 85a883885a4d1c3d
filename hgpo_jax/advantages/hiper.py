"""HiPER: advantages of the switch, subgoal and action parts of one answer (Peng et al., 2026, arXiv 2602.16165).

Source: the authors' code (github.com/JonP07/HiPER-agent, `hiper_hae/core_hae.py`), which has the levels and heads
of `hiper`. Of the paper we could read the abstract and summaries alone, one of which speaks of two value heads. In the code a
switch worth (q - beta) (V_high - V_low) stands as a comment, q whether the answer switched and beta how likely that was:
whether that is the paper's is left open by what we found.
Ours: one lambda for both levels (there 1 and 0.95 by default); V_high of what follows a trajectory that ran out of turns
(there 0, or on request the last step's V_low and the last segment's V_high); the sample std in whitening (there the
population's); the penalty outside the rewards (there in them); no rewards against keeping a subgoal or changing it
unsaid (there -0.3 each in the published script).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import following, last_steps, penalties, whitened

Three = tuple[jax.Array, jax.Array, jax.Array]


def hiper(
    batch: Batch,
    *,
    switches: jax.Array,
    high_values: jax.Array,
    low_values: jax.Array,
    term_values: jax.Array,
    final_values: jax.Array,
    gamma: float = 0.95,
    lam: float = 0.95,
    whiten: bool = True,
    invalid_penalty: float = 0.1,
) -> Estimate:
    """Hierarchical advantage estimation; groups and states are ignored.

    switches: bool[B, T], steps whose answer takes up a new subgoal. With those, and with a trajectory's first step, a
        segment begins; it ends where the next one begins, or with the trajectory.
    high_values, low_values, term_values: f32[B, T], three values of each step: V_high, before a subgoal is chosen, which is
        read where a segment begins; V_low, once the step's subgoal is known; V_term, before the answer says whether it stays
        with the subgoal of the step before.
    final_values: f32[B], V_high after the last step of a trajectory that a time limit cut off, 0 where the task ended.

    Take a segment of d steps, with discounted rewards R = sum_j gamma^j r_j, followed by one that begins in n (where the
    trajectory ends A_high(n) is 0, and V_high(n) its final value):
        subgoal  A_high = delta + gamma^d lam A_high(n), delta = R + gamma^d V_high(n) - V_high, at its first step alone;
        action   A_low(t) = delta_t + gamma lam A_low(t+1), delta_t = r_t + gamma V_low(t+1) - V_low(t), within the segment; at
                 its last step V_high(n) stands for V_low(t+1), and 0 for A_low(t+1);
        switch   A_term(t) = G_t - V_term(t), G_t the discounted rewards from t to its end with V_high(n) behind them.
    `part_advantages` are whitened, each level over the steps that have it, unless `whiten` is False. `part_returns`, the
    targets of V_term, V_high and V_low, are the advantages before that plus the value. `advantages` and `returns` are
    those of the action. The penalty is subtracted from all three advantages of an invalid step. stats: `switch_rate`, the
    share of steps that begin a segment.
    """
    mask = batch.mask
    begins = segment_begins(switches, mask)
    low_values = jnp.where(mask, low_values, 0.0)
    high_after = jnp.where(last_steps(mask), final_values[:, None], following(high_values, mask))
    high_return, reached, low_advantage = _from_behind(batch, begins, high_after, low_values, gamma, lam)

    penalty = penalties(batch, invalid_penalty)
    levels = [
        (reached - term_values, term_values, mask),
        (high_return - high_values, high_values, begins),
        (low_advantage, low_values, mask),
    ]
    advantages = [jnp.where(has, advantage - penalty, 0.0) for advantage, _, has in levels]
    returns = [jnp.where(has, a + value, 0.0) for a, (_, value, has) in zip(advantages, levels, strict=True)]
    if whiten:
        advantages = [whitened(a, has) for a, (_, _, has) in zip(advantages, levels, strict=True)]
    return Estimate(
        advantages=advantages[-1],
        returns=returns[-1],
        part_advantages=jnp.stack(advantages, axis=-1),
        part_returns=jnp.stack(returns, axis=-1),
        stats={"switch_rate": begins.sum() / jnp.maximum(mask.sum(), 1)},
    )


def _from_behind(
    batch: Batch, begins: jax.Array, high_after: jax.Array, low_values: jax.Array, gamma: float, lam: float
) -> Three:
    """Returns V_high's lambda-return, the discounted rewards to the segment's end, and A_low of every step, each f32[B, T].

    begins: bool[B, T], steps that begin a segment; high_after: f32[B, T], V_high of what follows each step.
    """
    last = last_steps(batch.mask)
    begins_after = last | (following(begins, batch.mask) > 0)

    def step(later: Three, now: tuple[jax.Array, ...]) -> tuple[Three, Three]:
        reward, last, begins_after, high_after, low_after, low = now
        high_return, reached, low_advantage = later
        high_return = jnp.where(last, high_after, high_return)
        high_return = jnp.where(begins_after, high_after + lam * (high_return - high_after), high_return)
        reached = jnp.where(begins_after, high_after, reached)
        delta = reward + gamma * jnp.where(begins_after, high_after, low_after) - low
        low_advantage = delta + gamma * lam * jnp.where(begins_after, 0.0, low_advantage)
        values = reward + gamma * high_return, reward + gamma * reached, low_advantage
        return values, values

    nothing = jnp.zeros_like(batch.rewards[:, 0])
    columns = (batch.rewards, last, begins_after, high_after, following(low_values, batch.mask), low_values)
    _, (high_return, reached, low_advantage) = jax.lax.scan(step, (nothing,) * 3, tuple(a.T for a in columns), reverse=True)
    return high_return.T, reached.T, low_advantage.T


def segment_begins(switches: jax.Array, mask: jax.Array) -> jax.Array:
    """Marks the steps that begin a segment, those that switch and every trajectory's first, bool[B, T]."""
    return mask & switches.at[:, 0].set(True)
