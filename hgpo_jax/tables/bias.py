"""Quality of estimators in a setting, measured once: against the Oracle groups, and against true advantages.

The policy is the setting's warm start, where training begins. For the Oracle groups it plays TASKS tasks EPISODES times each;
these groups see all of a task's episodes, the estimators see them eight at a time as in training. Oracle groups compare Monte
Carlo returns, and so favour estimators that do so, too; true advantages, of the episodes of one iteration, favour none
(`hgpo_jax/analysis/diagnostics.py`, `hgpo_jax/analysis/true_advantages.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax import config as configuration
from hgpo_jax.advantages import parameters
from hgpo_jax.analysis import diagnostics, oracle_errors
from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.analysis.true_advantages import Truth, true_advantages
from hgpo_jax.config import Config
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.job import Job, build
from hgpo_jax.tables.plan import Plan
from hgpo_jax.tables.results import PLACES, changed_fields
from hgpo_jax.trainer.behavior_cloning import warm_start
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write

FILE = "bias.json"
TASKS, EPISODES = 16, 64
LEVELS = (0, 1, 2, 4)
PARTS = ("bias2", "variance")
CONTINUATIONS = 64  # for each true advantage, from each state
AS_RELEASED = {"alpha": 1.0, "weight_offset": 2.0, "base_group": False}  # HGPO's options, whatever the run's are
# Estimators compared with Monte Carlo advantages, in runs too: shown name -> options of `Dump.estimate`.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "GRPO": {"name": "grpo"},
    "GiGPO": {"name": "gigpo"},
    **{f"HGPO K = {k}": {"name": "hgpo", "history_length": k} | AS_RELEASED for k in (0, 2, 4)},
    "EB-GAE": {"name": "eb_gae", "history_length": 2, "lam": 0.65},
    "EB-TD": {"name": "eb_td", "history_length": 2, "lam": 0.35},
}
AT_START = ESTIMATORS | {"ECPO": {"name": "ecpo"}}


def measure(config: Config) -> dict:
    """Measures bias and variance of HGPO with K = 0, 1, 2, 4 against Oracle groups, as shares of the returns' variance.

    Returns: success of the policy; turns; return_variance over the steps that have an Oracle peer, and their number; peers,
    the share of steps with a peer at each level among all EPISODES of a task, more than training has; bias2, variance, mse:
    K -> number; oracle: mse of each of AT_START; truth: see `against_truth`.
    """
    job = build(config)
    params = warm_start(job)
    rollout = config.rollout.model_copy(update={"prompt_groups": TASKS, "group_size": EPISODES})
    wide = build(config.model_copy(update={"rollout": rollout}), job.mesh)
    groups = jnp.arange(wide.batch, dtype=jnp.int32) // EPISODES
    tasks = wide.runner.select_tasks("held_out", config.seed + 1, groups)
    keys = jax.random.split(jax.random.key(config.seed), wide.batch)
    decoding = Decoding(temperature=config.rollout.temperature)
    e = jax.device_get(wide.runner.rollout(params, tasks, keys, groups, decoding).episodes)
    dump = Dump(e, wide.config, job.tokenizer)
    levels = {str(k): {"name": "hgpo", "history_length": k} for k in LEVELS}
    errors = oracle_errors(dump, levels, group_size=config.rollout.group_size)
    others = oracle_errors(dump, AT_START, group_size=config.rollout.group_size)
    record = dump.estimate("hgpo", history_length=max(LEVELS))
    counted = diagnostics.oracle_sizes(diagnostics.oracle_groups(e.states, e.mask, e.groups))[..., 0] > 1
    spread = float(np.var(record.returns[counted])) or np.nan  # nan: there is nothing to be biased about
    return {
        "success": float(e.success.mean()),
        "turns": float(e.mask.sum(1).mean()),
        "steps": int(counted.sum()),
        "return_variance": spread,
        "peers": [float(share) for share in diagnostics.peer_share(record.by_level()[1], e.mask)],
        "bias2": {k: error["bias"] ** 2 / spread for k, error in errors.items()},
        "variance": {k: error["variance"] / spread for k, error in errors.items()},
        "mse": {k: error["mse"] / spread for k, error in errors.items()},
        "oracle": {name: error["mse"] / spread for name, error in others.items()},
        "truth": against_truth(job, params),
    }


def against_truth(job: Job, params) -> dict[str, dict[str, float]]:
    """Returns the `errors` of each of AT_START in the steps of the first iteration."""
    tasks, *inputs = job.episode_inputs(0)
    params = job.base_rollout_params(params)
    e = jax.device_get(job.runner.rollout(params, tasks, *inputs).episodes)
    truth = true_advantages(job, params, tasks, e, continuations=CONTINUATIONS, seed=job.config.seed)
    return errors(centred(Dump(e, job.config, job.tokenizer), AT_START), truth, e.mask)


def centred(dump: Dump, estimators: dict[str, dict[str, Any]] = ESTIMATORS) -> dict[str, np.ndarray]:
    """Computes advantages f32[B, T] by each estimator, in the unit of the rewards and without penalties, like true ones."""
    found = {}
    for shown, options in estimators.items():
        unit = {"normalize": "mean"} if "normalize" in parameters(options["name"])[1] else {}
        found[shown] = np.asarray(dump.estimate(**options | unit, invalid_penalty=0.0).advantages)
    return found


def errors(advantages: dict[str, np.ndarray], truth: Truth, mask) -> dict[str, dict[str, float]]:
    """Returns shown name -> mse, as a share of the true advantages' mean square, and cosine to them; nan if these are all 0."""
    found = {}
    for shown, estimated in advantages.items():
        error = diagnostics.against_truth(estimated, truth.advantages, truth.standard_error, mask)
        spread = error["spread"] if error["spread"] > 0 else np.nan
        found[shown] = {"mse": error["mse"] / spread, "cosine": error["cosine"]}
    return found


