"""A whole rollout over texts that are no prose and environments that fail: frames hold, nothing half is left, all is kept."""

import json
import re

import jax
import numpy as np
import pytest
from household_policy import mesh_of
from odd_env import ODD, Deadly

from hgpo_jax.advantages import estimate
from hgpo_jax.analysis.dumps import read_report
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.chat_frame import ChatFrame
from hgpo_jax.rollout.chat_format import ChatFormat, PromptInput
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.sampling.generate import Decoding
from tests.helpers.chat_tokenizers import byte_tokenizer

MODEL = ModelConfig(
    vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.3,
)  # fmt: skip


@pytest.mark.slow
def test_odd_texts_and_mishaps(tmp_path):
    tasks = np.repeat(np.arange(10), 2)
    tokenizer, mesh = byte_tokenizer(), mesh_of("data=1")
    format = ChatFormat(ChatFrame(tokenizer), "alfworld", prompt_limit=2048)
    rollout = HostRollout(
        Deadly, format, network(MODEL), mesh, batch=len(tasks), history_length=2, response_limit=4, workers=2, time_limit=8,
        decode_batch_size=4,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(tasks))
    try:
        e, report = rollout(initialize(MODEL, 0, mesh), tasks, keys, tasks.astype(np.int32), Decoding())
    finally:
        rollout.close()
    failed = np.isin(tasks, list(Deadly.mishaps))
    # An episode is there with all its turns or not at all.
    assert sorted(report.failures) == np.flatnonzero(failed).tolist() and report.counts["excluded"] == failed.sum()
    lost = [reason for reason in report.failures.values() if re.search("worker process died|no answer in", reason)]
    assert len(lost) == 4
    assert e.mask[~failed].all()
    for name in set(vars(e)) - {"groups"}:
        assert not getattr(e, name)[failed].any(), name
    # Every prompt has the frame's special tokens and no others.
    added = set(tokenizer.get_added_vocab().values())
    frame = [i for i in format.build([PromptInput("", [], 0, "", [])])[0].ids if i in added]
    shown = set()
    for b, t in np.argwhere(e.mask):
        ids = e.prompts[b, t, : e.prompt_lengths[b, t]].tolist()
        assert [i for i in ids if i in added] == frame
        assert ids[-len(format.frame.tail) :] == format.frame.tail
        shown.add(report.texts[e.states[b, t]])
    assert any(ODD["surrogate"] in text for text in shown) and any(ODD["marker"] in text for text in shown)
    record = estimate("hgpo", rewards=e.rewards, mask=e.mask, states=e.states, groups=e.groups, invalid=e.invalid)
    assert np.isfinite(record.advantages).all() and not np.asarray(record.advantages)[failed].any()
    # What is written can be read again, and shown.
    e.save(tmp_path / "iteration-00000.npz")
    report.save(tmp_path / "iteration-00000.json")
    back = Episodes.load(tmp_path / "iteration-00000.npz")
    assert read_report(tmp_path / "iteration-00000.json", back)["texts"] == report.texts
    for b in range(len(tasks)):
        transcript = report.story(e, b, ("agent",)).text()
        assert all(c.isprintable() or c in "\n\t\u00a0" for c in transcript)
        transcript.encode()
        json.dumps(transcript)
