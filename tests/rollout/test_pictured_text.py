"""Language models that see: chat prompts with a picture, played and learned from, against the chat template and plain play."""

import contextlib
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.sokoban import SokobanPixels
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import ModelConfig, initialize, network, shardings
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.policy.pictures import VISION_TOKENS, insert_tokens, picture_tokens
from hgpo_jax.policy.tokenizer import embedding_rows
from hgpo_jax.rollout.chat_prompts import ChatFormat, PromptInput
from hgpo_jax.rollout.compiled_chat_prompts import DeviceAnswer
from hgpo_jax.rollout.compiled_text_rollout import CompiledTextRollout, TextProgram
from hgpo_jax.rollout.env_tokenizer import seeing_tokenizer
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.host import TextSettings
from hgpo_jax.rollout.runners import _chat_format, _check_whole
from hgpo_jax.rollout.tasks import keys_of, task_keys, task_numbers
from hgpo_jax.sampling import generate
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.trainer.step import training_batch
from tests.helpers.chat_tokenizers import qwen_tokenizer
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of

ENV = SokobanPixels(size=6, max_turns=4, tile=4)
GROUPS, MEMBERS, LIMIT, R, TEMPERATURE = 3, 2, 400, 7, 0.8
B = GROUPS * MEMBERS
INDICES = np.arange(B) // MEMBERS
MOVES = ("up", "down", "left", "right")
# The form of Qwen2.5-VL's template: a message is a text, or a list of pictures and texts.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def tokenizer():
    made = seeing_tokenizer("sokoban_pixels")
    made.chat_template = TEMPLATE
    return made


@functools.cache
def model() -> ModelConfig:
    before, feature, after = tokenizer().convert_tokens_to_ids(list(VISION_TOKENS))
    vision = VisionConfig(
        depth=2, hidden_size=8, intermediate_size=12, num_heads=2, out_hidden_size=24, fullatt_block_indexes=(1,),
        mrope_section=(2, 2, 2), window_size=8, patch_size=2, image_token_id=feature, video_token_id=feature,
        vision_start_token_id=before, vision_end_token_id=after, min_pixels=16,
    )  # fmt: skip
    return ModelConfig(
        vocab_size=embedding_rows(len(tokenizer())), hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1, max_position_embeddings=512,
        model_type="qwen2_5_vl", vision=vision,
    )  # fmt: skip


@functools.cache
def parameters():
    """With scales that make what is seen matter."""
    params = jax.device_get(initialize(model(), 1, mesh_of()))
    params["visual"] = jax.tree.map(lambda a: a * 3, params["visual"])
    return params


def chat_format(tokens=None, vision=None) -> ChatFormat:
    tokens, vision = tokens or tokenizer(), vision or model().vision
    return ChatFormat(
        ChatFrame(tokens), "sokoban_pixels", LIMIT, 20, lower_case=True, picture=picture_tokens(36, vision)
    )  # fmt: skip


def play(history_length=0, spec="data=1", slots=3, limit=R):
    mesh = mesh_of(spec)
    settings = TextSettings(
        batch=B, history_length=history_length, response_limit=limit, decode_batch_size=slots, prompt_widths=1
    )
    graphdefs = {SHARED: network(model())}
    rollout = CompiledTextRollout(ENV, None, chat_format(), tokenizer(), graphdefs, mesh, settings)
    with jax.set_mesh(mesh):
        params = {SHARED: jax.device_put(parameters(), shardings(model(), mesh))}
        tasks, keys = task_numbers("train", 3, INDICES, None), jax.random.split(jax.random.key(5), B)
        return rollout(params, tasks, keys, INDICES, Decoding(temperature=TEMPERATURE))


@functools.cache
def played(spec="data=1", slots=3):
    return play(spec=spec, slots=slots)


def replay(result, history_length: int) -> int:
    """Asserts that prompts are the chat template's, pictures the rooms', and rewards plain play's; the number of moves."""
    e, report = result
    step, reset, render = jax.jit(ENV.step), jax.jit(ENV.reset), jax.jit(lambda state: ENV.render(state, 4))
    grid, template, moves = ((1, 12, 12),), chat_format().template, 0
    for b, key in enumerate(task_keys("train", 3, INDICES)):
        state, past = reset(key)[0], []
        for t in range(int(e.mask[b].sum())):
            np.testing.assert_array_equal(e.pictures[b, t], render(state))
            view = PromptInput("", [("", action) for action in past[max(0, len(past) - history_length) :]], t, "", MOVES)
            content = [{"type": "image"}, {"type": "text", "text": template.render(view)}]
            ids = tokenizer().apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
            )
            assert e.prompts[b, t, : e.prompt_lengths[b, t]].tolist() == insert_tokens(ids, grid, model().vision)
            past.append(report.actions[b][t])
            before = state
            state, _, reward, done, invalid = step(state, ENV.encode(past[-1]))
            moves += bool((state.agent != before.agent).any())
            assert (e.rewards[b, t], report.admissible[b][t]) == (reward, not invalid)
        assert done or len(past) == ENV.max_turns
    return moves


