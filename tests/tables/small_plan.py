"""A plan of eight cells, and run folders as training and evaluation leave them."""

import json
from pathlib import Path

import yaml

from hgpo_jax.evaluation.files import file_name, write
from hgpo_jax.evaluation.statistics import over_seeds
from hgpo_jax.tables.plan import Cell

PLANS = Path(__file__).parents[2] / "configs" / "tables"
SMALL = {
    "title": "small",
    "fields": ["iterations=3", "mesh=data=1"],
    "window": 2,
    "settings": {
        "near": {
            "title": "Near", "config": "sokoban_tiny",
            "columns": {"AUC": "train/auc", "last": "train/last", "sampled": "final/sampled"},
        },
        "far": {
            "title": "Far & 100 %", "config": "household", "seeds": [1, 2, 3], "splits": ["held_out"],
            "columns": {"success": "held_out/success"},
        },
    },
    "methods": {
        "gigpo": {"title": "GiGPO", "fields": ["method=gigpo"]},
        "hgpo": {"title": "HGPO", "fields": ["method=hgpo", "advantage.alpha=2"]},
    },
    "tables": [
        {"title": "T", "settings": ["near", "far"], "methods": ["gigpo", "hgpo"], "seeds": [0, 1, 2, 3], "baseline": "gigpo"},
    ],
    "published": {"source": "a paper", "numbers": {"far": {"hgpo": {"success": [50.25, 1.5]}}}},
}  # fmt: skip


def write_plan(folder: Path, **changes) -> Path:
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL | changes, sort_keys=False))
    return file


def finish(runs: Path, plan, cell: Cell, curve, success=0.5, evaluated=None) -> None:
    """A run folder as training and evaluation leave it."""
    folder = runs / cell.name
    folder.mkdir(parents=True)
    rows = [{"iteration": i, "success": s, "seconds": {"rollout": 0.5, "update": 1.0}} for i, s in enumerate(curve)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evaluation.json").write_text(json.dumps({"success": {"sampled": success, "greedy": 1.0}}))
    (folder / "transcripts.txt").write_text("\n")
    if evaluated:
        result = {"seeds": [1, 2, 3], "temperature": 1.0, "episodes_per_seed": 512, "split": "held_out",
                  "over_seeds": {"success": over_seeds(evaluated)}}  # fmt: skip
        name = file_name("held_out", result["temperature"], result["episodes_per_seed"], result["seeds"])
        write(folder / "evaluations" / name, result)
