"""The same work in PyTorch with transformers' models, for `--against transformers`. Nothing else imports torch.

The peer runs with its best standard settings: SDPA attention, weights in the dtype at work, every core (or the GPU), the head
only at the response's positions (`logits_to_keep`), fused cross-entropy and fused AdamW. It runs eagerly, because
`torch.compile` of `generate` and of checkpointed layers needs a C++ compiler and minutes. The loop of `play` and `learn` is
written by hand, as users of transformers do: it uses the embedded household's own compiled, batched reset and step, and our
estimators.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flax.traverse_util import flatten_dict
from transformers import AutoConfig, AutoModelForCausalLM

from hgpo_jax import advantages
from hgpo_jax.config import LearnerConfig
from hgpo_jax.learner.algorithms import estimator_options
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.optimizer import BETA1, BETA2
from hgpo_jax.policy import ModelConfig, huggingface_folder, lora, safetensors_files
from hgpo_jax.policy.tokenizer import ACT
from hgpo_jax.rollout.runners import CompiledRunner
from hgpo_jax.setup.job import Job
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
    if device().type == "cuda":
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as jax multiplies float32 there
    fields = huggingface_folder.config_json(c, dtype)
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=getattr(torch, dtype))
    flat = flatten_dict(jax.device_get(params))
    with torch.no_grad():
        state = dict(model.named_parameters())
        for tensor in safetensors_files.layout(params, c.num_hidden_layers):
            value = flat[tensor.path] if tensor.layer is None else flat[tensor.path][tensor.layer]
            state.pop(tensor.name).copy_(torch.from_numpy(np.array(value.T if tensor.transposed else value, np.float32)))
    assert not state, f"no weights for {list(state)}"
    return model.to(device()).eval()


def with_adapters(model, c: ModelConfig, adapters: dict):
    """Adds peft's adapters with the same values to transformers' model; only they are trained."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder:
        lora.save(Path(folder, "adapters"), c, adapters)
        return PeftModel.from_pretrained(model, Path(folder, "adapters"), is_trainable=True)


def finish() -> None:
    """Waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sampler(model, prompts: np.ndarray, max_new: int, temperature: float, end: int | None = None) -> Callable[[], np.ndarray]:
    """Builds `generate` as a call: prompts i32[B, P] -> i64[B, max_new], sampled from the full distribution, or greedy at 0.

    end: the token after which all answers may end; there are then as many tokens as in the longest answer.
    """
    tokens = torch.from_numpy(prompts.astype(np.int64)).to(device())
    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if end is not None:
        how["eos_token_id"] = end

    def sample():
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new, use_cache=True, pad_token_id=0, **how
            )
        return out[:, tokens.shape[1] :].cpu().numpy()

    return sample


def updater(model, batch: TrainingBatch, config: LearnerConfig, dtype: str) -> Callable[[], dict[str, float]]:
    """Builds a call of one PPO-clip step of AdamW on all rows: {"loss", "grad_norm"} before it. Prompts have one length."""
    model.train()  # gradient checkpointing requires it; there is no dropout
    if config.remat != "none":  # the only kind that it has
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = {
        name: torch.from_numpy(np.array(getattr(batch, name))).to(device())
        for name in ("prompts", "responses", "old_logp", "advantages")
    }
    tokens = torch.cat([parts["prompts"], parts["responses"]], 1).long()
    width = parts["responses"].shape[1]
    optimizer = make_optimizer(model, config)

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


def make_optimizer(model, config: LearnerConfig, lr: float | None = None):
    lr = config.lr if lr is None else lr
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(BETA1, BETA2), weight_decay=config.weight_decay, fused=True)


def clipped(logp, old_logp, advantages, config: LearnerConfig):
    """Computes PPO's clipped surrogate of each token with the dual clip, negated."""
    ratio = torch.exp(logp - old_logp)
    low, high = 1 - (config.clip_low or 0.2), 1 + (config.clip_high or 0.2)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    return torch.where(advantages < 0, torch.minimum(loss, -3.0 * advantages), loss)  # the dual clip


@functools.cache
def _batched(runner: CompiledRunner):
    """Compiles the environment's reset, goal and step for a whole batch, once."""
    return tuple(jax.jit(jax.vmap(f)) for f in (runner.env.reset, runner.env.goal, runner.env.step))


