"""Makes a small policy that calls the tool of `number_tools` without skill, for reinforcement learning to improve on two cores.

    python notebooks/number_tools_start.py FOLDER

It imitates a player that asks for a number in words four times of ten, which the game does not answer. Half of its guesses keep
to what was said ("too small", "too large"), the others are any number. `envs/agents/README.md` trains it on.
"""

import json
import random
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hgpo_jax.envs.agents.number_tools import TASK, TOOL, guess
from hgpo_jax.policy import ModelConfig, Policy, initialize, network
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.tokenizer import embedding_rows

LARGEST, TURNS, STEPS, BATCH = 10, 4, 600, 64
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversation(chance: random.Random) -> list[dict]:
    """Plays one game: the messages as the agent's client sees them."""
    secret, low, high = chance.randint(1, LARGEST), 1, LARGEST
    messages = [{"role": "user", "content": TASK.format(largest=LARGEST)}]
    for _ in range(TURNS):
        number = chance.randint(low, high) if chance.random() < 0.5 else chance.randint(1, LARGEST)
        if chance.random() < 0.4:
            messages += [{"role": "assistant", "content": f"Is it {number}?"}, {"role": "user", "content": "Use the tool."}]
            continue
        call = {"name": "guess", "arguments": {"number": number}}
        answer, _ = guess(secret, "guess", json.dumps(call["arguments"]))
        messages += [{"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}]
        messages += [{"role": "tool", "content": answer}]
        if answer == "found":
            break
        low, high = (max(low, number + 1), high) if answer == "too small" else (low, min(high, number - 1))
    return messages


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Makes byte-level BPE in which what lies between digits and special tokens is one token."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece for text in texts for piece in re.split(rf"{re.escape(START)}(?:assistant\n)?|{re.escape(END)}", text)}
    trainer = trainers.BpeTrainer(vocab_size=2000, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*sorted(pieces), "assistant\n"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (START, END, PAD)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE)


def rows(tokenizer, conversations: list[list[dict]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns their tokens and which of them the policy wrote: (i32[N, S], bool[N, S])."""
    opening, end = tokenizer(f"{START}assistant\n").input_ids, tokenizer.convert_tokens_to_ids(END)
    found = []
    for messages in conversations:
        ids = np.array(tokenizer(tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)).input_ids)
        wrote, inside = np.zeros(len(ids), bool), False
        for i in range(len(ids)):
            wrote[i] = inside
            inside = (inside and ids[i] != end) or (ids[max(0, i + 1 - len(opening)) : i + 1].tolist() == opening)
        found.append((ids, wrote))
    length = max(len(ids) for ids, _ in found)
    pad = [[np.pad(a, (0, length - len(a))) for a in pair] for pair in found]
    return np.stack([ids for ids, _ in pad]).astype(np.int32), np.stack([wrote for _, wrote in pad])


def main(folder: str) -> None:
    chance = random.Random(0)
    played = [conversation(chance) for _ in range(4096)]
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE)
    texts = [plain.apply_chat_template(messages, tools=[TOOL], tokenize=False) for messages in played]
    tokenizer = make_tokenizer(texts)
    config = ModelConfig(
        model_type="qwen3", vocab_size=embedding_rows(len(tokenizer)), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    params, graphdef = initialize(config, 0, make_mesh("data=1", jax.devices()[:1])), network(config)
    ids, wrote = rows(tokenizer, played)
    print(f"{len(tokenizer)} tokens, conversations of at most {ids.shape[1]}, {wrote.sum(1).mean():.0f} of them the policy's")
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 2e-3, 50, STEPS))

    @jax.jit
    def step(params, state, ids, wrote):
        def loss(params):
            model = nnx.merge(graphdef, params)
            logits = model.logits(model.hidden(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
            return jnp.where(wrote[:, 1:], losses, 0).sum() / wrote.sum()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, numbers = optimizer.init(params), np.random.default_rng(0)
    for number in range(STEPS):
        chosen = numbers.choice(len(ids), BATCH, replace=False)
        params, state, value = step(params, state, ids[chosen], wrote[chosen])
        if number % 100 == 99:
            print(f"step {number + 1}: loss {value:.3f} a token", flush=True)
    Policy(config, params, tokenizer).save(folder)


if __name__ == "__main__":
    main(sys.argv[1])
