"""Gymnasium's environments whose actions or observations are texts, or arrays of whole numbers."""

import gymnasium
import numpy as np

from hgpo_jax.config import load
from hgpo_jax.envs.gym_text import GymnasiumText
from hgpo_jax.rollout.chat_prompts import template_file
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.requirements import check_text
from tests.helpers.refusals import refused


class Echo(gymnasium.Env):
    """Repeats what is said; "stop" ends it."""

    observation_space = action_space = gymnasium.spaces.Text(9, charset="abcdefghijklmnopqrstuvwxyz ")

    def reset(self, *, seed=None, options=None):
        return "say on", {}

    def step(self, action):
        return f"you say {action}", 1.0, action == "stop", False, {"success": action == "stop"}


gymnasium.register("Echo-v0", entry_point=Echo)


def test_actions_and_observations_may_be_texts():
    env = GymnasiumText("Echo-v0", max_turns=3)
    assert not check_text(env)  # lists no commands
    assert env.reset(0) == ("say on", [])
    answers = [env.step(words) for words in (" so it is", "so long a text", "stop")]
    assert [(answer[0], answer[4]["admissible"], answer[4]["won"]) for answer in answers] == [
        ("you say so it is", True, False), ("you say so it is", False, False), ("you say stop", True, True),
    ]  # fmt: skip
    config = load(None, ["env.name=gymnasium:Echo-v0", "env.options.max_turns=3"])
    about = environment(config.env)
    assert (about.template, about.free_text) == ("free", True) and "$commands" not in template_file("free").read_text()
    about = environment(load(None, ["env.name=gymnasium:FrozenLake-v1"]).env)
    assert (about.template, about.free_text) == ("text", False)
    with refused("actions=a,b: those of Echo-v0 are any texts; leave it out"):
        GymnasiumText("Echo-v0", max_turns=3, actions=("a", "b"))


class Dials(Echo):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Tuple([gymnasium.spaces.MultiDiscrete([[3, 4]]), gymnasium.spaces.MultiBinary(2)])

    def reset(self, *, seed=None, options=None):
        return (np.array([[2, 3]]), np.array([1, 0], np.int8)), {}


gymnasium.register("Dials-v0", entry_point=Dials)


def test_arrays_of_whole_numbers_are_written():
    assert GymnasiumText("Dials-v0", max_turns=3).reset(0) == ("2, 3, 1, 0", ["action 0", "action 1"])
