"""The Python API, whose names `import hgpo_jax` provides.

    config = hgpo_jax.load_config("household", method="gigpo", iterations=20)
    run = hgpo_jax.fit(config, "runs/first", on_iteration=lambda row: print(row["success"]))
    run.metrics()["success"].plot()                    # a pandas.DataFrame, a row an iteration

    run = hgpo_jax.load_run("runs/first")              # also one that is still training
    hgpo_jax.evaluate_policy(run, **{"evaluation.episodes": 1024})["success"]["greedy"]
    print(run.episodes().transcript(0))                # and every step's groups: `hgpo_jax.analysis`

    policy = hgpo_jax.load_policy("smollm2")
    print(hgpo_jax.generate(policy, "What is the capital of France?"))

    hgpo_jax.estimate("hgpo", rewards=rewards, mask=mask, states=states, groups=groups).advantages

Nothing is printed unless `verbose` is set, and nothing exits: a mistake that a user can fix is a ConfigError of one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from hgpo_jax import config as configuration
from hgpo_jax.advantages import estimate
from hgpo_jax.analysis import Dump, load, read_config
from hgpo_jax.config import Config, cli
from hgpo_jax.evaluation.files import OWN
from hgpo_jax.evaluation.held_out import play_both
from hgpo_jax.policy import Policy, load_policy
from hgpo_jax.policy.tokenizer import generation_of
from hgpo_jax.sampling.conversation import Chat
from hgpo_jax.sampling.generate import published_decoding
from hgpo_jax.setup.build import build
from hgpo_jax.setup.devices import prepare_devices
from hgpo_jax.trainer import main
from hgpo_jax.trainer.metrics import read_metrics
from hgpo_jax.trainer.provenance import outside_code
from hgpo_jax.utils import progress, remote
from hgpo_jax.utils.errors import ConfigError, RunError, excerpt

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Config",
    "ConfigError",
    "Policy",
    "Run",
    "RunError",
    "estimate",
    "evaluate_policy",
    "fit",
    "generate",
    "load_config",
    "load_policy",
    "load_run",
]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder. Its methods may raise ValueError, in one line.

    folder: the run_dir of `fit` or `python -m hgpo_jax.train`.
    """

    folder: Path

    @property
    def config(self) -> Config:
        """The configuration, with every field resolved."""
        return read_config(self.folder)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The evaluation that ended the run, as `evaluate_policy` returns it; None for a run that has not ended."""
        file = self.folder / OWN
        if not file.is_file():
            return None
        try:
            result: dict[str, Any] = json.loads(file.read_text())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: not an evaluation: {error}; run hgpo_jax.evaluate again") from None
        return result

    def metrics(self) -> pd.DataFrame:
        """Returns a row per iteration, indexed by its number from 0; the README of `hgpo_jax/trainer` explains the columns.

        Raises ImportError without pandas.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("metrics() needs pandas; pip install pandas") from None
        rows = read_metrics(self.folder)
        return pd.json_normalize(rows).set_index("iteration") if rows else pd.DataFrame().rename_axis("iteration")

    def episodes(self, iteration: int | None = None) -> Dump:
        """Returns the saved episodes of an iteration, by default the last one saved (`log.dump_every`)."""
        return load(self.folder, iteration)

    def policy(self) -> Policy:
        """Loads the trained policy, adapters merged; of several policies the one that most roles share."""
        if not cli.is_run(str(self.folder)):
            raise ConfigError(f"{self.folder}: the run has not ended; its policy is written at the end")
        source = next(name for name in cli.saved_policy(str(self.folder)) if name.startswith("policy="))
        return load_policy(source.removeprefix("policy="))


def load_config(source: str | Path | None = None, /, **fields: Any) -> Config:
    """Loads the configuration of a YAML file, or of a name in `configs/` such as "household", with fields changed.

    fields: values by name; those of a section as a dict, `learner={"lr": 1e-3}`, or by dotted name, `**{"learner.lr": 1e-3}`.

    Raises ConfigError for an unknown field or an invalid value.
    """
    tree = configuration.read_fields(None if source is None else str(source), [])
    return configuration.resolve(_tree(fields), tree)


