"""Why runs of a plan went as they did: estimators, and parts of HGPO, against true advantages of the runs' own iterations.

What a run did next after so many iterations is played again from its checkpoint, with the true advantage of every step
(`hgpo_jax/true_advantages.py`). `PARTS` change one thing in HGPO each; the last is the best that a baseline can do for returns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.advantages.returns import generalized_advantages
from hgpo_jax.errors import ConfigError
from hgpo_jax.files import atomic_write
from hgpo_jax.inspect.dumps import Dump, read_config
from hgpo_jax.iteration import make_learn
from hgpo_jax.job import build
from hgpo_jax.run.checkpoint import Checkpoints
from hgpo_jax.run.folder import has_ended
from hgpo_jax.tables.bias import AS_RELEASED, CONTINUATIONS, ESTIMATORS, centred, errors
from hgpo_jax.tables.plan import Plan, cells
from hgpo_jax.training import starting_params
from hgpo_jax.true_advantages import true_advantages

FILE = "truth.json"
K, LAMBDA = 2, 0.35  # of HGPO, and of what is bootstrapped, as EB-TD does
PARTS = (
    "HGPO, penalties in its returns",
    "HGPO, weights times peers",
    "HGPO, no level dropped",
    "HGPO, bootstrapped",
    "return - true value",
)


class Measured(NamedTuple):
    """Of one cell: iterations done before; success and invalid, shares of the episodes and of the steps; `bias.errors`."""

    cell: str
    iteration: int
    success: float
    invalid: float
    errors: dict[str, dict[str, float]]


def parts(dump: Dump, values: np.ndarray) -> dict[str, np.ndarray]:
    """Advantages f32[B, T] of PARTS, centred as `bias.centred`.

    values: f64[B, T], the true value of each step's state. With noise of their own, apart from that of the truth that the
    advantages are held to, they make `return - true value` look a little worse than it is.
    """
    e, options = dump.episodes, AS_RELEASED | {"history_length": K, "normalize": "mean", "invalid_penalty": 0.0}
    record = dump.estimate("hgpo", **options)
    apart, sizes, _ = map(np.asarray, record.by_level())
    weights = np.where(sizes > 0, np.arange(K + 1) + 2.0, 0.0)

    def mean(weights):
        total = weights.sum(-1)
        return (weights * apart).sum(-1) / np.where(total > 0, total, 1)

    baseline = np.where(e.mask, record.returns - record.advantages, 0)
    penalized = options | {"invalid_penalty": dump.config.advantage.invalid_penalty}
    bootstrapped = generalized_advantages(
        jnp.asarray(e.rewards), jnp.asarray(baseline), jnp.asarray(e.mask), dump.config.advantage.gamma, LAMBDA
    )
    found = (
        np.asarray(dump.estimate("hgpo", **penalized).advantages),
        mean(weights * np.maximum(sizes - 1, 0)),
        mean(weights),
        np.asarray(bootstrapped),
        np.where(e.mask, record.returns - values, 0),
    )
    return dict(zip(PARTS, found, strict=True))


def measure(cell: str, folder: Path, iteration: int) -> Measured:
    """A run's iteration, played again from its checkpoint, or from its start."""
    config = read_config(folder)
    job = build(config)
    start = starting_params(job, folder)
    _, init = make_learn(job)
    state = init(start)
    if iteration:
        checkpoints = Checkpoints(folder / "checkpoints", config.log)
        state = checkpoints.restore(iteration, state)
        checkpoints.close()
    params = job.rollout_params(state["params"], job.reference_copy(start))
    tasks, *inputs = job.episode_inputs(iteration)
    e = jax.device_get(job.runner.rollout(params, tasks, *inputs).episodes)
    truth, other = (
        true_advantages(job, params, tasks, e, continuations=CONTINUATIONS, seed=2 * config.seed + i) for i in range(2)
    )
    dump = Dump(e, config, job.policy.tokenizer, iteration=iteration)
    found = errors(centred(dump) | parts(dump, other.values), truth, e.mask)
    return Measured(cell, iteration, float(np.mean(e.success)), float(np.mean(np.asarray(e.invalid)[e.mask])), found)


