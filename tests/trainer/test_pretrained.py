"""What a run says and saves of pretrained weights: the rate that they learn at, and the base of its adapters."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hgpo_jax.config import load
from hgpo_jax.trainer import loop
from hgpo_jax.trainer.main import LARGE, has_default_rate


@pytest.mark.parametrize(("fields", "size", "warned"), [
    (["policy=Qwen/Qwen3-4B"], LARGE + 1, True), (["policy=Qwen/Qwen3-4B", "learner.lr=1e-6"], LARGE + 1, False),
    (["policy=runs/start"], LARGE, False), ([], LARGE + 1, False),
])  # fmt: skip
def test_large_pretrained_weights_at_the_default_rate_are_seen(fields, size, warned):
    weights = np.broadcast_to(np.float32(0), size)
    policy = SimpleNamespace(settings=load(None, fields), initial=SimpleNamespace(params={"weight": weights}))
    assert has_default_rate(policy) == warned


@pytest.mark.parametrize(("source", "warm_start", "base"), [
    ("Qwen/Qwen3-4B", "none", "Qwen/Qwen3-4B"), ("mine", "none", "{here}/mine"), ("a/mine", "none", "{here}/a/mine"),
    ("smollm2", "none", "{here}/run/start"), ("weights.gguf", "none", "{here}/run/start"),
    ("Qwen/Qwen3-4B", "cloning", "{here}/run/start"),
])  # fmt: skip
def test_adapters_name_a_base_that_can_be_opened(source, warm_start, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "a/mine"):
        Path(folder).mkdir(parents=True)
    saved = []
    monkeypatch.setattr(loop.lora, "save", lambda folder, model, adapters, base: saved.append((folder, base)))
    settings = load(None, [f"policy={source}", f"warm_start={warm_start}"])
    policy = SimpleNamespace(name="", settings=settings, model=SimpleNamespace(lora=True))
    loop.save_adapters(Path("run"), {"": Path("run/start")}, policy, {})
    assert saved == [(Path("run/adapter"), base.format(here=tmp_path))]
