"""Search for three, as in Dr. MAS (Feng et al., 2026, arXiv 2602.08847): who acts next is decided by a verifier.

    env = GeneratedTeam.open("runs/cache/search")
    env.reset(7)                                             # the verifier's turn
    env.step("<verify>no</verify>")                          # the searcher's
    env.step("<search> nomor leholm</search>")               # the verifier's again
    env.step("<verify>yes</verify>")                         # the answerer's
    env.step("<answer> fenwick dunstead</answer>")

The verifier says whether what has been found is enough for an answer. Yes calls the answerer, whose answer ends the episode;
no calls the searcher. After ROUNDS searches the answerer acts at once. An observation begins with the role that it is for and
shows all passages found once, those of the newest search first, the best in front: so a role need not look for what has just
been asked for (sorted, a small policy learned nothing). Episodes with the same searches, in the same order, share their states.
"""

from __future__ import annotations

from hgpo_jax.envs.search.files import FileSearch
from hgpo_jax.envs.search.scores import normalize
from hgpo_jax.envs.search.text import BEGINNING, END, GeneratedSearch, SearchText, parse

VERIFIER, SEARCHER, ANSWERER = range(3)
ROUNDS = 3  # searches, after the last of which the answerer acts
VERBS = ("verify", "search", "answer")  # of each role
VERDICTS = ("yes", "no")
HOW = ("<verify>yes</verify> or <verify>no</verify>", "one <search>query</search>", "one <answer>text</answer>")
UNKNOWN = "unknown"  # what the scripted answerer says before the answer can be read


class _Team(SearchText):
    """The turns of all roles.

    Attributes:
      role: whose turn the next one is, an index into roles.
      signals: those of `SearchText`, of which the first two are the answerer's; `verdict`, the verifier's, -1 for a wrong one
        and else 0, as for both where yes or no is the answer; and `search`, the searcher's, -1 for one that finds nothing new
        and else 0.

    A response without the action of its role leaves the turn with that role. Commands are the verdicts, and else none.
    """

    roles = ("verifier", "searcher", "answerer")
    signals = (*SearchText.signals, "verdict", "search")

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts a task; returns the verifier's observation and the verdicts."""
        super().reset(task)
        self.role, self._rounds = VERIFIER, 0
        return self._tell(""), self._commands()

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Performs a turn of the role that acts next; returns (observation, commands, reward, done, info) as `SearchText`."""
        verb, text, alone = parse(action, (VERBS[self.role],))
        if verb == "verify" and text not in VERDICTS:
            verb, alone = "", False
        signals = dict.fromkeys(self.signals, 0.0) | {"format": float(alone)}
        message = ""
        if not verb:
            message = f"Error: write {HOW[self.role]}."
        elif verb == "verify":
            signals["verdict"] = float(self._enough() in (text == "yes", None)) - 1
            self.role = ANSWERER if text == "yes" else SEARCHER
        elif verb == "search":
            known = set(self._passages)
            signals["search"] = float(not known.issuperset(self._search(text))) - 1
            self._rounds += 1
            self.role = ANSWERER if self._rounds == ROUNDS else VERIFIER
        else:
            message = END
            signals |= self._scores(text)
        reward, done, info = self._outcome(verb, signals)
        return self._tell(message), self._commands(), reward, done, info

    def _enough(self) -> bool | None:
        """Says whether the answer can be read in the passages found; None: yes or no is answered, which none says."""
        if all(normalize(answer) in VERDICTS for answer in self._question.answers):
            return None
        read = [f" {normalize(passage)} " for passage in self._passages]
        return any(f" {normalize(answer)} " in passage for answer in self._question.answers for passage in read)

    def _tell(self, message: str) -> str:
        known = [f"({number}) {passage}" for number, passage in enumerate(dict.fromkeys(self._passages), 1)] or [BEGINNING]
        return "\n".join(filter(None, [f"You are the {self.roles[self.role]}.", *known, message]))

    def _commands(self) -> list[str]:
        return [f"<verify>{verdict}</verify>" for verdict in VERDICTS] if self.role == VERIFIER else []


class GeneratedTeam(_Team, GeneratedSearch):
    """Questions about a generated world for three; arguments are those of `GeneratedSearch`."""

    def expert(self, history_length: int) -> str:
        """Returns the right verdict, a search for what is missing or else for the last passage again, or the answer if read."""
        missing = self._missing()
        if self.role == VERIFIER:
            return f"<verify>{'no' if missing else 'yes'}</verify>"
        if self.role == SEARCHER:
            return f"<search> {missing or self._question.chain[-1]}</search>"
        return f"<answer> {UNKNOWN if missing else self._question.answers[0]}</answer>"

    def _enough(self) -> bool:
        return not self._missing()


class FileTeam(_Team, FileSearch):
    """Questions of a file for three; arguments are those of `FileSearch`."""
