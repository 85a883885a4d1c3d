"""Warnings about the metrics of an iteration, and the reasons to end a run: it has nothing to learn from, or its updates
are skipped again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from hgpo_jax import advantages
from hgpo_jax.config import Config
from hgpo_jax.learner.methods import AVAILABLE_ARRAYS, estimate_episodes, method_named, unusable
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.utils.errors import RunError

FEW_PEERS = 0.02  # of the steps after the first step, which all episodes of a prompt group share
NEVER_WON = 10  # iterations without a success
MANY_CUT = 0.05  # of the prompts
MANY_FAILED = 0.1  # of the episodes; of those of programs, by one cause
MANY_WRONG = 0.5  # of the answers of text environments
LARGEST_RATIO = 1.2  # of the mean importance ratio of an iteration, or of its inverse
LARGEST_KL = 0.1  # how far an update moves the policy, nats per token
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.5}  # between sampler and trainer, by the dtype that products round to
MAX_NONFINITE = 3  # iterations in a row with a non-finite loss or gradient after which the run stops


def _rounding(config: Config) -> str:
    """Returns the dtype that products round to. Accelerators shorten float32 operands, unless jax is told not to."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = jax.default_backend() == "cpu" or precision in ("highest", "float32")
    return config.policy.compute_dtype if exact else "bfloat16"


