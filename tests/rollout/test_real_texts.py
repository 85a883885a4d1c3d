"""Prompts of real games and shops with the real tokenizer; test_text_training.py trains on them."""

import functools

import pytest

from hgpo_jax.envs.alfworld.text import AlfworldText
from hgpo_jax.envs.household import Household
from hgpo_jax.envs.household.text import HouseholdText
from hgpo_jax.envs.webshop.text import WebshopText
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.rollout.chat_prompts import ChatFormat, PromptInput
from tests.helpers.chat_tokenizers import qwen_tokenizer
from tests.helpers.needs import DATA

pytestmark = pytest.mark.needs("data")

GAMES = sorted((DATA / "alfworld" / "sample").rglob("game.tw-pddl"))
SHOP = [DATA / "webshop" / "items_shuffle_1000.json.gz", DATA / "webshop" / "items_ins_v2_1000.json.gz"]
TURNS = 3
MAKE = {
    "alfworld": functools.partial(AlfworldText, GAMES, max_turns=TURNS),
    "webshop": functools.partial(WebshopText.open, *SHOP, max_turns=TURNS),
    "household": functools.partial(HouseholdText, Household(max_turns=TURNS)),
}


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
