"""ALFWorld told and answered in chat on the device: prompts, actions and Episodes are those of the host."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alfworld_places import GAMES

from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld
from hgpo_jax.envs.alfworld.tables import compile_games
from hgpo_jax.envs.alfworld.text import AlfworldText
from hgpo_jax.policy import ModelConfig, initialize, network, shardings
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.device_tokenizer import spell
from hgpo_jax.policy.kv_cache import KVCache
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.tokenizer import embedding_rows, text_tokenizer
from hgpo_jax.rollout import compiled_slots, compiled_text_rollout
from hgpo_jax.rollout.chat_prompts import ChatFormat, PromptInput
from hgpo_jax.rollout.compiled_chat_prompts import MAX_ACTION, DeviceText
from hgpo_jax.rollout.compiled_text_rollout import CompiledTextRollout
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.sampling import generate
from hgpo_jax.sampling import slots as slot_state
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.sampling.slots import MAX_STEPS, Sampled
from hgpo_jax.utils.heartbeat import PROGRAMS

R, K = 192, 2
ODD = [  # what is no command, but can be reproduced
    "<think>x</think><action>go  to desk 1</action>", "no idea", "<ACTION> Look </ACTION>", "<action></action>", "",
    "<think>a</think><action>take the apple from 'here'\n now!</action> tail", "</action><action>x", "x" * 50, "go to DESK 1",
    "<think>\u4e2d</think><action>look</action>", "<think>\u00e9</think><action>inventory</action>", "<action>help</action>",
    "<think>q</think><action>go to the \"fridge\" 12 and it's 3.5 o'clock\t</action>", "<think><think></think></think> look  ",
    "<think>a</think><action> \x0b\x1c look \x1f</action>", "<action>look</action><think></think><action>open</action>",
]  # fmt: skip
RARE = [  # what cannot
    "<action>caf\u00e9</action>", "<action>" + "a b" * 60 + "</action>", "\u4e2d", "<action>a\x00b</action>",
    "<think>x</think><action><|im_end|>look</action>",
]  # fmt: skip


def words_tokenizer():
    """A byte-level tokenizer of some of the games' words, with a plain chat template."""
    host = AlfworldText(GAMES)
    begun = [host.reset(game) for game in range(len(GAMES))]
    texts = [text for observation, commands in begun for text in (observation, *commands)]
    return text_tokenizer([*texts, "<think> </think> <action> </action> Nothing happens."])


def framing_tokenizer():
    """The same, with a template whose text touches the message."""
    tokenizer = words_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ eos_token + 'user:\n' + m.content + '\n\n' + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
    )
    return tokenizer


def encoded(tokenizer, text: str, ended: bool) -> list[int]:
    """A response, in which the name of a special token is not that token."""
    before, mark, after = text.partition("<|im")
    ids = [i for part in (before + mark, after) for i in tokenizer(part).input_ids]
    return ([*ids[: R - 1], tokenizer.eos_token_id] if ended else ids[:R]) or [tokenizer.eos_token_id]


def speaker(tokenizer, seed: int, rare: float) -> dict:
    """Stand-ins for the functions of `slot_state.py` that say a command of the prompt's list, or something odd; rarely what
    cannot be reproduced. A slot's cache holds the whole response and its length."""
    rng = random.Random(seed)

    def say(prompts, lengths):
        tokens, counts = np.zeros((len(prompts), R), np.int32), np.zeros(len(prompts), np.int32)
        for row, (prompt, length) in enumerate(zip(np.asarray(prompts).tolist(), np.asarray(lengths).tolist(), strict=True)):
            listed = tokenizer.decode(prompt[:length]).rpartition("\n[")[2].rpartition("]\n")[0]
            command = rng.choice(listed.split(",\n")).strip("'")
            answer = f"<think>hm</think><action> {command} </action>"
            draw = rng.random()
            answer = answer if draw < 0.75 else rng.choice(RARE if draw > 1 - rare else ODD)
            ids = encoded(tokenizer, answer, rng.random() < 0.9)
            tokens[row, : len(ids)], counts[row] = ids, len(ids)
        return tokens, counts

    def free_slots(model, slots, length):
        state = slot_state.free_slots(model, slots, length)
        return state.replace(cache=[KVCache(keys=jnp.zeros((slots, R), jnp.int32), values=jnp.zeros(slots, jnp.int32))])

    def prefill_slots(model, state, prompts, keys, widths, end_tokens, decoding, pictures):
        number, width = prompts.tokens.shape
        assert end_tokens == (tokenizer.eos_token_id,) and widths[-1] == width
        shapes = jax.ShapeDtypeStruct((number, R), np.int32), jax.ShapeDtypeStruct((number,), np.int32)
        tokens, counts = jax.pure_callback(say, shapes, prompts.tokens, prompts.lengths)
        put = lambda a, new: a.at[prompts.slots].set(new, mode="drop")  # noqa: E731
        cache = [jax.tree.map(put, state.cache[0], KVCache(keys=tokens, values=counts))]
        state = state.replace(sampled=put(state.sampled, 1), ended=put(state.ended, counts <= 1), cache=cache)
        return state, tokens[:, 0], jnp.zeros(number)

    def decode_slots(model, blocks, state, limits, pace, end_tokens, decoding):
        said, length = state.cache[0].keys, state.cache[0].values
        counts = jnp.where(state.ended, 0, jnp.minimum(length - state.sampled, 9 + jnp.arange(len(length)) % 3))
        tokens = jnp.take_along_axis(jnp.pad(said, ((0, 0), (0, MAX_STEPS))), state.sampled[:, None] + jnp.arange(MAX_STEPS), 1)
        state = state.replace(sampled=state.sampled + counts, ended=state.ended | (state.sampled + counts >= length))
        return state, Sampled(tokens=tokens, logp=jnp.zeros(tokens.shape), counts=counts, ended=state.ended)

    return {"free_slots": free_slots, "prefill_slots": prefill_slots, "decode_slots": decode_slots}


