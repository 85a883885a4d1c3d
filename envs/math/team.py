"""Mathematics for two: a solver that calculates and proposes an answer, and a verifier that accepts it or sends it back.

    env = GeneratedTeam(Problems())
    env.reset(0)                                             # the solver's turn
    env.step("<answer>57</answer>")                          # the verifier's
    env.step("<verdict>reject</verdict>")                    # the solver's again

The solver has its turns until it proposes; an accepted answer, or the last of ROUNDS, ends the episode. Whenever an episode
ends, the solver's last proposal decides the reward, which both share. An observation begins with the role that it is for; both
see all that has been calculated, the verifier the proposal, the solver what has been sent back.
"""

from __future__ import annotations

import re

from hgpo_jax.envs.math.answers import LENGTH, is_right
from hgpo_jax.envs.math.text import NO_ACTION, NOTHING, REWARD, GeneratedMath, ListedMath, MathText, read_action

SOLVER, VERIFIER = range(2)
ROUNDS = 3  # proposals, after the last of which an episode ends whatever the verdict
VERDICTS = ("accept", "reject")
NO_VERDICT = "Error: write <verdict>accept</verdict> or <verdict>reject</verdict>."
NO_ANSWER = f"Error: an answer has 1 to {LENGTH} characters."


class _Team(MathText):
    """The turns of both roles.

    Attributes:
      role: whose turn the next one is, an index into roles.
      signals: those of `MathText`, and `verdict`, which is -1 for a verdict that is wrong and else 0.

    Commands are no complete list: answers that the numbers at hand suggest, and the verdicts. The warm start's play takes some
    of them at random, so that proposals to be sent back occur.
    """

    roles = ("solver", "verifier")
    signals = (*MathText.signals, "verdict")

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts a problem; returns the solver's observation and some commands."""
        super().reset(task)
        self.role, self._proposal, self._right = SOLVER, "", False
        self._rejected: list[str] = []
        return self._tell(""), self._commands()

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Performs a turn of the role that acts next; returns (observation, commands, reward, done, info)."""
        self._turn += 1
        signals, message, ended = self._solve(action) if self.role == SOLVER else self._judge(action)
        done = ended or self._turn >= self.max_turns
        won = done and self._right
        if done:
            message = "Right." if won else "Wrong."
        sensible = not any(signals[name] for name in MathText.signals)
        info = {"won": won, "admissible": sensible, "truncated": done and not ended, "signals": signals}
        return self._tell(message), self._commands(), REWARD * won, done, info

    def _solve(self, action: str) -> tuple[dict[str, float], str, bool]:
        """Performs the solver's turn; returns (signals, an error or "", whether the episode has ended)."""
        name, content, well_formed = read_action(action)
        message, sensible = NO_ACTION, True
        if name == "calculate":
            message, sensible = self._calculate(content)
        elif name == "answer" and 0 < len(content) <= LENGTH:
            message, self.role, self._proposal = "", VERIFIER, " ".join(content.split())
            self._right = is_right(content, self._current.answer, self._latex)
        elif name == "answer":
            message, well_formed = NO_ANSWER, False
        return {"format": float(well_formed) - 1, "calculation": float(sensible) - 1, "verdict": 0.0}, message, False

    def _judge(self, action: str) -> tuple[dict[str, float], str, bool]:
        """Performs the verifier's turn; returns as `_solve`."""
        name, content, well_formed = read_action(action, ("verdict",))
        if not name or content not in VERDICTS:
            return {"format": -1.0, "calculation": 0.0, "verdict": 0.0}, NO_VERDICT, False
        accepts = content == "accept"
        if not accepts:
            self.role = SOLVER
            self._rejected.append(self._proposal)
        signals = {"format": float(well_formed) - 1, "calculation": 0.0, "verdict": float(accepts == self._right) - 1}
        return signals, "", accepts or len(self._rejected) == ROUNDS

    def _tell(self, message: str) -> str:
        said = [f"The solver answers {self._proposal}."]
        if self.role == SOLVER:
            said = [f"The verifier sends back {answer}." for answer in sorted(set(self._rejected))]
        lines = [f"You are the {self.roles[self.role]}.", *(self._known() or [NOTHING]), *said, message]
        return "\n".join(filter(None, lines))

    def _commands(self) -> list[str]:
        if self.role == VERIFIER:
            return [f"<verdict>{verdict}</verdict>" for verdict in VERDICTS]
        numbers = {*re.findall(r"\d+", self.goal), *self._values.values()}
        return [f"<answer>{number}</answer>" for number in sorted(numbers)]


class GeneratedTeam(_Team, GeneratedMath):
    """Generated problems for two; arguments are those of `GeneratedMath`."""

    def expert(self, history_length: int) -> str:
        """Returns the solver's next call or its right answer, or the right verdict."""
        if self.role == VERIFIER:
            return f"<verdict>{VERDICTS[not self._right]}</verdict>"
        return super().expert(history_length)


class ListedTeam(_Team, ListedMath):
    """Problems of a list for two; arguments are those of `ListedMath`."""
