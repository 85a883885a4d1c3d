"""Dumps of Episodes with everything needed to read them: settings, tokenizer and, for text, the report."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hgpo_jax import advantages
from hgpo_jax import config as configuration
from hgpo_jax.advantages import ESTIMATORS, Estimate
from hgpo_jax.config import Config
from hgpo_jax.config.policies import config_of, policy_of_each
from hgpo_jax.learner import methods
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.policy.tokenizer import BLANK, END, PAD
from hgpo_jax.rollout.backend import backend, role_names
from hgpo_jax.rollout.episodes import Episodes, dumped
from hgpo_jax.rollout.requirements import ONE_ROLE
from hgpo_jax.rollout.result import branch_mark, outcome_of
from hgpo_jax.rollout.rewards import signal_names
from hgpo_jax.utils import remote
from hgpo_jax.utils.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Dump:
    """Episodes and the objects that make them readable; made by `load`, or by hand from Episodes that were never on disk.

    episodes: with NumPy arrays.
    config: the run's; it sets the estimators' options unless they are overridden.
    tokenizer: the policy's; None if the folder holds none but there is a report, which lacks only the prompts.
    report: that of a host rollout (`rollout/result.py`), as a dict; None if there is none, as with dynamic sampling.
    iteration: the training iteration; -1 if there is none.
    by_role: the tokenizer of each role, if policies of roles have their own.
    """

    episodes: Episodes
    config: Config
    tokenizer: Any
    report: dict | None = None
    iteration: int = -1
    by_role: tuple[Any, ...] = ()

    # -- advantages ---------------------------------------------------------------------------------------------

    @property
    def estimator(self) -> str:
        """The estimator that the run trained with."""
        return methods.method_named(self.config.method).estimator

    @property
    def estimators(self) -> tuple[str, ...]:
        """The estimators that need only a dump; the run's own first, if it is one of them (`gae` needs values)."""
        own = self.estimator  # which makes a user's own one of ESTIMATORS
        # With one role, comparing roles is comparing everything.
        held = methods.AVAILABLE_ARRAYS.keys() - (set() if len(self.roles) > 1 else {"agents"})
        held -= {"signals"} if self.episodes.signals is None else set()
        needed = {name: set(advantages.parameters(name)[0]) for name in ESTIMATORS}
        able = [name for name in needed if held | ({"agents"} if name == own else set()) >= needed[name]]
        able = [name for name in able if name == own or methods.FIRST_SIGNAL.get(name) in (None, self._first_signal)]
        return tuple(sorted(able, key=lambda name: name != own))

    @functools.cached_property
    def _first_signal(self) -> str:
        """The name of the first signal; empty if there is none, or the environment cannot be made."""
        try:
            return next(iter(signal_names(self.config)), "")
        except Exception:  # as in `roles`
            return ""

    def estimate(self, name: str = "", **options: Any) -> Estimate:
        """Returns the record of `hgpo_jax.advantages.estimate` on these episodes, as NumPy arrays.

        name: an estimator, also one of your own by its place, as in `method=`; by default the run's own.
        options: overrides of the run's settings, or arrays that a dump does not hold.

        Raises ValueError as `estimate` does.
        """
        if name not in ESTIMATORS and ":" in name:
            methods.method_named(name)  # lists it
        record = methods.estimate_episodes(self.config, self.episodes, name or self.estimator, **options)
        return jax.tree.map(np.asarray, record)

    # -- roles --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def roles(self) -> tuple[str, ...]:
        """The names of the environment's roles; `role_0` and so on if the environment cannot be made."""
        last = int(self.episodes.agents.max(initial=0))
        if not last:
            return ONE_ROLE
        try:
            names = role_names(self.config)
        except Exception:  # a user's environment may need packages that this machine lacks
            names = ()
        return names if last < len(names) else tuple(f"role_{index}" for index in range(last + 1))

    def role(self, episode: int, turn: int) -> str:
        """Returns the role that acted in a turn; empty if there is only one role."""
        return self.roles[self.episodes.agents[episode, turn]] if len(self.roles) > 1 else ""

    def mark(self, episode: int, turn: int) -> str:
        """Returns the role that acted in a turn, or the branch that the turn belongs to; empty if there is only one."""
        report = self.report or {}
        if not report.get("branches"):
            return self.role(episode, turn)
        return branch_mark(report["branches"][episode], report["parents"][episode], turn)

    def response_with_role(self, episode: int, turn: int) -> str:
        """Returns the policy's response, after its `mark`."""
        return f"{self.mark(episode, turn)} > {self.response(episode, turn)}".lstrip()

    # -- texts --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def compiled(self) -> bool:
        """Whether observations are word ids, as in compiled rollouts, or one number that stands for a text."""
        if self.episodes.observations.shape[-1] > 1 or self.report:
            return self.episodes.observations.shape[-1] > 1
        try:
            return backend(self.config) == "compiled"
        except Exception:  # a user's environment may need packages that this machine lacks
            return False

    def turns(self, episode: int) -> int:
        """Returns the number of turns that happened."""
        return int(self.episodes.mask[episode].sum())

    def goal(self, episode: int) -> str:
        """Returns the task; empty if it is not stored apart from the prompt."""
        if self.compiled:
            return self._words(self._slots(episode, 0)[0]) if self.turns(episode) else ""
        return self.report["goals"][episode] if self.report else ""

    def observation(self, episode: int, turn: int) -> str:
        """Returns the observation before this turn; without a report the whole prompt, which contains it."""
        if self.compiled:
            return self._words(self.episodes.observations[episode, turn])
        if self.report:
            return self.report["texts"][self.episodes.observations[episode, turn, 0]]
        return self.prompt(episode, turn)

    def prompt(self, episode: int, turn: int) -> str:
        """Returns the policy's prompt; for a compiled rollout with one observation or action per line."""
        e = self.episodes
        if self.compiled:
            goal, *history, observation = self._slots(episode, turn)
            lines = [goal, *(part for part in history if part.any()), observation]
            return "\n".join([*map(self._words, lines), ">"])
        if self.tokenizer is None:
            raise ConfigError("the run's folder holds no tokenizer, which prompts are read with; put it into its policy/")
        ids = e.prompts[episode, turn, : e.prompt_lengths[episode, turn]]
        return self._tokenizer(episode, turn).decode(ids.tolist(), clean_up_tokenization_spaces=False)

    def response(self, episode: int, turn: int) -> str:
        """Returns the policy's response."""
        ids = self.episodes.responses[episode, turn, : self.episodes.response_lengths[episode, turn]]
        if self.compiled:
            return self._words(ids)
        if self.report:
            return self.report["responses"][episode][turn]
        tokenizer = self._tokenizer(episode, turn)
        return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _tokenizer(self, episode: int, turn: int):
        """Returns the tokenizer of the role that acted in a turn."""
        return self.by_role[self.episodes.agents[episode, turn]] if self.by_role else self.tokenizer

    def action(self, episode: int, turn: int) -> str:
        """Returns the action passed to the environment: for text the one parsed from the response, else the response itself."""
        return self.report["actions"][episode][turn] if self.report else self.response(episode, turn)

    def admissible(self, episode: int, turn: int) -> bool:
        """Whether the environment offers the action; a text run counts others as invalid only with `env.strict`."""
        if self.report:
            return self.report["admissible"][episode][turn]
        return not self.episodes.invalid[episode, turn]

    def state_name(self, state: int) -> str:
        """Returns the observation that a state id stands for, if one of the turns or the report shows it."""
        if self.report:
            return self.report["texts"][state]
        step = self._steps_by_state.get(state)
        return self.observation(*step) if step and self.compiled else f"state {state}"

    def transcript(self, episode: int) -> str:
        """Renders one episode for a person."""
        e = self.episodes
        lines = [f"task: {self.goal(episode)} ({outcome_of(e, episode)})"]
        for turn in range(self.turns(episode)):
            invalid = "   (invalid)" if e.invalid[episode, turn] else ""
            lines += [f"  {self.observation(episode, turn)}", f"    {self.response_with_role(episode, turn)}{invalid}"]
        return "\n".join(lines)

    @functools.cached_property
    def _steps_by_state(self) -> dict[int, tuple[int, int]]:
        """Maps each state id to a step that saw it."""
        steps = np.argwhere(self.episodes.mask)
        states, first = np.unique(self.episodes.states[self.episodes.mask], return_index=True)
        return {int(state): tuple(steps[at].tolist()) for state, at in zip(states, first, strict=True)}

    def _slots(self, episode: int, turn: int) -> list[np.ndarray]:
        """Splits a compiled prompt (`rollout/compiled_prompts.py`): goal, K observations and actions in turn, observation."""
        e, pairs = self.episodes, self.config.rollout.history_length
        prompt, width, action = e.prompts[episode, turn], e.observations.shape[-1], e.responses.shape[-1] - 1
        if e.pictures is not None:  # its features stand in the observation's place, between two words
            width = int((prompt == prompt[-3]).sum()) + 2
        sizes = [*[width, action] * pairs, width, 1]
        goal = len(prompt) - sum(sizes)
        return np.split(prompt, np.cumsum([goal, *sizes])[:-1])[:-1]

    def _words(self, ids) -> str:
        ids = np.asarray(ids).tolist()
        # The vocabulary is rounded up, so an early policy may sample an id without a word: "#id".
        words = (word or f"#{i}" for i, word in zip(ids, self.tokenizer.convert_ids_to_tokens(ids), strict=True))
        return " ".join(word for word in words if word not in (BLANK, PAD, END))


