"""The fields of advantages, optimizers and the update."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from hgpo_jax.config.open_fields import are_options, is_choice
from hgpo_jax.config.section import NonNegative, Positive, Section, Share, field

SignalWeight = Annotated[float, pydantic.Field(ge=-1e6, le=1e6)]


class AdvantageConfig(Section):
    """Options of the advantage estimators; each method uses the ones that it has (hgpo_jax/advantages)."""

    gamma: Share = field(0.95, "discount per turn")
    normalize: Literal["mean", "mean_std"] | None = field(
        None,
        "centre a group's returns, or also divide by their std; default: the method's own, mean_std for adora, "
        "crbc, dr_mas, ecpo, g2po, gagpo, graphgpo, milegpo and pgpo, as in their papers, else mean",
    )
    by_role: bool = field(
        False, "teams: compare the turns of each role with that role's own only, as dr_mas does, in any method that compares"
    )
    statistics: Literal["per_step", "per_trajectory"] = field(
        "per_step",
        "what counts once where episodes are compared: per_step: a step; per_trajectory: an episode, by role with dr_mas or "
        "by_role, which with grpo and mean_std is the baseline of Dr. MAS",
    )
    keep: Literal["all", "informative", "valid"] = field(
        "all",
        "episodes to compare and learn from: all; informative: of tasks whose episodes score differently, as in DAPO, without "
        "its further samples; valid: without an invalid action, as in THOR, where half of a task's are and score differently",
    )
    alpha: float = field(1.0, "exponent of a level's weight (k + 2)^alpha in hgpo", ge=0, le=10)
    history_length: int | None = field(
        None, "K of the groups in hgpo, eb_gae and eb_td; default: rollout.history_length, the K of the prompt", ge=0, le=64
    )
    lam: Share | None = field(
        None, "lambda of ppo, hiper, gagpo, eb_gae and eb_td; default: 0.95 (ppo, hiper, gagpo), 0.65 (eb_gae), 0.35 (eb_td)"
    )
    similarity: float | None = field(
        None,
        "text: observations of a prompt group count as one state from this difflib ratio to the first of them on, as in "
        "0.95; takes time where they are long; default: only equal ones (or env.state_key)",
        gt=0,
        lt=1,
    )
    signal_weights: tuple[SignalWeight, ...] = field(
        (), "gdpo and dvao: the weight of each signal beside the reward, whose weight is 1, as in 1,-0.5; default: 1 each"
    )
    invalid_penalty: float = field(
        0.5, "subtracted from the return of a step whose action is invalid, in the units of the rewards", ge=0, le=1e6
    )


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = field(2e-3, "learning rate", gt=0)
    warmup_steps: int = field(5, "optimizer steps over which the learning rate rises from 0", ge=0)
    grad_clip: float = field(1.0, "largest global gradient norm", gt=0)


class LearnerConfig(OptimizerConfig):
    """The update: one epoch of the loss with AdamW."""

    # Adam's first steps are as long as the rate, however noisy the gradient is. With a warm-up of 5 steps, in two settings, 6
    # of 59 runs were more than ten points below the start after a few iterations, one of them for good; with 30, none of 176
    # (configs/tables/results/README.md).
    warmup_steps: int = field(30, "optimizer steps over which the learning rate rises from 0", ge=0)
    weight_decay: NonNegative = field(0.01, "AdamW's weight decay")
    final_lr: Share = field(0.1, "share of the learning rate left at the last iteration, the critic's too; it falls linearly")
    minibatch_size: Positive = field(1024, "environment steps per optimizer step, over all devices")
    microbatch_size: Positive = field(
        32,
        "sequences (one step each, or several packed) on each device at a time; changes speed and memory, not results, but "
        "those of the loss hapo",
    )
    remat: Literal["none", "dots", "full"] = field(
        "none",
        "what of each layer the backward pass computes again to save memory: nothing; all but the products with weights; all",
    )
    offload: bool = field(
        False, "keep optimizer, critic and reference policy in host memory while episodes are sampled; costs their transfer"
    )
    loss: str = field("", "loss of the policy, for any method; your own by its place; default: the method's own")
    loss_options: dict[str, Any] = field({}, "further options of the loss, each written as learner.loss_options.NAME=VALUE")
    clip_low: float | None = field(
        None, "clip of the ratio below; default: the method's own, or else the loss's, 0.2, for gspo and kpo 0.0003", gt=0, lt=1
    )
    clip_high: float | None = field(
        None, "clip above; default: the method's own (dapo: 0.28), or else the loss's, 0.2, for gspo and kpo 0.0004", gt=0
    )
    kl_weight: NonNegative = field(0.01, "weight of the KL to the reference policy (the policy as it starts)")
    entropy_weight: NonNegative = field(0.001, "weight of the entropy bonus")
    rollout_correction: Literal["none", "token", "sequence", "mask"] = field(
        "none",
        "for a sampler that differs from the trainer: truncated importance weights, at most 2, by token or response; or a "
        "mask of the tokens whose probabilities differ too much, as in HisPO",
    )
    mask_response: float = field(
        0.1, "mask: limit of |g - 1|, with g the geometric mean of a response's ratios of trainer to sampler", gt=0
    )
    mask_token: float = field(0.5, "mask: limit of |ratio of trainer to sampler - 1| of a token", gt=0)
    unfinished: Literal["train", "mask"] = field(
        "train",
        "answers cut at their limit; mask: their tokens are left out of the policy's loss, while their steps still "
        "count for the advantages of others",
    )
    aggregate: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = field(
        "token-mean", "how token losses become one number"
    )

    _are_options = pydantic.field_validator("loss_options")(are_options)

    @pydantic.field_validator("loss")
    @classmethod
    def _is_known(cls, value):
        return value and is_choice("learner.loss", value)


class CriticConfig(OptimizerConfig):
    """The critic of ppo and hiper, a second network of the policy's size. It learns with learner.minibatch_size and
    microbatch_size, and an optimizer of its own."""

    lr: float = field(5e-3, "learning rate", gt=0)
    grad_clip: float = field(10.0, "largest global gradient norm", gt=0)
    value_clip: float = field(10.0, "how far a value may move in one iteration before its loss is clipped", gt=0)
