"""What is wrong with an iteration's numbers: warnings, and the end of a run that has nothing to learn from, or whose updates
are skipped again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hgpo_jax.config import Config
from hgpo_jax.errors import RunError

FEW_PEERS = 0.02  # of the steps after the first, which a prompt group's episodes share
NEVER_WON = 10  # iterations with rewards above 0 and without a success
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.5, "int8": 0.5}  # by the type that is sampled with


class Alarms:
    """`check(row)` looks at each iteration once, in their order.

    earlier: rows of the iterations before a resumption.
    """

    def __init__(self, config: Config, earlier: Sequence[dict] = ()):
        policy = config.policy
        dtype = policy.compute_dtype if policy.sample_dtype == "compute_dtype" else policy.sample_dtype
        limit = config.log.max_logp_difference or LARGEST_DIFFERENCE[dtype]
        self._limits: dict[str, tuple[str, Callable[[float], float], float]] = {
            "ratio": ("max_ratio", lambda x: max(x, 1 / x) if x else 1.0, config.log.max_ratio),
            "approx_kl": ("max_approx_kl", abs, config.log.max_approx_kl),
            "logp_difference": ("max_logp_difference", abs, limit),
        }
        self._most, self._in_a_row = config.learner.max_nonfinite, 0
        self._said: set[str] = set()
        self._won, self._rewarded = False, 0  # whether an episode was ever a success, iterations in which some had rewards
        for row in earlier:
            self._count(row)

    def _count(self, row: dict) -> None:
        self._in_a_row = self._in_a_row + 1 if row.get("nonfinite_steps") else 0
        self._won |= row.get("success", 1) is None or not row.get("success", 1) <= 0  # where it is unknown there is no "never"
        self._rewarded += row.get("rewarded", 0) > 0

    def check(self, row: dict) -> list[str]:
        """Warnings about a row of metrics; a number that stays above its limit, and a reward function that goes on failing, are
        reported once.

        Raises:
          RunError: no episode had a turn, or `learner.max_nonfinite` iterations in a row had an update that was skipped.
        """
        self._count(row)
        begin, found, failed = f"iteration {row['iteration'] + 1}", [], row.get("reward/failed", 0)
        if not row["steps"]:
            raise RunError(f"{begin}: the reward function gave no finite numbers in any of its {failed:.0f} episodes")
        if self._in_a_row:
            found.append(
                f"{begin}: {row['nonfinite_steps']:.0f} updates had a non-finite loss or "
                f"gradient and were skipped; the batch is in episodes/nonfinite-{row['iteration']:05d}.npz"
            )
        wrong = {
            name: f"{name} is {row[name]:.4g}, its limit is log.{field}={limit:g}"
            for name, (field, size, limit) in self._limits.items()
            if name in row and not size(row[name]) <= limit  # NaN is above
        }
        if failed:
            wrong["reward/failed"] = f"the reward function failed in {failed:.0f} episodes, which are left out"
        wrong |= self._about_the_environment(row)
        found += [f"{begin}: {why}" for name, why in wrong.items() if name not in self._said]
        self._said = set(wrong)
        if self._in_a_row >= self._most:
            raise RunError(
                f"{found[0]}; the run stops after learner.max_nonfinite={self._most} such iterations in a row, lower learner.lr"
            )
        return found

    def _about_the_environment(self, row: dict) -> dict[str, str]:
        """What `python -m hgpo_jax.check` finds in an environment, too."""
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
        first = 1 / max(row.get("turns", 1), 1)
        if (peers := row.get("peers/level0")) is not None and first < 1:
            later = max(peers - first, 0) / (1 - first)
            if later < FEW_PEERS:
                wrong["peers"] = (
                    f"only {later:.1%} of the steps after the first have a peer, one with an equal observation in their prompt "
                    "group; where observations hold a step counter or a clock, give env.state_key or advantage.similarity"
                )
        return wrong
