"""Runs to inspect in tests: the committed example, and handmade folders of text runs."""

import json
import shutil
from pathlib import Path

import numpy as np

from hgpo_jax.rollout.episodes import Episodes

EXAMPLE = Path(__file__).parents[2] / "notebooks" / "data" / "household"


def text_run(folder: Path, texts: list[str], report: bool = True, method: str = "hgpo") -> Path:
    """The folder of a text run with one dump: two tasks of two episodes, which walk through `texts` (three or more).

    Rewards 10 at the end of the first episode of each task. Prompts and responses are words of the example's tokenizer.
    """
    shutil.copytree(EXAMPLE / "policy", folder / "policy")
    (folder / "episodes").mkdir()
    (folder / "config.yaml").write_text(f"env: {{name: household_text}}\nwarm_start: none\nmethod: {method}\n")
    B, T = 4, 3
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
    states = np.where(mask, [[0, 1, 2], [0, 1, 0], [0, 2, 1], [0, 0, 0]], 0).astype(np.int32)
    after = np.where(mask, [[1, 2, 1], [1, 2, 0], [2, 1, 0], [1, 0, 0]], 0).astype(np.int32)
    rewards = np.zeros((B, T), np.float32)
    rewards[0, 2] = rewards[2, 2] = 10
    rng = np.random.default_rng(0)
    Episodes(
        prompts=rng.integers(1, 20, (B, T, 8), dtype=np.int32), prompt_lengths=np.where(mask, 6, 0).astype(np.int32),
        responses=rng.integers(1, 20, (B, T, 4), dtype=np.int32), response_lengths=np.where(mask, 3, 0).astype(np.int32),
        logp=np.zeros((B, T, 4), np.float32), observations=states[..., None], rewards=rewards, mask=mask,
        invalid=np.zeros((B, T), bool), states=states, next_states=after,
        agents=np.zeros((B, T), np.int32), groups=np.array([0, 0, 1, 1], np.int32),
        actions=np.where(mask, np.arange(B * T).reshape(B, T) % 3, 0).astype(np.int32),
        success=rewards.any(1), judged=mask[:, 0], task=np.zeros(B, np.int32), truncated=np.zeros(B, bool),
        final_prompts=np.zeros((B, 8), np.int32), final_prompt_lengths=np.zeros(B, np.int32),
    ).save(folder / "episodes" / "iteration-00000.npz")  # fmt: skip
    if report:
        content = {
            "texts": texts, "goals": [f"goal {b // 2}: {texts[0]}" for b in range(B)], "scores": [1, 0.25, 1, 0],
            "responses": [[f"answer {b} {t}: {texts[1]}" for t in range(mask[b].sum())] for b in range(B)],
            "actions": [[f"act {b} {t}" for t in range(mask[b].sum())] for b in range(B)],
            "admissible": [[b == t for t in range(mask[b].sum())] for b in range(B)], "failures": {}, "counts": {},
        }  # fmt: skip
        (folder / "episodes" / "iteration-00000.json").write_text(json.dumps(content))
    return folder