class Alarms:
    """Warnings about a run: `check(row)` looks at the metrics of each iteration once, in order.

    earlier: rows of the iterations before a resumption.
    """

    def __init__(self, config: Config, earlier: Sequence[dict] = ()):
        self._limits: dict[str, tuple[Callable[[float], float], float]] = {
            "ratio": (lambda x: max(x, 1 / x) if x else 1.0, LARGEST_RATIO),
            "approx_kl": (abs, LARGEST_KL),
            "logp_difference": (abs, LARGEST_DIFFERENCE[_rounding(config)]),
        }
        self._in_a_row = 0
        self._config, self._masks = config, config.learner.unfinished == "mask"
        self._active: set[str] = set()
        self._won, self._rewarded, self._seen = False, 0, 0  # was an episode ever a success; iterations rewarded, and all
        for row in earlier:
            self._count(row)

    def _count(self, row: dict) -> None:
        self._in_a_row = self._in_a_row + 1 if row.get("nonfinite_steps") else 0
        self._won |= row.get("success", 1) is None or not row.get("success", 1) <= 0  # an unknown success rules out "never"
        self._rewarded += row.get("rewarded", 0) > 0
        self._seen += 1

    def check(self, row: dict, episodes: Episodes | None = None) -> list[str]:
        """Returns warnings about a row of metrics; a warning is not repeated while its cause lasts.

        episodes: those of the iteration; if the update was skipped, they show whether its advantages were to blame.

        Raises:
          RunError: no episode had a turn, or `MAX_NONFINITE` iterations in a row had an update that was skipped.
        """
        self._count(row)
        begin, warnings = f"iteration {row['iteration'] + 1}", []
        if not row["steps"]:
            failed = row.get("reward/failed", 0)
            raise RunError(f"{begin}: the reward function gave no finite numbers in any of its {failed:.0f} episodes")
        blame = "lower learner.lr"
        if self._in_a_row:
            why = "had a non-finite loss or gradient and"
            fault, mend = ("", "") if episodes is None else estimator_fault(self._config, episodes)
            if fault:
                blame, why = mend, f"were given {fault}, and"
            warnings.append(
                f"{begin}: {row['nonfinite_steps']:.0f} updates {why} "
                f"were skipped; the batch is in episodes/nonfinite-{row['iteration']:05d}.npz"
            )
        wrong = self._about_the_update(row) | self._about_the_answers(row) | self._about_the_environment(row)
        warnings += [f"{begin}: {why}" for name, why in wrong.items() if name not in self._active]
        self._active = set(wrong)
        if self._in_a_row >= MAX_NONFINITE:
            raise RunError(f"{warnings[0]}; the run stops after {MAX_NONFINITE} such iterations in a row; {blame}")
        return warnings

    def _about_the_update(self, row: dict) -> dict[str, str]:
        """Finds metrics beyond their limits, and iterations in which nothing is learned."""
        wrong = {
            name: f"{name} is {row[name]:.4g}, its limit is {limit:g}" + "; lower learner.lr" * (name == "approx_kl")
            for name, (size, limit) in self._limits.items()
            if name in row and not size(row[name]) <= limit  # true for NaN
        }
        if row.get("staleness"):  # two policies differ by more than the rounding that is looked for
            wrong.pop("logp_difference", None)
        if self._masks and row["unfinished_share"] == 1:
            wrong["unfinished_share"] = (
                "every answer was cut at its limit, and with learner.unfinished=mask nothing is learned; raise "
                "rollout.response_limit, or give learner.unfinished=train"
            )
        if row.get("kept_share") == 0:
            wrong["kept_share"] = (
                f"method={self._config.method} with advantage.keep={self._config.advantage.keep} kept no step, and nothing is "
                "learned; see that the episodes of a task differ in their scores and have valid actions"
            )
        if row.get("kept_groups") == 0:
            wrong["kept_groups"] = (
                f"method={self._config.method} learns from tasks whose episodes differ in success, and none of "
                f"{row['rollouts']:.0f} rollouts had one, so nothing is learned; give tasks that the policy sometimes wins"
            )
        return wrong

    def _about_the_answers(self, row: dict) -> dict[str, str]:
        """Finds answers and prompts that were cut or not understood, and episodes that failed, where there are many."""
        wrong = {}
        for name, what in (
            ("unfinished", "were cut at rollout.response_limit; raise it, or give rollout.thinking=false if they are thoughts"),
            ("malformed", "had not the form that the template asks for; see them in the report of the run"),
        ):
            if (count := row.get(name, 0)) > MANY_WRONG * row["steps"]:
                wrong[name] = f"{count:.0f} of {row['steps']:.0f} answers {what}"
        if (cut := row.get("prompts_cut", 0)) > MANY_CUT * row["steps"]:
            wrong["prompts_cut"] = (
                f"{cut:.0f} of {row['steps']:.0f} prompts were longer than rollout.prompt_limit without history, too, and "
                "lost the middle of their observation; raise it"
            )
        for name in (name for name in row if name.startswith("failed/") and row[name] > MANY_FAILED):
            cause = name.removeprefix("failed/").replace("_", " ")
            wrong[name] = f"{row[name]:.0%} of the episodes failed, by {cause}; the log says how the first one did"
        batch = self._config.rollout.prompt_groups * self._config.rollout.group_size * int(row.get("rollouts", 1))
        if (excluded := row.get("excluded", 0)) > MANY_FAILED * batch:
            wrong["excluded"] = (
                f"{excluded:.0f} of {batch} episodes failed and are left out, so that only the others are learned from; "
                "the log says how they failed"
            )
        if failed := row.get("reward/failed"):
            wrong["reward/failed"] = f"the reward function failed in {failed:.0f} episodes, which are left out"
        return wrong

    def _about_the_environment(self, row: dict) -> dict[str, str]:
        """Finds the faults of an environment that `python -m hgpo_jax.check` finds as well."""
        wrong = {}
        if row.get("won_unrewarded", 0) == 1:
            wrong["won_unrewarded"] = (
                "every episode that is a success has rewards of 0 or less in total; see that the environment's rewards and "
                "what it calls a success (won) agree"
            )
        if not self._won and self._rewarded >= NEVER_WON:
            wrong["never won"] = (
                f"in {self._rewarded} iterations episodes had rewards above 0 in total, and none was ever a success; that is "
                "what the environment says (won), not a reward: see that it says it"
            )
        elif not self._won and not self._rewarded and self._seen >= NEVER_WON:
            wrong["never won"] = (
                f"in {self._seen} iterations no episode was a success or had rewards above 0 in total, so that nothing is "
                "learned but to avoid penalties; give easier tasks, a warm start or a better policy"
            )
        first = 1 / max(row.get("turns", 1), 1)
        if (peers := row.get("peers/level0")) is not None and first < 1 and row.get("kept_share") != 0:
            later = max(peers - first, 0) / (1 - first)
            if later < FEW_PEERS:
                wrong["peers"] = (
                    f"only {later:.1%} of the steps after the first have a peer, one with an equal observation in their prompt "
                    "group; where observations hold a step counter or a clock, give env.state_key or advantage.similarity"
                )
        return wrong


def estimator_fault(config: Config, e: Episodes) -> tuple[str, str]:
    """Describes the fault in the advantages of an iteration's episodes, or in what they are made of, and says what to mend.

    Both are "" if there is none or if they need a critic.
    """
    name = method_named(config.method).estimator
    further, _ = advantages.parameters(name)
    if not AVAILABLE_ARRAYS.keys() >= set(further):
        return "", ""
    e = jax.device_get(e)
    try:
        record = estimate_episodes(config, e, name)
    except ValueError as error:  # the fault is already in the rewards or the signals
        source = f" or reward.source={config.reward.source}" if config.reward.source else ""
        return str(error), f"mend what env.name={config.env.name}{source} returns"
    fault = unusable(record.advantages, e.mask)
    return (f"advantages by method={config.method} that were {fault}", f"mend method={config.method}") if fault else ("", "")