def tiny(tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=embedding_rows(len(tokenizer)), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, max_position_embeddings=2048,
    )  # fmt: skip


def played(paths, tokenizer, monkeypatch, episodes: int, turns: int, limit: int, rare: float = 0.004):
    """(the format, tasks, result) of episodes that `speaker` plays."""
    # Callbacks do not go with axes that the compiler splits, of which one device has none.
    without = lambda method, program, env, mesh: lambda tables, *rest: method(program(env=env.bound(tables), fsdp=1), *rest)  # noqa: E731
    monkeypatch.setattr(compiled_text_rollout, "on_shards", without)
    for name, stand_in in speaker(tokenizer, 0, rare).items():
        monkeypatch.setattr(compiled_slots, name, stand_in)
    chat, model = ChatFormat(ChatFrame(tokenizer), "alfworld", limit, lower_case=True), tiny(tokenizer)
    mesh = make_mesh("data=1", jax.devices()[:1])
    rollout = CompiledTextRollout(
        CompiledAlfworld(compile_games(paths), turns), np.arange(len(paths)), chat, tokenizer, {SHARED: network(model)}, mesh,
        TextSettings(batch=episodes, history_length=K, response_limit=R, decode_batch_size=8),
    )  # fmt: skip
    tasks, keys = np.arange(episodes) % len(paths), jax.random.split(jax.random.key(0), episodes)
    return chat, tasks, rollout({SHARED: initialize(model, 0, mesh)}, tasks, keys, tasks, Decoding())


def replay(paths, chat: ChatFormat, tasks, result, turns: int) -> int:
    """Asserts that the host, given the same responses, asks, finds, tells and pays the same; the number of turns."""
    (e, report), host, count = result, AlfworldText(paths, max_turns=turns), 0
    dropped = cut = 0
    for b, task in enumerate(tasks):
        if b in report.failures:
            assert not e.mask[b].any()
            continue
        observation, commands = host.reset(int(task))
        past, done, info = [], False, {}
        for t in range(int(e.mask[b].sum())):
            assert not done
            known = PromptInput(host.goal, past[max(0, len(past) - K) :], t, observation, commands)
            prompt = chat.build([known])[0]
            assert e.prompts[b, t, : e.prompt_lengths[b, t]].tolist() == prompt.ids, (b, t, known)
            dropped, cut = dropped + prompt.pairs_dropped, cut + (prompt.tokens_cut > 0)
            parsed = chat.parse(e.responses[b, t, : e.response_lengths[b, t]].tolist())
            assert (report.actions[b][t], report.responses[b][t]) == (parsed.action, parsed.text)
            assert report.texts[e.states[b, t]] == observation and e.invalid[b, t] != parsed.well_formed
            past.append((observation, parsed.action))
            observation, commands, reward, done, info = host.step(parsed.action)
            assert (e.rewards[b, t], report.admissible[b][t]) == (reward, info["admissible"]), (b, t, parsed)
            assert report.texts[e.next_states[b, t]] == observation
            count += 1
        assert done and info["won"] == e.success[b] and report.goals[b] == host.goal and e.task[b] == host.task_type
    assert (report.counts["pairs_dropped"], report.counts["prompts_cut"]) == (dropped, cut)
    return count


@pytest.mark.slow
def test_the_host_replays_the_episodes(monkeypatch):
    """With prompts that lose history, and some that would lose more, and responses that cannot be reproduced."""
    chat, tasks, result = played(GAMES, framing_tokenizer(), monkeypatch, 48, 12, 700, rare=0.01)
    assert replay(GAMES, chat, tasks, result, 12) > 300
    counts = result.report.counts
    assert 0 < counts["excluded"] < 16 and counts["malformed"] > 40 and counts["inadmissible"] > 40
    assert counts["pairs_dropped"] > 0 and counts["prompts_cut"] == 0  # an episode with one of these is played on the host