def load(path: str | Path, iteration: int | None = None) -> Dump:
    """Reads a dump of a run.

    path: the run's folder, also one in a bucket, or one dump (`episodes/iteration-*.npz`) in it.
    iteration: the iteration of the dump in a folder; the last one by default.

    Raises:
      ConfigError: one line; no run, no dump of that iteration, or damaged files.
    """
    path = Path(remote.local(str(path)))
    folder = path.parent.parent if path.suffix == ".npz" else path
    config = read_config(folder)
    by_iteration = dumped(folder)
    if path.suffix == ".npz":
        iteration = next((number for number, file in by_iteration.items() if file.name == path.name), None)
        if iteration is None:
            raise ConfigError(f"{path}: no such dump; {folder} holds those of iterations {_list_iterations(by_iteration)}")
    elif not by_iteration:
        raise ConfigError(
            f"{folder}: holds no dump of episodes yet; one is written every log.dump_every={config.log.dump_every} "
            "iterations and at the end"
        )
    elif iteration is None:
        iteration = max(by_iteration)
    elif iteration not in by_iteration:
        raise ConfigError(f"iteration={iteration}: {folder} holds dumps of iterations {_list_iterations(by_iteration)}")
    file = by_iteration[iteration]
    try:
        episodes = Episodes.load(file)
        beside = file.with_suffix(".json")
        report = read_report(beside, episodes) if beside.is_file() else None
        files = (sorted((folder / part).rglob("tokenizer_config.json")) for part in ("policy", "start"))
        names = [file.parent for some in files for file in some]
        if report and not names:
            return Dump(episodes, config, None, report, iteration)
        source = [name for name in (config.policy.tokenizer, config.policy.source) if name]
        if not names and not source:
            raise ConfigError(f"{folder}: holds no tokenizer; expected it in {folder}/policy or {folder}/start")
        tokenizer = load_tokenizer(str([*names, *source][0]), config.cache_dir)
        return Dump(episodes, config, tokenizer, report, iteration, _tokenizers_of_roles(config, names))
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from None