def read_bias(runs: Path) -> dict[str, list[dict]]:
    """Reads RUNS/bias.json: setting -> a `measure` with its seed and fields for each measurement. Raises ConfigError."""
    file = runs / FILE
    try:
        return checked(json.loads(file.read_text())) if file.is_file() else {}
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is damaged; delete it and measure again with `tables bias`") from None


def checked(found: Any) -> dict[str, list[dict]]:
    """Returns the argument if it holds everything that tables show. Raises ValueError."""
    try:
        for measured in found.values():
            for m in measured:
                numbers = [m["seed"], m["success"], *m["peers"][:3], *(m[part][str(k)] for part in PARTS for k in LEVELS)]
                numbers += [m["truth"][name][what] for name in ESTIMATORS for what in ("cosine", "mse")]
                numbers += [x for held in (*m["truth"].values(), m["oracle"]) for x in held.values()]
                fields = [str(field).partition("=")[1] for field in m["fields"]]
                if len(m["peers"]) < 3 or not all(fields) or not all(isinstance(x, int | float) for x in numbers):
                    raise ValueError("numbers are missing")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not measured: {error}") from None
    return found


def measure_all(plan: Plan, runs: Path, more: list[str]) -> None:
    """Measures each setting with plan.bias_seeds, writes RUNS/bias.json, setting -> a list of `measure`, and prints it."""
    found = read_bias(runs)
    if not plan.bias_seeds:
        raise ConfigError("bias_seeds: the plan has none; give the seeds to measure under, as in bias_seeds: [100]")
    for field in more:
        if not field.startswith(("data=", *PLACES)):
            raise ConfigError(f"{field}: would measure other settings than the plan's; write it into a plan of your own")
    runs.mkdir(parents=True, exist_ok=True)
    for name, setting in plan.settings.items():
        for seed in plan.bias_seeds if setting.config else ():
            if seed not in [m["seed"] for m in of_plan(plan, name, found)]:
                fields = [*plan.fields, *setting.fields]
                config = configuration.load(setting.config, [*fields, *more, f"seed={seed}"])
                measured = {"seed": seed, "fields": fields} | measure(config)
                found = read_bias(runs)  # another process may have added some
                found[name] = [*(m for m in found.get(name, []) if m["seed"] != seed), measured]
                with atomic_write(runs / FILE) as file:
                    file.write(json.dumps(found, indent=1) + "\n")
    print("\n".join([*bias_table(plan, found), "", *truth_table(plan, found)]))


def of_plan(plan: Plan, setting: str, bias: dict) -> list[dict]:
    """Returns the measurements of a setting with the plan's current fields and its bias_seeds."""
    fields = [*plan.fields, *plan.settings[setting].fields]
    return [m for m in bias.get(setting, []) if m["seed"] in plan.bias_seeds and not changed_fields(m["fields"], fields)]


def bias_table(plan: Plan, bias: dict, gain: str = "", gains: dict[str, str] | None = None) -> list[str]:
    """Formats squared bias and variance of each K, as shares of the returns' variance; means over plan.bias_seeds.

    gain, gains: the title of one more column, and its text by setting.
    """
    heads = [f"K = {k}: bias² + variance" for k in LEVELS]
    heads = ["setting", "seeds", "success", f"peers among {EPISODES} episodes at level 0, 1, 2", *heads, *filter(None, [gain])]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for setting in plan.settings:
        measured = of_plan(plan, setting, bias)
        if not measured:
            continue
        peers = np.mean([m["peers"][:3] for m in measured], axis=0)
        errors = [[np.mean([m[part][str(k)] for m in measured]) for part in PARTS] for k in LEVELS]
        line = [
            plan.settings[setting].title,
            ", ".join(str(m["seed"]) for m in measured),
            f"{np.mean([m['success'] for m in measured]):.0%}",
            ", ".join(f"{share:.2f}" for share in peers),
            *(f"{squared:.3f} + {variance:.3f}" for squared, variance in errors),
            *([(gains or {}).get(setting, "not run")] if gain else []),
        ]
        lines.append("| " + " | ".join(line) + " |")
    return lines


def truth_table(plan: Plan, bias: dict) -> list[str]:
    """Formats two lines for each setting: cosine of each estimator's advantages to true ones and the mean square of the
    difference (`against_truth`), then the mean square of the difference to Oracle groups."""
    lines = ["| " + " | ".join(["setting", "held to", *AT_START]) + " |", "|---" * (2 + len(AT_START)) + "|"]
    for setting in plan.settings:
        if measured := of_plan(plan, setting, bias):
            true, oracle = [], []
            for name in AT_START:  # some may have been added after others were measured
                held = [m["truth"][name] for m in measured if name in m["truth"]]
                true.append(", ".join(_mean([one[what] for one in held]) for what in ("cosine", "mse")) if held else "-")
                oracle.append(_mean([m["oracle"][name] for m in measured if name in m["oracle"]]))
            for held_to, cells in (("true advantages", true), ("Oracle groups", oracle)):
                lines.append("| " + " | ".join([plan.settings[setting].title, held_to, *cells]) + " |")
    return lines


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.2f}" if values else "-"