def test_numbers_are_told_although_an_environment_has_a_word_that_is_one():
    env = CompiledAlfworld(compile_games(GAMES), 5)
    env.words = [*env.words, "0", "3"]
    tokenizer = framing_tokenizer()
    text = DeviceText(env, ChatFormat(ChatFrame(tokenizer), "alfworld", 1024, lower_case=True), tokenizer, R)

    @jax.jit
    def told():
        state, seen = text.start(jnp.int32(0))
        past, done = jnp.stack([seen] * K), jnp.zeros((K, MAX_ACTION), jnp.int32)
        words = text._message(text.goal(state), past, done, seen, text._command_words(state), jnp.int32(3), jnp.int32(K))
        return spell(text.tables["words"], words, 8192)

    letters, size = told()
    said = bytes(letters[:size].tolist())
    assert b"Turns so far: 3. The latest 2 of" in said
    assert said.startswith(b"user:\n") and said.endswith(b"\n\n")  # what of the template touches the message


def test_prompts_have_widths_up_to_their_limit():
    for limit in (16, 31, 32, 100, 1024, 1030, 1500):
        for count in (1, 2, 7, 13):
            widths = compiled_text_rollout.widths(limit, count)
            assert list(widths) == sorted(set(widths)) and widths[0] > 0 and widths[-1] == limit
            assert len(widths) <= count
    assert compiled_text_rollout.widths(4096, 2) == (496, 4096)


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_answers(opened):
    tokenizer = words_tokenizer()
    tokenizer.chat_template += opened
    chat = ChatFormat(ChatFrame(tokenizer), "alfworld", 1024, lower_case=True)
    text = DeviceText(CompiledAlfworld(compile_games(GAMES), 5), chat, tokenizer, R)
    answer = jax.jit(jax.vmap(lambda tables, ids, n: text.bound(tables).answer(ids, n), (None, 0, 0)))
    tags = ["<action>", "</action>", "<think>", "</think>", " look ", "Caf", "\n", "go to desk 1"]
    rng, parts = random.Random(0), [*ODD, *RARE, *tags]
    said = [*ODD, *RARE, *("".join(rng.choices(parts, k=rng.randrange(1, 4))) for _ in range(400))]
    ids = [encoded(tokenizer, one, rng.random() < 0.8) for one in said]
    padded = np.array([row + [5] * (R - len(row)) for row in ids], np.int32)
    found = jax.device_get(answer(text.tables, padded, np.array(list(map(len, ids)), np.int32)))
    exact = 0
    for row, action, well_formed, whole in zip(ids, *found, strict=True):
        expected = chat.parse(row)
        assert well_formed == expected.well_formed, expected
        plain = all(letter in "\t\n\r" or " " <= letter <= "~" for letter in expected.action)
        if whole:
            assert bytes(action[action != 0].tolist()).decode() == expected.action
            assert plain and len(expected.action) <= MAX_ACTION and "<|im_end|>" not in expected.action
        exact += whole
    assert [bool(one) for one in found.exact[: len(ODD)]] == [True] * len(ODD)
    assert not found.exact[len(ODD) : len(ODD) + len(RARE)].any() and exact > 150


@pytest.mark.slow
def test_host_and_device_sample_the_same_episodes(monkeypatch):
    """With a policy that says a few tokens only, among them the end: some of what it says is admissible. What is not ASCII is
    rare; such episodes are played on the host."""
    tokenizer, real, B, turns = words_tokenizer(), generate.sample_token, 12, 6
    chat, model = ChatFormat(ChatFrame(tokenizer), "plain", 1024, lower_case=True), tiny(tokenizer)
    said = sorted({tokenizer.eos_token_id, *(i for word in ("look", "help") for i in tokenizer(word).input_ids)})
    bias = jnp.full(model.vocab_size, -jnp.inf).at[jnp.array(said)].set(0.0).at[jnp.array(tokenizer("é").input_ids)].set(-2.5)
    monkeypatch.setattr(generate, "sample_token", lambda logits, keys, decoding: real(logits + bias, keys, decoding))
    mesh, groups = make_mesh("data=2,fsdp=2", jax.devices()[:4]), np.arange(B) // 4
    params = jax.device_put(initialize(model, 0, make_mesh("data=1", jax.devices()[:1])), shardings(model, mesh))
    settings = TextSettings(batch=B, history_length=K, response_limit=6, decode_batch_size=4, prompt_widths=2)
    host = HostRollout(lambda: AlfworldText(GAMES, max_turns=turns), chat, {SHARED: network(model)}, mesh, settings)
    env, games = CompiledAlfworld(compile_games(GAMES), turns), np.arange(len(GAMES))
    device = CompiledTextRollout(env, games, chat, tokenizer, {SHARED: network(model)}, mesh, settings, host)
    assert PROGRAMS[device.program.__name__] == "the rollout"
    given = {SHARED: params}, groups, jax.random.split(jax.random.key(1), B), groups, Decoding()
    (ours, report), (theirs, other) = device(*given), host(*given)
    for name, value in theirs.arrays().items():
        if name == "logp":
            np.testing.assert_allclose(ours.logp, value, atol=1e-5)
        else:
            np.testing.assert_array_equal(getattr(ours, name), value, err_msg=name)
    for name in ("texts", "goals", "responses", "actions", "admissible", "failures"):
        assert getattr(report, name) == getattr(other, name), name
    assert 0 < report.counts["played_on_host"] < B / 2
    assert 0 < report.counts["inadmissible"] < ours.mask.sum()
