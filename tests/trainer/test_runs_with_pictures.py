"""Whole runs of a policy that sees."""

import dataclasses

import jax
import numpy as np
import pytest

from hgpo_jax.policy import ModelConfig, Policy, initialize, load_policy
from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.policy.pictures import VISION_TOKENS
from hgpo_jax.policy.tokenizer import embedding_rows
from hgpo_jax.rollout.env_tokenizer import seeing_tokenizer
from hgpo_jax.rollout.episodes import Episodes, dumped
from tests.helpers.tiny import mesh_of
from tests.helpers.training import TINY, command, rows_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_learns_from_pictures_and_goes_on_after_a_stop(frozen, tmp_path):
    fields = (*TINY, "iterations=2", f"policy.vision_frozen={str(frozen).lower()}", "learner.weight_decay=0.5", "run_dir=run")
    command("-m", "hgpo_jax.train", "--config", "sokoban_pixels", *fields, "cache_dir=cache", cwd=tmp_path)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and max(row["logp_difference"] for row in rows) < 1e-5
    pictures = Episodes.load(next(iter(dumped(tmp_path / "run").values()))).pictures
    assert pictures.dtype == np.uint8 and pictures.shape[2:] == (24, 24, 3) and pictures.max() > 0
    if not frozen:
        command("-m", "hgpo_jax.train", "--resume", "run", "iterations=3", cwd=tmp_path)
        assert len(rows_of(tmp_path / "run")) == 3
    before, after = (load_policy(tmp_path / "run" / name) for name in ("start", "policy"))
    assert before.config == after.config and before.config.vision.patch_size == 4
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before.params, after.params)
    towers, rest = moved.pop("visual"), moved
    assert not any(jax.tree.leaves(towers)) if frozen else all(jax.tree.leaves(towers))
    assert all(jax.tree.leaves(rest))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """The folder of a tiny Qwen2.5-VL with random weights, which sees a feature in 4 x 4 pixels, and a chat template."""
    folder, tokenizer = tmp_path_factory.mktemp("policy"), seeing_tokenizer("sokoban_pixels")
    before, feature, after = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    vision = VisionConfig(
        depth=2, hidden_size=8, intermediate_size=12, num_heads=2, out_hidden_size=24, fullatt_block_indexes=(1,),
        mrope_section=(2, 2, 2), window_size=8, patch_size=2, image_token_id=feature, video_token_id=feature,
        vision_start_token_id=before, vision_end_token_id=after, min_pixels=16,
    )  # fmt: skip
    model = ModelConfig(
        vocab_size=embedding_rows(len(tokenizer)), hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, model_type="qwen2_5_vl", vision=vision,
    )  # fmt: skip
    Policy(model, initialize(model, 1, mesh_of()), tokenizer).save(folder)
    return folder


CHAT = (
    "--config", "sokoban_qwen2.5_vl_3b", "iterations=1", "env.max_turns=2", "env.tile=4", "rollout.prompt_groups=2",
    "rollout.group_size=2", "rollout.prompt_limit=300", "rollout.response_limit=8", "rollout.decode_batch_size=4",
    "learner.minibatch_size=4", "learner.microbatch_size=2", "evaluation.episodes=2", "evaluation.every=0",
    "policy.compute_dtype=float32", "learner.lr=1e-3", "mesh=data=2", "log.dump_every=1", "cache_dir=cache",
)  # fmt: skip


def test_a_language_model_learns_from_pictures_and_is_reported_and_evaluated(seeing, tmp_path):
    command("-m", "hgpo_jax.train", *CHAT, f"policy={seeing}", "run_dir=run", cwd=tmp_path)
    (row,) = rows_of(tmp_path / "run")
    assert row["logp_difference"] < 1e-5 and row["excluded"] == 0
    e = Episodes.load(next(iter(dumped(tmp_path / "run").values())))
    assert e.pictures.shape[2:] == (24, 24, 3) and e.pictures[e.mask].max() > 0
    before, after = (load_policy(folder).params for folder in (seeing, tmp_path / "run" / "policy"))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before["visual"], after["visual"])))
    command("-m", "hgpo_jax.watch", "run", "--gif", "seen.gif", cwd=tmp_path)
    command("-m", "hgpo_jax.report", "run", cwd=tmp_path)
    assert (tmp_path / "seen.gif").stat().st_size > 0 and "data:image/png" in (tmp_path / "run" / "report.html").read_text()


def test_what_does_not_see_the_rooms_is_refused_in_one_line(seeing, tmp_path):
    tokenizer = seeing_tokenizer("sokoban_pixels")
    model = load_policy(seeing).config
    blind = Policy(model, load_policy(seeing).params, tokenizer)
    plain = dataclasses.replace(model.vision, image_token_id=5, vision_start_token_id=6)
    dataclasses.replace(blind, config=dataclasses.replace(model, vision=plain)).save(tmp_path / "blind")
    for fields, said in (
        (("env.tile=3", f"policy={seeing}"), "env.name=sokoban_pixels shows 18 x 18 pixels for 36 features; change env.tile"),
        (("policy=blind",), "its tokenizer has no special token 6, which its config.json gives to pictures"),
    ):  # fmt: skip
        done = command("-m", "hgpo_jax.train", *CHAT, *fields, "run_dir=run", cwd=tmp_path, code=2)
        assert said in done.stderr.splitlines()[-1]