def play(model, job: Job, iteration: int) -> dict[str, np.ndarray]:
    """Plays the episodes of one iteration of the embedded household, turn by turn; keys and shapes as in `Episodes`."""
    assert isinstance(job.runner, CompiledRunner)  # `household`
    env, rollout, tokenizer = job.runner.env, job.config.rollout, job.policy.tokenizer
    end, act = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(ACT)
    tasks, _, groups, decoding = job.episode_inputs(iteration)
    reset, goal_of, step = _batched(job.runner)
    B, T, A, R = job.batch, env.max_turns, env.action_length, env.action_length + 1
    state, observation = reset(tasks)
    goal, observation, ask = np.asarray(goal_of(state)), np.asarray(observation), np.full((B, 1), act)
    past = np.zeros((B, rollout.history_length, env.observation_length + A), np.int64)
    done, record = np.zeros(B, bool), []
    names: dict[bytes, int] = {}
    for _ in range(T):
        live = np.flatnonzero(~done)
        prompts = np.concatenate([goal, past.reshape(B, -1), observation, ask], 1)
        responses, logp, lengths = np.zeros((B, R), np.int64), np.zeros((B, R), np.float32), np.zeros(B, np.int32)
        actions = np.zeros((B, A), np.int32)
        malformed = np.zeros(B, bool)
        if len(live):
            tokens = torch.from_numpy(prompts[live]).to(device())
            with torch.inference_mode():
                out = model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=R,
                    use_cache=True,
                    pad_token_id=0,
                    eos_token_id=end,
                    do_sample=True,
                    temperature=decoding.temperature,
                    top_k=0,
                    top_p=1.0,
                    output_scores=True,
                    return_dict_in_generate=True,
                )
                scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
            new, scores = out.sequences[:, tokens.shape[1] :].cpu().numpy(), scores.float().cpu().numpy()
            for row, answer, values in zip(live, new, scores, strict=True):
                found = np.flatnonzero(answer == end)
                malformed[row] = not len(found)
                length = lengths[row] = found[0] + 1 if len(found) else len(answer)
                responses[row, :length], logp[row, :length] = answer[:length], values[:length]
                words = answer[: length - 1][:A] if len(found) else []
                actions[row, : len(words)] = words
        states = [names.setdefault(words.tobytes(), len(names)) for words in observation]
        past = np.concatenate([past, np.concatenate([observation, actions], 1)[:, None]], 1)[:, 1:]
        state, after, reward, ended, invalid = step(state, actions)
        record.append(
            {
                "prompts": prompts,
                "responses": responses,
                "response_lengths": lengths,
                "logp": logp,
                "mask": ~done,
                "rewards": np.where(done, 0, reward),
                "invalid": (np.asarray(invalid) | malformed) & ~done,
                "states": np.array(states, np.int32),
            }
        )
        observation, done = np.asarray(after), done | np.asarray(ended)
    return {name: np.stack([turn[name] for turn in record], 1) for name in record[0]} | {"groups": np.asarray(groups)}


def learn(model, reference, optimizer, job: Job, episodes: dict, microbatch: int, seed: int) -> dict[str, float]:
    """Computes advantages, and one epoch of PPO-clip with KL to the reference and entropy bonus; returns token means."""
    config, e = job.config.learner, episodes
    batch = {name: e[name] for name in ("rewards", "mask", "states", "groups", "invalid")}
    estimate = advantages.estimate(job.method.estimator, **batch, **estimator_options(job.config, job.method.estimator))
    happened = e["mask"].ravel()
    part = lambda a: torch.from_numpy(np.array(a).reshape(-1, *a.shape[2:])[happened]).to(device())  # noqa: E731
    tokens = torch.cat([part(e["prompts"]), part(e["responses"])], 1).long()
    width, lengths = e["responses"].shape[-1], part(e["response_lengths"])
    old_logp, advantage = part(e["logp"]), part(np.asarray(estimate.advantages))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(tokens)))
    sums = {"loss": 0.0, "kl": 0.0, "entropy": 0.0}
    steps = -(-len(tokens) // config.minibatch_size)
    for rows in order.chunk(steps):
        optimizer.zero_grad(set_to_none=True)
        count = lengths[rows].sum()
        for at in rows.split(microbatch):
            mask = torch.arange(width, device=device()) < lengths[at, None]
            target = tokens[at, -width:]

            def logprobs(network, at=at, target=target):
                logits = network(tokens[at, :-1], logits_to_keep=width, use_cache=False).logits.float()
                every = torch.log_softmax(logits / job.config.rollout.temperature, -1)
                return every, every.gather(-1, target[..., None])[..., 0]

            every, logp = logprobs(model)
            with torch.no_grad():
                reference_logp = logprobs(reference)[1]
            surrogate = (clipped(logp, old_logp[at], advantage[at, None], config) * mask).sum()
            difference = reference_logp - logp
            kl = ((torch.expm1(difference) - difference).clamp(max=10) * mask).sum()
            entropy = -((every.exp() * every).sum(-1) * mask).sum()
            loss = (surrogate + config.kl_weight * kl - config.entropy_weight * entropy) / count
            loss.backward()
            for name, value in (("loss", surrogate), ("kl", kl), ("entropy", entropy)):
                sums[name] += float(value.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
    finish()
    return {name: value / float(lengths.sum()) for name, value in sums.items()} | {"grad_norm": float(norm)}
