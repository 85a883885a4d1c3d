"""The same work in PyTorch with transformers' models, for `--against transformers`. Nothing else imports torch.

The peer runs with its best standard settings: SDPA attention, weights in the dtype at work, every core (or the GPU), the head
only at the response's positions (`logits_to_keep`), fused cross-entropy and fused AdamW. It runs eagerly, because
`torch.compile` of `generate` and of checkpointed layers needs a C++ compiler and minutes.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hgpo_jax.config import LearnerConfig
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.optimizer import BETA1, BETA2
from hgpo_jax.policy import ModelConfig, Policy, lora
from hgpo_jax.utils.errors import ConfigError


def device() -> torch.device:
    """Returns the GPU or CPU that jax uses. Raises ConfigError if torch does not know it."""
    kind = jax.default_backend()
    if kind != "cpu" and not (kind == "gpu" and torch.cuda.is_available()):
        raise ConfigError(f"--against transformers: jax has a {kind.upper()} that torch does not find; install one that does")
    return torch.device("cpu" if kind == "cpu" else "cuda")


def make_model(c: ModelConfig, params: dict, dtype: str):
    """Makes transformers' model with the same weights."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    torch.set_float32_matmul_precision("high")  # TensorFloat-32 on a GPU, as jax multiplies float32 there
    with tempfile.TemporaryDirectory() as folder:
        Policy(dataclasses.replace(c, lora=None), params, None).save(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=getattr(torch, dtype))
    return model.to(device()).eval()


def make_learner(c: ModelConfig, params: dict, frozen: dict | None):
    """Makes the model to train, in float32; with frozen weights, peft's adapters with the values of `params` are trained."""
    if frozen is None:
        return make_model(c, params, "float32")
    from peft import PeftModel  # takes seconds to import, and only adapters need it

    with tempfile.TemporaryDirectory() as folder:
        lora.save(Path(folder, "adapters"), c, params)
        return PeftModel.from_pretrained(make_model(c, frozen, "float32"), Path(folder, "adapters"), is_trainable=True)


def sampler(model, prompts: np.ndarray, new: int, *, greedy: bool = False) -> Callable[[], np.ndarray]:
    """Builds `generate` as a call: prompts i32[B, P] -> i64[B, new], sampled from the full distribution, or greedy."""
    tokens = torch.from_numpy(prompts.astype(np.int64)).to(device())
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def sample() -> np.ndarray:
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, pad_token_id=0, **how)
        return out[:, tokens.shape[1] :].cpu().numpy()

    return sample


def chat(model, messages: list[list[int]], response: int, first: int) -> list[float]:
    """Plays a chat whose cache is kept from turn to turn; returns the seconds to the `first` tokens of each answer."""
    seconds, cache, unread = [], None, list[int]()
    for message in messages:
        began, tokens = time.perf_counter(), torch.tensor([unread + message], device=device())
        for number in range(response):
            with torch.inference_mode():
                out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens = out.past_key_values, torch.multinomial(torch.softmax(out.logits[:, -1].float(), -1), 1)
            unread = tokens[0].tolist()
            if number == min(first, response) - 1:
                seconds.append(time.perf_counter() - began)
    return seconds


def updater(model, batch: TrainingBatch, config: LearnerConfig, dtype: str) -> Callable[[], dict[str, float]]:
    """Builds a call of one PPO-clip step of AdamW on all rows: {"loss", "grad_norm"} before it. Prompts have one length."""
    model.train()  # gradient checkpointing requires it; there is no dropout
    if config.remat != "none":  # the only kind that it has
        model.gradient_checkpointing_enable({"use_reentrant": False})
    on_device = lambda a: torch.from_numpy(np.array(a)).to(device())  # noqa: E731
    tokens = torch.cat([on_device(batch.prompts), on_device(batch.responses)], 1).long()
    old_logp, advantages, width = on_device(batch.old_logp), on_device(batch.advantages)[:, None], batch.responses.shape[1]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(BETA1, BETA2),
        weight_decay=config.weight_decay,
        fused=True,
    )

    def update() -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for at in torch.arange(len(tokens)).split(config.microbatch_size):
            with torch.autocast(device().type, getattr(torch, dtype), enabled=dtype != "float32"):
                logits = model(tokens[at, :-1], logits_to_keep=width, use_cache=False).logits
            target = tokens[at, -width:]
            nll = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
            ratio = torch.exp(-nll.view_as(target) - old_logp[at])
            loss = clipped(ratio, advantages[at], config).sum() / (len(tokens) * width)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        if device().type == "cuda":
            torch.cuda.synchronize()
        return {"loss": total, "grad_norm": float(norm)}

    return update


DUAL_CLIP = 3.0  # as in `losses.policy_loss`


def clipped(ratio, advantages, config: LearnerConfig):
    """Computes PPO's clipped surrogate of each token with the dual clip, negated."""
    low, high = 1 - (config.clip_low or 0.2), 1 + (config.clip_high or 0.2)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    return torch.where(advantages < 0, torch.minimum(loss, -DUAL_CLIP * advantages), loss)