DOORS = '''
import numpy as np

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0)}


class Doors:
    """Which colour is the door? It is not said."""

    max_turns, task_types, task_type, goal, picture_size = 2, ("doors",), 0, "name the colour", (8, 12)

    def __init__(self):
        self.picture = np.zeros((8, 12, 3), np.uint8)

    def reset(self, task):
        self.turn, self.colour = 0, list(COLOURS)[task % 2]
        return self.seen()

    def seen(self):
        self.picture[:] = np.array(COLOURS[self.colour]) // (self.turn + 1)  # the same array, drawn anew
        return "A door.", list(COLOURS)

    def step(self, action):
        self.turn += 1
        won = action == self.colour
        info = {"won": won, "admissible": action in COLOURS}
        return *self.seen(), 1.0 * won, won or self.turn == 2, info
'''
TEXT = (
    "env.name=./doors.py:Doors", "warm_start=none", "iterations=2", "rollout.prompt_groups=2", "rollout.group_size=2",
    "rollout.prompt_limit=400", "rollout.response_limit=8", "rollout.decode_batch_size=4", "learner.minibatch_size=4",
    "learner.microbatch_size=2", "evaluation.episodes=2", "evaluation.every=0", "learner.lr=1e-3", "log.dump_every=1",
    "cache_dir=cache", "log.tensorboard=false",
)  # fmt: skip


@pytest.mark.parametrize("fields", [("mesh=data=2",), ("mesh=data=1", "env.workers=1", "rollout.keep=2", "env.template=plain")])
def test_a_text_environment_of_ones_own_shows_pictures(fields, seeing, tmp_path):
    (tmp_path / "doors.py").write_text(DOORS)
    command("-m", "hgpo_jax.train", *TEXT, *fields, f"policy={seeing}", "run_dir=run", cwd=tmp_path)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and all(row["excluded"] == 0 for row in rows)
    if "rollout.keep=2" not in fields:  # whose answers are of two policies
        assert max(row["logp_difference"] for row in rows) < 1e-5
    e = Episodes.load(next(iter(dumped(tmp_path / "run").values())))
    first, shown = e.mask[:, 0], e.pictures[:, 0, 0, 0]
    assert e.pictures.shape[2:] == (8, 12, 3) and {tuple(rgb) for rgb in shown[first].tolist()} <= {(255, 0, 0), (0, 255, 0)}
    later = e.mask[:, 1]
    assert (e.pictures[later, 1].max(axis=(1, 2, 3)) == 127).all()  # each turn keeps its own
    # One text; states are told apart by what is seen beside it.
    seen = {tuple(e.pictures[b, t, 0, 0].tolist()) for b, t in np.argwhere(e.mask)}
    assert len({int(state) for state in e.states[e.mask]}) == len(seen) > 1
    before, after = (load_policy(folder).params for folder in (seeing, tmp_path / "run" / "policy"))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before["visual"], after["visual"])))
    if "env.workers=1" in fields:
        return
    command("-m", "hgpo_jax.watch", "run", "--gif", "seen.gif", cwd=tmp_path)
    command("-m", "hgpo_jax.report", "run", cwd=tmp_path)
    command("-m", "hgpo_jax.evaluate", "run", "--seeds", "1", cwd=tmp_path)
    assert (tmp_path / "seen.gif").stat().st_size > 0 and "data:image/png" in (tmp_path / "run" / "report.html").read_text()


def test_a_text_environment_with_pictures_needs_a_policy_that_sees(seeing, tmp_path):
    (tmp_path / "doors.py").write_text(DOORS)
    wrong = DOORS.replace("(8, 12)", "(7, 12)"), DOORS.replace("np.uint8", "np.float32")
    for number, text in enumerate(wrong):
        (tmp_path / f"wrong{number}.py").write_text(text)
    for fields, said in (
        ((), "policy.source=: env.name=./doors.py:Doors shows pictures; give policy=, a qwen2_5_vl"),
        ((f"policy={seeing}", "warm_start=cloning"), "warm_start=cloning: a language model clones texts, and env.name="),
        ((f"policy={seeing}", "method=ppo"), "its critic sees no pictures"),
        ((f"policy={seeing}", "env.name=./wrong0.py:Doors"), "picture is uint8[8, 12, 3]; give uint8[7, 12, 3]"),
        ((f"policy={seeing}", "env.name=./wrong1.py:Doors"), "picture is float32[8, 12, 3]; give uint8[8, 12, 3]"),
    ):  # fmt: skip
        done = command("-m", "hgpo_jax.train", *TEXT, *fields, "run_dir=run", cwd=tmp_path, code=2)
        assert said in done.stderr.splitlines()[-1]
