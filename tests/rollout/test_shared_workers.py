"""Two processes as one program play text environments: the first steps them, both learn the same."""

import json

import pytest

from hgpo_jax.rollout.episodes import Episodes
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.processes import alone, metrics, together

pytestmark = pytest.mark.slow

FIELDS = (
    "--config", "alfworld_tiny", "env.name=household_text", "env.split=train", "env.max_turns=3",
    "rollout.prompt_limit=512", "rollout.response_limit=4", "learner.minibatch_size=4", "learner.microbatch_size=2",
    "evaluation.episodes=4",
)  # fmt: skip


def test_two_processes_learn_from_the_texts_of_the_first(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    fields = (*FIELDS, f"policy.tokenizer={tmp_path / 'tokenizer'}")
    together(tmp_path, *fields, "env.workers=2", "rollout.ready_fraction=0.5", "run_dir=two", "cache_dir=cache")
    alone(tmp_path, *fields, "run_dir=one", "cache_dir=cache")
    assert len(metrics(tmp_path / "two")) == 2
    for row, expected in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for name in ("decode_steps", "slot_use"):  # which depend on who is ready when, with rollout.ready_fraction
            del row[name], expected[name]
        assert row == pytest.approx(expected, abs=1e-5)
    ours, wanted = (Episodes.load(tmp_path / name / "episodes" / "iteration-00001.npz") for name in ("two", "one"))
    assert (ours.responses == wanted.responses).all()
    assert (ours.prompts == wanted.prompts).all()
    names = ("goals", "scores")
    ours, wanted = (json.loads((tmp_path / name / "episodes" / "iteration-00001.json").read_text()) for name in ("two", "one"))
    assert [ours[name] for name in names] == [wanted[name] for name in names]
