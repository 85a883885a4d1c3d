"""The same work in PyTorch with transformers' models, for `--against transformers`. Nothing else imports torch.

The peer gets its best plain setting: SDPA attention, weights in the type at work, every core (or the GPU), the head at the
response's positions only (`logits_to_keep`), fused cross-entropy and fused AdamW; eager, because `torch.compile` of
`generate` and of checkpointed layers needs a C++ compiler and minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import jax
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hgpo_jax.config import LearnerConfig
from hgpo_jax.learner import Rows
from hgpo_jax.policy import ModelConfig, huggingface, weights


def device() -> torch.device:
    return torch.device("cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu")


def make_model(c: ModelConfig, params: dict, dtype: str):
    """transformers' model with the same weights."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    fields = huggingface.config_json(c, None, None, dtype)
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=getattr(torch, dtype))
    tensors, gather = weights.layout(params, c.num_hidden_layers), weights.to_host(params)
    with torch.no_grad():
        state = dict(model.named_parameters())
        for tensor in tensors:
            state.pop(tensor.name).copy_(torch.from_numpy(np.array(gather(tensor), np.float32)))
    assert not state, f"no weights for {list(state)}"
    return model.to(device()).eval()


def finish() -> None:
    """Waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sampler(model, prompts: np.ndarray, max_new: int, temperature: float) -> Callable[[], np.ndarray]:
    """`generate` as a call: prompts i32[B, P] -> i64[B, max_new], sampled from the full distribution, or greedily at 0."""
    tokens = torch.from_numpy(prompts.astype(np.int64)).to(device())
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}

    def sample():
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new, use_cache=True, pad_token_id=0, **how
            )
        return out[:, tokens.shape[1] :].cpu().numpy()

    return sample


def updater(model, rows: Rows, config: LearnerConfig, dtype: str) -> Callable[[], dict[str, float]]:
    """One PPO-clip step of AdamW on all rows as a call: {"loss", "grad_norm"} before it. The prompts are of one length."""
    model.train()  # gradient checkpointing asks for it; there is no dropout
    if config.remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = {
        name: torch.from_numpy(np.array(getattr(rows, name))).to(device())
        for name in ("prompts", "responses", "old_logp", "advantages")
    }
    tokens = torch.cat([parts["prompts"], parts["responses"]], 1).long()
    width = parts["responses"].shape[1]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay, fused=True
    )

    def update():
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for at in torch.arange(len(tokens)).split(config.microbatch_size):
            with torch.autocast(device().type, getattr(torch, dtype), enabled=dtype != "float32"):
                logits = model(tokens[at, :-1], logits_to_keep=width, use_cache=False).logits
            target = tokens[at, -width:]
            nll = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
            loss = clipped(-nll.view_as(target), parts["old_logp"][at], parts["advantages"][at, None], config)
            loss = loss.sum() / (len(tokens) * width)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        finish()
        return {"loss": total, "grad_norm": float(norm)}

    return update


def clipped(logp, old_logp, advantages, config: LearnerConfig):
    """PPO's clipped surrogate of each token with the dual clip, negated."""
    ratio = torch.exp(logp - old_logp)
    low, high = 1 - (config.clip_low or 0.2), 1 + (config.clip_high or 0.2)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    return torch.where(advantages < 0, torch.minimum(loss, -config.dual_clip * advantages), loss)