def read_truth(runs: Path) -> list[Measured]:
    """RUNS/truth.json. Raises ConfigError."""
    file = runs / FILE
    try:
        return parse(json.loads(file.read_text())) if file.is_file() else []
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is damaged; delete it and measure again with `tables truth`") from None


def parse(kept: list[dict]) -> list[Measured]:
    """What JSON kept. Raises ValueError where something is missing."""
    try:
        found = [Measured(**one) for one in kept]
        for one in found:
            numbers = [one.iteration, one.success, one.invalid]
            numbers += [one.errors[name][what] for name in (*ESTIMATORS, *PARTS) for what in ("cosine", "mse")]
            if not isinstance(one.cell, str) or not all(isinstance(x, int | float) for x in numbers):
                raise ValueError("numbers are missing")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not measured: {error}") from None
    return found


def of_plan(plan: Plan, found: list[Measured]) -> list[Measured]:
    """What was measured of cells that the plan has; it may have lost some since."""
    names = {cell.name for cell in cells(plan)}
    return [one for one in found if one.cell in names]


def read_record(plan: Plan, file: Path) -> list[Measured]:
    """What `collect` kept of it in NAME.json. Raises ConfigError."""
    try:
        return of_plan(plan, parse(json.loads(file.read_text()).get("truth", [])))
    except ValueError:
        raise ConfigError(f"{file}: is not a record of runs; give the .json that `collect` wrote") from None


def measure_all(plan: Plan, runs: Path, names: list[str], iteration: int) -> None:
    """Measures each of the cells and adds it to RUNS/truth.json, where it is not yet; prints the table. Raises ConfigError."""
    known, found = {cell.name for cell in cells(plan)}, read_truth(runs)
    for name in names:
        if name not in known:
            raise ConfigError(f"{name}: no such cell; `tables plan` lists them, as {min(known)}")
        refuse(runs / name, iteration)
    for name in names:
        if (name, iteration) not in [(one.cell, one.iteration) for one in found]:
            found.append(measure(name, runs / name, iteration))
            with atomic_write(runs / FILE) as file:
                file.write(json.dumps([one._asdict() for one in found], indent=1) + "\n")
    print("\n".join(in_runs(of_plan(plan, found))))


def refuse(folder: Path, iteration: int) -> None:
    """Raises ConfigError where an iteration of a run cannot be measured."""
    if not (folder / "config.yaml").is_file() or not has_ended(folder, (config := read_config(folder)).iterations):
        raise ConfigError(f"{folder}: the run has not ended; `tables run` ends it")
    if not config.in_words:
        raise ConfigError(f"{folder}: env.name={config.env.name}: true advantages need an environment compiled with the policy")
    if iteration and not (folder / "checkpoints" / str(iteration)).is_dir():
        raise ConfigError(
            f"--at {iteration}: {folder} has no checkpoint of it; log.checkpoint_every, keep_checkpoints and keep_every say "
            "which it keeps, and 0 is its start"
        )


def by_setting(found: list[Measured]) -> dict[tuple[str, int], list[Measured]]:
    """(setting, iteration) -> what was measured there, one of each cell."""
    groups: dict[tuple[str, int], list[Measured]] = {}
    for one in found:
        groups.setdefault((one.cell.partition("/")[0], one.iteration), []).append(one)
    return groups


def in_runs(found: list[Measured]) -> list[str]:
    """Cosine and mean square error by estimator, for each setting and iteration: the mean over its runs and standard error."""
    lines: list[str] = []
    for (setting, iteration), ours in by_setting(found).items():
        runs = ", ".join(one.cell.partition("/")[2] for one in ours)
        lines += ["", f"{setting}, after {iteration} iterations: {runs}", ""]
        lines += ["| | cosine | mean square error |", "|---|---|---|"]
        for name in (*ESTIMATORS, *PARTS):
            shown = [name]
            for what in ("cosine", "mse"):
                values = np.array([one.errors[name][what] for one in ours])
                error = f" ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}" if len(values) > 1 else ""
                shown.append(f"{values.mean():.3f}{error}")
            lines.append("| " + " | ".join(shown) + " |")
    return lines[1:]
