"""Text environments that show a picture beside each observation, played on the host."""

import jax
import numpy as np
import pytest

from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.pictures import grid_of, picture_tokens
from hgpo_jax.rollout.chat_prompts import ChatFormat
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.requirements import check_text
from hgpo_jax.rollout.workers import LocalWorkers
from hgpo_jax.sampling.generate import Decoding
from tests.helpers.refusals import refused
from tests.helpers.vision_policy import vision_policy

SIZE, PROMPT = (16, 24), 400


class Lamps:
    """A lamp of the task's colour, darker at every turn; the text is always the same."""

    max_turns, task_types, task_type, goal, picture_size = 2, ("lamps",), 0, "name the colour", SIZE

    def __init__(self):
        self.picture = np.zeros((*SIZE, 3), np.uint8)

    def reset(self, task):
        self.task, self.turn = task, 0
        return self.seen()

    def seen(self):
        self.picture[:] = 0
        self.picture[:, 4:, self.task % 3] = 240 // (self.turn + 1)
        return "A lamp.", ["red", "green", "blue"]

    def step(self, action):
        self.turn += 1
        return *self.seen(), 0.0, self.turn == 2, {"won": False, "admissible": True}


@pytest.fixture(scope="module")
def policy():
    return vision_policy()


def test_the_policy_sees_what_the_environment_shows(policy):
    v, mesh = policy.config.vision, make_mesh("data=1", jax.devices()[:1])
    features = int(np.prod(grid_of(*SIZE, v))) // v.spatial_merge_size**2
    form = ChatFormat(ChatFrame(policy.tokenizer), "plain", PROMPT, picture=picture_tokens(features, v))
    settings = TextSettings(batch=6, history_length=1, response_limit=4, decode_batch_size=4, vision=v)
    rollout = HostRollout(Lamps, form, {SHARED: policy.graphdef}, mesh, settings)
    keys = jax.random.split(jax.random.key(0), 6)
    tasks = [0, 0, 1, 1, 2, 2]
    e = rollout({SHARED: policy.params}, tasks, keys, np.array(tasks, np.int32), Decoding()).episodes
    assert e.mask.all() and e.pictures.shape == (6, 2, *SIZE, 3)
    shown = {}
    for b, t in np.argwhere(e.mask):
        expected = np.zeros((*SIZE, 3), np.uint8)
        expected[:, 4:, tasks[b]] = 240 // (t + 1)
        np.testing.assert_array_equal(e.pictures[b, t], expected)
        shown.setdefault(int(e.states[b, t]), set()).add((tasks[b], int(t)))
        # The likelihood of each answer, by reading the whole prompt with that picture.
        prompt, answer = e.prompts[b, t, : e.prompt_lengths[b, t]], e.responses[b, t, : e.response_lengths[b, t]]
        assert prompt.tolist().count(v.image_token_id) == features
        row = np.zeros((1, PROMPT + 4), np.int32)
        row[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        seen, _ = policy.see([[expected]])
        logits = np.array(policy.logits(row, [len(prompt) + len(answer)], seen)[0], np.float64)
        logits[:, v.image_token_id] = -np.inf
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected_logp = [logp[len(prompt) + i - 1, token] for i, token in enumerate(answer)]
        np.testing.assert_allclose(e.logp[b, t, : len(answer)], expected_logp, atol=1e-4)
    # One state for each picture, though the text is the same.
    assert len(shown) == 6 and all(len(places) == 1 for places in shown.values())


@pytest.mark.parametrize(("change", "said"), [
    ({"picture_size": (16, 25)}, "picture is uint8[16, 24, 3]; give uint8[16, 25, 3], as picture_size says"),
    ({"picture_size": (16,)}, "picture_size is (16,); give 2 numbers, height and width, each above 0"),
    ({"picture_size": (0, 4)}, "picture_size is (0, 4); give 2 numbers"),
])  # fmt: skip
def test_pictures_of_another_form_are_refused_before_play(change, said):
    with refused(said):
        check_text(type("Wrong", (Lamps,), change)())


def test_a_missing_picture_is_named():
    bare = type("Bare", (Lamps,), {"__init__": lambda self: None, "seen": lambda self: ("A lamp.", ["red"])})
    with refused("Bare after reset(task) lacks picture: what is seen now"):
        check_text(bare())


def test_a_picture_that_changes_its_form_ends_its_episode_alone():
    class Broken(Lamps):
        def step(self, action):
            answer = super().step(action)
            self.picture = self.picture.astype(np.float32)
            return answer

    workers = LocalWorkers(Lamps)
    workers._make_env = Broken
    workers.send([(0, 0, ("red",))])
    ((_, failed),) = workers.receive(1)
    assert "picture is float32[16, 24, 3]" in failed.reason
    workers.close()