def fit(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: bool = False,
    on_iteration: Callable[[dict[str, Any]], None] | None = None,
    verbose: bool = False,
) -> Run:
    """Trains, evaluates, and returns the run, like `python -m hgpo_jax.train`, with the same files.

    Args:
      run_dir: the run's folder; by default that of `config.run_dir`, or a new one under runs/.
      resume: continue the run in this folder, if it holds one; without a folder the newest unfinished one under runs/ of this
        name, method and seed, if there is one. A run that has ended is returned unchanged, unless `iterations` asks for more.
      on_iteration: called with the metrics of every iteration as a dict, in another thread, while the next one is sampled.
        An exception in it ends the training.
      verbose: print the output of the command.

    Raises:
      ConfigError: for a configuration that cannot work, before anything is computed.
      RunError: for an error that ended the run.
      KeyboardInterrupt: after saving; `resume=True` continues. A second one does not wait for that.

    On a CPU, jax gets a device for every core if nothing has used it before. A script that sets `env.workers` needs
    `if __name__ == "__main__":`, because worker processes import it.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r:.100}: must be a Config; load_config makes one")
    # Fields at their defaults are not given: a run that is resumed keeps its own.
    fields = config.model_dump(mode="json", exclude_unset=True) | ({} if run_dir is None else {"run_dir": str(run_dir)})
    with _alone(verbose):
        return Run(main.train(fields, "auto" if resume else "never", on_iteration=on_iteration).absolute())


def load_run(folder: str | Path) -> Run:
    """Opens the run in a folder. Raises ConfigError if there is none."""
    folder = remote.local(str(folder))
    read_config(folder)
    return Run(Path(folder).absolute())


def evaluate_policy(
    policy: Run | str | Path, config: Config | None = None, /, *, verbose: bool = False, **fields: Any
) -> dict[str, Any]:
    """Plays held-out tasks with a run's policy, or one in a Hugging Face folder, sampled and greedily; writes nothing.

    Args:
      config: the configuration to play with; by default the run's own.
      fields: changes to it, as in `load_config`.

    Returns a dict. `episodes` and `temperature` are numbers; others, as `success`, `interval` (95 %), `turns` and `by_task`,
    are dicts by `sampled` and `greedy`.

    Raises ConfigError.
    """
    if not isinstance(policy, Run | str | Path):
        raise ConfigError(f"policy: is a {type(policy).__name__}; give a run, or the folder that it was saved in")
    folder = remote.local(str(policy.folder if isinstance(policy, Run) else policy))
    if config is None:
        cli.check_ended(folder, "a configuration, too")
        config = read_config(folder)
    changes = _tree(fields)
    for name in ("warm_start", "policy.source", "lora.rank"):
        section, _, leaf = name.rpartition(".")
        if leaf in (changes.get(section, {}) if section else changes):
            raise ConfigError(f"{name}: the policy is that of {folder}; leave it out")
    tree = configuration.resolve(changes, config.model_dump(mode="json"))
    policy_config = configuration.resolve(
        configuration.read_fields(None, cli.saved_policy(folder)), tree.model_dump(mode="json")
    )
    outside_code(policy_config)  # which refuses what has changed since this process read it
    with _alone(verbose), contextlib.closing(build(policy_config, prepare_devices(policy_config), trains=False)) as job:
        return play_both(job, job.base_rollout_params(job.given_params))[0]


def generate(
    policy: Policy,
    prompt: str,
    *,
    system: str = "",
    max_tokens: int = 512,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    thinking: bool | None = None,
    seed: int = 0,
) -> str:
    """Returns the answer of a language model to one message, in the model's chat template.

    temperature, top_k, top_p: by default the publisher's recommendation (generation_config.json), else 0.7 and all tokens; a
    temperature of 0 takes the likeliest tokens. thinking: for a template that has a switch for it.

    Raises ValueError for a policy without a chat template, and for a prompt that does not fit its context.
    """
    decoding = published_decoding(generation_of(policy.tokenizer), 0.7, temperature=temperature, top_k=top_k, top_p=top_p)
    context = policy.config.max_position_embeddings
    if not 1 <= max_tokens < context:
        raise ValueError(f"max_tokens={max_tokens}: must be from 1 to {context - 1}, less than the model's context")
    chat = Chat(policy, decoding, max_new=max_tokens, seed=seed, system=system, thinking=thinking)
    return "".join(chat.answer(prompt))


def _tree(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields by section; `policy`, `reward` and `data` are short names as on the command line, and paths are text."""
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, dict):
            name = configuration.SHORT.get(name, name)
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{section}={excerpt(node)}: is a section; give its fields as a dict")
        if isinstance(value, dict):
            before = node.get(leaf, {})
            if not isinstance(before, dict):
                raise ConfigError(f"{name}: is given twice, as {excerpt(before)} and as a section")
            node[leaf] = before | {key: _plain(one) for key, one in value.items()}
        else:
            node[leaf] = _plain(value)
    return tree


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@contextlib.contextmanager
def _alone(verbose: bool) -> Iterator[None]:
    """Leaves jax's mesh and its folder of compiled programs as they were, and prints only what is asked for."""
    before, compiled = jax.sharding.get_mesh(), jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    try:
        with contextlib.nullcontext() if verbose else progress.quiet():
            yield
    finally:
        jax.set_mesh(before)
        jax.config.update("jax_compilation_cache_dir", compiled)
