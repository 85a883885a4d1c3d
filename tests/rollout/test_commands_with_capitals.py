"""Answers are read in lower case; commands may have capitals."""

import numpy as np
import pytest

from hgpo_jax.rollout.chat_format import Prompt, Template, load_template
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.workers import EnvOutput
from hgpo_jax.sampling.continuous_batching import SlotResponse

CHESS = ["Nf3", "nf6", "e4", "O-O", "o-o-o", "O-O-O", "click[B07XYZ]", "Übe", "Nf3"]


@pytest.mark.parametrize(("answer", "action"), [
    ("NF3", "Nf3"), ("Nf6", "nf6"), (" e4 ", "e4"), ("O-O", "O-O"), ("click[b07xyz]", "click[B07XYZ]"), ("ÜBE", "Übe"),
    ("o-o-o", "o-o-o"), ("O-o-O", "o-o-o"),  # the reader has lower-cased it, and that is a command itself
    ("Search[Red shoes]", "search[red shoes]"), ("Nf", "nf"),
])  # fmt: skip
def test_an_answer_becomes_the_command_that_it_means(answer, action):
    template: Template = load_template("text")
    buffer = EpisodeBuffer(Episodes.zeros(1, 3, 4, 2), [0], history_length=1, strict=False)
    buffer.add_output(0, EnvOutput("board", CHESS, "win", 0))
    parsed = template.parse(f"<think></think><action>{answer}</action>", 30)
    response = SlotResponse(0, np.array([1]), np.zeros(1))
    assert buffer.add_response(Prompt([1]), response, parsed, True) == (action,)
    buffer.add_output(0, EnvOutput("board", CHESS, "win", 0))
    assert buffer.prompt_input(0).history == [("board", action)]


def test_without_tags_an_answer_may_have_capitals_and_still_be_another_command():
    buffer = EpisodeBuffer(Episodes.zeros(1, 3, 4, 2), [0], history_length=1, strict=False)
    buffer.add_output(0, EnvOutput("two", ["Left", "left", "Right"], "", 0))
    plain, response = load_template("plain"), SlotResponse(0, np.array([1]), np.zeros(1))
    for answer, action in (("Left", "Left"), ("LEFT", "LEFT"), ("RIGHT", "Right")):
        assert buffer.add_response(Prompt([1]), response, plain.parse(answer, 30), True)[-1] == action
