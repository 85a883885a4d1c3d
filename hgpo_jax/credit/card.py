"""DATA_CARD.md, which stands beside snapshots."""

from __future__ import annotations

from pathlib import Path

import jinja2
import numpy as np

from hgpo_jax.credit import snapshot
from hgpo_jax.rollout.environments import ENVIRONMENTS
from hgpo_jax.utils.files import atomic_write

FILE = "DATA_CARD.md"


def write(folder: Path) -> None:
    """Writes the card of all snapshots in a folder. Raises ConfigError if one is damaged."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hgpo_jax"), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    snapshots = snapshot.load_all(folder)
    rows = []
    for name, one in snapshots.items():
        mask, error = one["mask"], one["standard_error"]
        spread = float(np.sqrt(np.mean(one["true_advantages"][mask] ** 2)))
        rows.append([name, one.about, len(one.batches()), len(mask), int(mask.sum()), spread, float(error[mask].mean())])
    played = sorted({one.about.environment for one in snapshots.values()})
    ours = set(played) <= ENVIRONMENTS.keys()
    text = templates.get_template("data_card.md").render(rows=rows, format=snapshot.FORMAT, played=played, ours=ours)
    with atomic_write(folder / FILE) as file:
        file.write(text)