@pytest.mark.slow
def test_prompts_are_the_chat_templates_and_pictures_the_rooms():
    """With answers of random weights, which are no moves: nothing that was said matters to a later prompt."""
    result = played()
    assert replay(result, 0) == 0 and result.report.counts["excluded"] == 0
    e = result.episodes
    assert e.mask.all() and e.pictures.dtype == np.uint8 and len(np.unique(e.states)) == GROUPS
    assert set(result.report.goals) == {"push every box onto a target."}
    assert ENV.decode(jax.jit(ENV.reset)(task_keys("train", 3, INDICES)[0])[1]) == result.report.texts[e.states[0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("history_length", [0, 2])
def test_moves_are_made_and_the_last_ones_told(history_length, monkeypatch):
    """By a policy that says one token, a move."""
    real, ids = generate.sample_token, [i for move in MOVES for i in tokenizer()(f" {move}").input_ids]
    assert len(ids) == len(MOVES)
    bias = jnp.full(model().vocab_size, -jnp.inf).at[jnp.array(ids)].set(0.0)
    monkeypatch.setattr(generate, "sample_token", lambda logits, keys, decoding: real(logits * 0 + bias, keys, decoding))
    result = play(history_length, limit=1)
    assert replay(result, history_length) > 5 and result.report.counts["excluded"] == 0


@pytest.mark.slow
def test_the_learner_reads_what_the_sampler_saw():
    e = played().episodes
    batch = jax.tree.map(jnp.asarray, training_batch(e))
    network_of = nnx.merge(network(model()), parameters())
    logp, entropy = jax.jit(lambda batch: token_logprobs(network_of, batch, temperature=TEMPERATURE))(batch)
    mask = np.asarray(batch.response_mask()) & e.mask.reshape(-1, 1)
    assert mask[:, 1:].sum() > 3 * B  # decoded after the prompt, at positions that the picture shifts
    np.testing.assert_allclose(np.where(mask, logp, 0), np.where(mask, batch.old_logp, 0), atol=1e-5)
    assert np.isfinite(entropy).all() and model().vision.image_token_id not in np.asarray(batch.responses)[mask]
    other = batch.replace(pictures=batch.pictures[::-1])
    seen, _ = jax.jit(lambda batch: token_logprobs(network_of, batch, temperature=TEMPERATURE))(other)
    assert np.abs(np.where(mask, seen - logp, 0)).max() > 1e-3  # it matters which picture it is


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "slots"), [("data=2,fsdp=2", 2), ("data=1,tensor=2", 6)])
def test_meshes_and_slots_change_nothing(spec, slots):
    e, other = played().episodes, played(spec, slots).episodes
    for name, value in e.arrays().items():
        if name == "logp":
            np.testing.assert_allclose(value, other.logp, atol=1e-5)
        else:
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)


def test_numbers_of_tasks_are_their_keys():
    keys, numbers = task_keys("train", 3, jnp.arange(50)), task_numbers("train", 3, np.arange(50), None)
    assert max(numbers) > 2**63
    np.testing.assert_array_equal(jax.random.key_data(keys_of(numbers)), jax.random.key_data(keys))


@pytest.mark.needs("data")
def test_with_qwens_tokenizer_a_message_begins_with_its_picture():
    tokens = qwen_tokenizer()
    tokens.chat_template = TEMPLATE
    vision = VisionConfig(
        depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=8, fullatt_block_indexes=(),
        mrope_section=(1, 1, 2),
    )  # fmt: skip
    chat = chat_format(tokens, vision)
    view = PromptInput("", [], 0, "", MOVES)
    content = [{"type": "image"}, {"type": "text", "text": chat.template.render(view)}]
    ids = tokens.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False)
    assert chat.build([view])[0].ids == insert_tokens(ids, ((1, 12, 12),), vision)
    assert tokens.decode(chat.head[-3:]) == "<|image_pad|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize("history_length", [0, 2])
def test_an_action_that_is_not_exact_is_no_move_or_ends_the_record(history_length):
    """Such as "left" before characters that the device cannot hold: what the host reads in it may be another action."""
    answer = DeviceAnswer(jnp.array([*b"left"]), jnp.array(True), jnp.array([True, False]))
    text = SimpleNamespace(env=ENV, answer=lambda response, length: answer._replace(exact=answer.exact[response]))
    program = SimpleNamespace(env=text, history_length=history_length)
    for number, exact in enumerate([True, False]):
        action, well_formed, notes = TextProgram.read(program, number, 4)
        assert bytes(action.tolist()) == (b"left" if exact or history_length else bytes(4)) and well_formed
        assert notes["exact_answers"] == (exact or not history_length)


def test_a_limit_that_cuts_the_only_prompt_is_refused():
    form, env = chat_format(), SimpleNamespace(goal="", reset=lambda task: ("", list(MOVES)))
    _check_whole({SHARED: form}, env)
    (prompt,) = form.build([PromptInput("", [], 0, "", MOVES)])
    picture, size = picture_tokens(36, model().vision), len(prompt.ids)
    for limit, cut in ((size, False), (size - 1, True)):
        short = ChatFormat(ChatFrame(tokenizer()), "sokoban_pixels", limit, 20, lower_case=True, picture=picture)
        with refused(f"prompt_limit={limit}: a prompt takes {size} tokens") if cut else contextlib.nullcontext():
            _check_whole({SHARED: short}, env)


@pytest.mark.parametrize("template", ["alfworld", "conversation"])
def test_a_template_that_tells_what_is_seen_is_refused(template):
    config = load(None, ["env.name=sokoban_pixels", f"env.template={template}", "policy=x", "warm_start=none"])
    with refused(f"env.template={template}: a picture stands for $observation; leave it out"):
        _chat_format(config, environment(config.env), tokenizer(), model())


def test_a_chat_shows_no_pictures():
    with refused("env.template=conversation: a prompt shows one picture, and a chat has several turns; give another"):
        ChatFormat(ChatFrame(tokenizer()), "conversation", 1000, picture=picture_tokens(36, model().vision))
