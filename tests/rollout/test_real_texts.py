"""Real games and shops with the real tokenizer: a tiny random Qwen2.5 plays a few turns end to end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_policy import mesh_of

from hgpo_jax.advantages import estimate
from hgpo_jax.envs.alfworld.text import AlfworldText
from hgpo_jax.envs.household import Household
from hgpo_jax.envs.household.text import HouseholdText
from hgpo_jax.envs.webshop.text import WebshopText
from hgpo_jax.policy import ModelConfig, Policy, initialize, network
from hgpo_jax.policy.chat_frame import ChatFrame
from hgpo_jax.rollout.chat_format import ChatFormat, PromptInput
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.sampling.generate import Decoding
from tests.helpers.chat_tokenizers import qwen_tokenizer
from tests.helpers.needs import DATA

pytestmark = pytest.mark.needs("data")

GAMES = sorted((DATA / "alfworld" / "sample").rglob("game.tw-pddl"))
SHOP = [DATA / "webshop" / "items_shuffle_1000.json.gz", DATA / "webshop" / "items_ins_v2_1000.json.gz"]
MODEL = ModelConfig(
    vocab_size=151936, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.3,
)  # fmt: skip
MEMBERS, B, TURNS = 2, 4, 3
MAKE = {
    "alfworld": functools.partial(AlfworldText, GAMES, max_turns=TURNS),
    "webshop": functools.partial(WebshopText.open, *SHOP, max_turns=TURNS),
    "household": functools.partial(HouseholdText, Household(max_turns=TURNS)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "workers"), [("alfworld", 2), ("webshop", 0)])
def test_a_tiny_model_plays_a_few_turns(environment, workers):
    tokenizer, mesh = qwen_tokenizer(), mesh_of("data=2")
    params = initialize(MODEL, 0, mesh)
    format = ChatFormat(ChatFrame(tokenizer), environment, prompt_limit=1024)
    rollout = HostRollout(
        MAKE[environment], format, network(MODEL), mesh, batch=B, history_length=1, response_limit=8, workers=workers
    )
    tasks, groups = np.repeat([1, 5], MEMBERS), np.repeat([0, 1], MEMBERS)
    try:
        e, report = rollout(params, tasks, jax.random.split(jax.random.key(0), B), groups, Decoding())
    finally:
        rollout.close()
    assert e.mask.all() and e.invalid.all() and not e.success.any()
    assert report.counts["excluded"] == 0 and report.counts["malformed"] == B * TURNS
    assert report.counts["unfinished"] == B * TURNS  # one token in 151,936 would end it
    for b in range(B):
        env = MAKE[environment]()
        observation, commands = env.reset(int(tasks[b]))
        for t in range(TURNS):
            prompt = tokenizer.decode(e.prompts[b, t, : e.prompt_lengths[b, t]])
            assert prompt.count("<|im_start|>") == 3 and prompt.endswith("<|im_start|>assistant\n")
            assert observation in prompt and env.goal in prompt and all(f"'{command}'" in prompt for command in commands)
            assert not t or (f"Turn {t}: you read" in prompt and "Turns so far" in prompt)
            assert report.texts[e.states[b, t]] == observation
            action = format.parse(e.responses[b, t, : e.response_lengths[b, t]].tolist()).action
            observation, commands, *_ = env.step(action)
    # What was sampled has the probability that the whole network gives it.
    policy = Policy(MODEL, params, tokenizer)
    b, t = B - 1, TURNS - 1
    n, r = int(e.prompt_lengths[b, t]), int(e.response_lengths[b, t])
    ids = np.concatenate([e.prompts[b, t, :n], e.responses[b, t, :r]])
    logp = jax.nn.log_softmax(policy.logits(ids[None], jnp.array([n + r]))[0], axis=-1)
    np.testing.assert_allclose(e.logp[b, t, :r], logp[np.arange(n - 1, n + r - 1), ids[n:]], atol=1e-3)
    record = estimate(
        "hgpo", rewards=e.rewards, mask=e.mask, states=e.states, groups=e.groups, invalid=e.invalid, history_length=1
    )
    assert np.isfinite(record.advantages).all()
    assert (record.level_sizes[:, 0, 0] >= MEMBERS).all()  # a prompt group begins in one state


@pytest.mark.parametrize("environment", MAKE)
def test_prompts_of_real_observations_are_the_tokenizers_own(environment):
    """On the texts of real environments the encoding as data changes nothing."""
    tokenizer = qwen_tokenizer()
    format, env = ChatFormat(ChatFrame(tokenizer), environment), MAKE[environment]()
    for task in (0, 3):
        observation, commands = env.reset(task)
        history = []
        for turn in range(TURNS):
            view = PromptInput(env.goal, history[-2:], turn, observation, commands)
            messages = [{"role": "user", "content": format.template.render(view)}]
            wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert format.build([view])[0] == (wanted, 0, 0)
            action = "search[red shoes]" if turn == 0 and environment == "webshop" else commands[turn]
            history.append((observation, action))
            observation, commands, *_ = env.step(action)