def _tokenizers_of_roles(config: Config, folders: list[Path]) -> tuple[Any, ...]:
    """Returns each role's tokenizer out of these folders, named after policies; () where all roles have the same policy."""
    if not any(role.has_weights for role in config.roles.values()):
        return ()
    try:
        policies = policy_of_each(config, role_names(config))
    except Exception as error:  # a user's environment may need packages that this machine lacks
        if all(role.policy in ("shared", "own") for role in config.roles.values()):
            return ()  # all policies began with the same tokenizer
        why = f"says which role reads which tokenizer, and cannot be made: {error}"
        raise ConfigError(f"env.name={config.env.name}: {why}") from None
    places = {folder.name: str(folder) for folder in reversed(folders)}
    begins = {name: config_of(config, name).policy for name in policies}  # what is not yet saved is as at the start
    sources = [places.get(name) or begins[name].tokenizer or begins[name].source for name in policies]
    return tuple(load_tokenizer(source, config.cache_dir) for source in sources) if all(sources) else ()


def read_report(file: Path, e: Episodes) -> dict:
    """Reads the report beside a dump. Raises ValueError if it does not match the Episodes."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        texts, goals, scores = (report[name] for name in ("texts", "goals", "scores"))
        by_turn: dict = {"responses": str, "actions": str, "admissible": bool}
        if report.get("branches"):
            by_turn |= {"branches": int, "parents": int | None}
        turns = e.mask.sum(1).tolist()
        fits = all(isinstance(text, str) for text in (*texts, *goals))
        fits &= all(isinstance(score, int | float) for score in scores) and len(goals) == len(scores) == len(e.mask)
        for name, kind in by_turn.items():
            fits &= [len(episode) for episode in report[name]] == turns
            fits &= all(isinstance(value, kind) for episode in report[name] for value in episode)
        last = max(e.states.max(initial=0, where=e.mask), e.next_states.max(initial=0, where=e.mask))
        if not (fits and (last < len(texts) or not e.mask.any())):
            raise ValueError(f"texts, goals, scores, {', '.join(by_turn)} do not fit")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: not the report of {file.stem}.npz: {error}") from None
    return report


def read_config(folder: str | Path) -> Config:
    """Reads the settings of a run. Raises ConfigError for a folder without a run."""
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{folder}: not the folder of a run, it holds no config.yaml")
    try:
        return configuration.load(str(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _list_iterations(dumps: dict[int, Path]) -> str:
    numbers = list(map(str, dumps))
    return ", ".join(numbers if len(numbers) < 8 else [*numbers[:3], "...", *numbers[-3:]]) or "none"
