"""The training loop of a run: iterations of rollout and update, with checkpoints, validations and records in between.

With `rollout.overlap` the next iteration's rollout begins as soon as an update is dispatched, and samples with the weights from
before it. A checkpoint holds these weights, not the episodes, which a continued run samples again to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hgpo_jax.evaluation.held_out import play_held_out, sampled_decoding, summarize
from hgpo_jax.learner.optimizer import lr_scale
from hgpo_jax.policy import load_policy, lora
from hgpo_jax.policy.source import is_hub_name
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.setup.job import Job, PolicySetup
from hgpo_jax.trainer.behavior_cloning import check_words, warm_start
from hgpo_jax.trainer.checkpoint import Checkpoints
from hgpo_jax.trainer.interruption import Interrupted, Interruption
from hgpo_jax.trainer.recorder import Recorder
from hgpo_jax.trainer.step import TrainState, sample
from hgpo_jax.utils import distributed, remote
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.files import is_remote
from hgpo_jax.utils.heartbeat import phase
from hgpo_jax.utils.progress import say

COMPILING = "compiling"  # begins the name of the thread that compiles ahead


class Training:
    """Trains a job in its run folder.

    Args:
      step: from `make_train_step`. like: the state before the first update, from `describe`: shapes and shardings are enough to
        compile and to restore, and memory holds only one state besides the weights.
      done: iterations in the folder's checkpoint; 0 if training begins.
      stop: receives the signals.
      on_iteration: called with every row of metrics once it is written, in another thread.
    """

    def __init__(
        self,
        job: Job,
        step: tuple[Callable, Callable],
        like: TrainState,
        folder: Path,
        done: int,
        stop: Interruption,
        on_iteration: Callable[[dict], None] | None = None,
    ):
        self.job, self.config, self.folder, self.done, self.stop = job, job.config, folder, done, stop
        self.on_iteration = on_iteration
        train_step, init = step
        given = describe(job.given_params)
        executor = ThreadPoolExecutor(1, COMPILING)
        compiling = executor.submit(compile_ahead, job, train_step, like, given)
        executor.shutdown(wait=False)  # so that its thread ends when it has compiled
        if jax.process_count() > 1:  # all processes must start programs in the same order; two threads would not ensure that
            compiling.result()
        self.checkpoints = Checkpoints(folder / "checkpoints", self.config.log)
        params = starting_params(job, folder, instead=True)
        stop.agreed()
        self.reference = job.reference_copy(params)
        self.rollout_reference = job.rollout_reference(self.reference)
        self.state = self._restore(like) if done else init(params)
        if done and job.partial and self.state.partial:
            with phase("playing unfinished episodes again"):
                job.partial.resume(self.state.partial)
        self.train_step = compiling.result()
        reference_ids = set(map(id, jax.tree.leaves(self.reference)))
        for array in jax.tree.leaves(job.given_params):
            if id(array) not in reference_ids and not array.is_deleted():  # nothing reads it again, and it would occupy memory
                array.delete()

    def run(self) -> tuple[dict, dict]:
        """Runs the remaining iterations; returns (final parameters, adapters merged; rollout parameters, adapters separate).

        Nothing here waits for an update: the recorder's threads wait for its metrics while the next rollout is sampled.

        Raises:
          Interrupted: a signal arrived; the run is saved first.
        """
        writes = jax.process_index() == 0
        self.recorder = Recorder(self.config, self.folder, self.done, writes, self.on_iteration)
        try:
            sampled = None
            for iteration in range(self.done, self.config.iterations):
                validation = self._validate_and_save(iteration)
                self.stop.agreed()
                result, sums, counts = sampled or self._rollout(iteration)
                self.stop.agreed()
                self._update(iteration, result, sums, counts | validation)
                self.stop.agreed()
                more = self.config.rollout.overlap and self.done < self.config.iterations
                sampled = self._rollout(self.done) if more else None
            self._save()
        except Interrupted:
            with self.stop.defer_signals():
                self._save()
                self.checkpoints.close()
            raise
        except BaseException:  # a callback may raise KeyboardInterrupt
            self._save_after_failure()
            raise
        finally:
            self.recorder.close()
        self.checkpoints.close()
        with refusals():
            save = functools.partial(save_adapters, self.folder, start_places(self.job, self.folder))
            self.job.by_policy(save, self.state.params)
        trained, played = self.state.params, self._rollout_params()
        if self.job.partial:
            self.job.partial.close()
        # Evaluations need the memory; with adapters, the frozen weights are read back in float32.
        del self.state, self.reference, self.train_step
        base = starting_params(self.job, self.folder) if self.job.adapted else trained
        return self.job.merged_params(trained, base, donate=self.job.adapted), played

    def _save_after_failure(self) -> None:
        """Saves the progress after a rollout or a validation failed; a failed update has destroyed the donated weights.

        One of several processes cannot save alone, and the others need not have failed.
        """
        if jax.process_count() == 1 and not any(
            isinstance(a, jax.Array) and a.is_deleted() for a in jax.tree.leaves(self.state)
        ):
            with contextlib.suppress(RunError):
                self._save()
                self.checkpoints.close()
                if self.stop.saved:
                    saved = f"{self.stop.saved} of {self.config.iterations} iterations are saved"
                    say(f"{saved}; continue with --resume {remote.shown(self.folder)}")

    def _restore(self, like: TrainState) -> TrainState:
        """Restores the state of the checkpoint that training continues from. like: its shapes and shardings."""
        return like.from_checkpoint(self.checkpoints.restore(self.done, like.to_checkpoint()))

    def _rollout_params(self):
        return self.job.rollout_params(self.state.params, self.rollout_reference)

    def _validate_and_save(self, iteration: int) -> dict:
        """Saves and validates the policy at the start of an iteration, if either is due; returns the validation's metrics."""
        evaluation, log = self.config.evaluation, self.config.log
        validates = evaluation.every and iteration % evaluation.every == 0
        if self.done % log.checkpoint_every == 0 and not (validates and log.keep_best):
            self._save()
        if not validates:
            return {}
        began = time.perf_counter()
        with phase("validation", says_end=False):
            validation = validate(self.job, self._rollout_params())
        self.recorder.time_phase("validation", (), began)
        if log.keep_best:
            # A policy must not be chosen for breaking its environment where it would lose.
            if math.isnan(success := validation["validation/success_at_least"]):
                raise RunError("log.keep_best: the environment does not say which episodes are a success; give log.keep_best=0")
            self._save(success)
        return validation

    def _rollout(self, iteration: int) -> tuple[RolloutResult, list[dict], dict]:
        """Returns the iteration's episodes with their report, sums over its rollouts, and further metrics."""
        began = time.perf_counter()
        with phase("rollout", says_end=False):
            trained = self.state.sampler or self.state.params
            params = self.job.rollout_params(trained, self.rollout_reference)
            result, sums, counts = sample(self.job, params, iteration)
        report = result.report
        self.recorder.time_phase("rollout", result.episodes.mask, began)
        self.recorder.dump(iteration, result)
        self.recorder.wait()  # at most one iteration is in flight
        if self.config.rollout.overlap or self.config.rollout.keep > 1:
            versions = [version for turns in report.versions for version in turns] if report else []
            updates = np.maximum(0, np.array(versions or [iteration]) - self.config.rollout.overlap)
            counts = counts | {"staleness": iteration - float(updates.mean())}
        return result, sums, counts

    def _update(self, iteration: int, result: RolloutResult, sums: list[dict], counts: dict) -> None:
        """Learns from the episodes; signals wait until the iteration has been counted."""
        with self.stop.defer_signals():
            began = time.perf_counter()
            scale = lr_scale(self.config.learner, iteration, self.config.iterations)
            key = self.job.key(iteration, 1)
            role = learning_role(self.job, iteration)
            with phase("update", says_end=False):
                sampler = self._keep_for_sampling()
                state, metrics = self.train_step(
                    self.state.replace(sampler=None, partial=None),
                    self.reference,
                    result.episodes,
                    key,
                    jnp.float32(scale),
                    role,
                )
                self.state = state.replace(sampler=sampler, partial=self.job.partial and self.job.partial.snapshot())
            self.done = iteration + 1
            self.recorder.time_phase("update", metrics, began)
            self.recorder.row(iteration, sums, metrics, counts | {"lr": self.config.learner.lr * scale}, result)

    def _keep_for_sampling(self) -> dict | None:
        """Returns, with `rollout.overlap`, a copy of the weights for `TrainState.sampler` and deletes the copy before it."""
        if not self.state.sampler:
            return None
        sampler = self.job.by_policy(PolicySetup.sampling_copy, self.state.params)
        for array in jax.tree.leaves(self.state.sampler):
            array.delete()
        return sampler

    def _save(self, success: float | None = None) -> None:
        """Saves a checkpoint of the iterations done, unless there is one and `success` is None, behind their rows and dumps."""
        with self.stop.defer_signals():
            if self.done and (success is not None or self.checkpoints.latest() != self.done):
                self.recorder.wait(dumps=True)
                self.checkpoints.save(self.done, self.state.to_checkpoint(), success)
                self.stop.saved = self.done
                if is_remote(remote.shown(self.folder)):
                    self.checkpoints.wait()
                    remote.send(self.folder, again=True)


def describe(tree):
    """Returns the shapes, dtypes and shardings of a tree's arrays; those of NumPy stay as they are."""

    def of(a):
        return a if isinstance(a, np.ndarray) else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)

    return jax.tree.map(of, tree)


def compile_ahead(job: Job, train_step, state, given):
    """Compiles rollout and update in another thread while the warm start prepares; returns the compiled update.

    The rollout's first call then finds it in the compilation cache. state, given: of `TrainState` and of the given parameters,
    from `describe`; arrays would be copied.
    """
    with jax.set_mesh(job.mesh):  # a mesh applies only to the thread that set it
        reference = job.reference_copy(given)
        with phase("tracing the rollout", says_end=False):
            params = describe(job.base_rollout_params(given))
            with job.on_rollout_mesh():
                job.runner.compile(params, job.episode_inputs(0))
        whole = NamedSharding(job.mesh, PartitionSpec())
        abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)  # noqa: E731
        role = learning_role(job, 0)
        with phase("tracing the update", says_end=False):
            episodes = jax.tree.map(abstract, job.abstract_episodes())
            state = state.replace(sampler=None, partial=None)
            return train_step.lower(state, reference, episodes, job.key(0, 1), jnp.float32(0), role).compile()


def learning_role(job: Job, iteration: int) -> jax.Array | None:
    """Returns `Job.learning_role` in the form that the update takes."""
    role = job.learning_role(iteration)
    return None if role is None else jnp.int32(role)


def validate(job: Job, params) -> dict:
    """Evaluates `Job.rollout_params` by sampling, if possible on tasks not in the final evaluation; returns metrics."""
    episodes, scores, _ = play_held_out(job, params, sampled_decoding(job.config.evaluation), validation=True)
    summary = summarize(episodes, job.runner.task_types, scores)
    names = ("success", "success_at_least", "turns", "invalid", "score")
    return {f"validation/{name}": summary[name] for name in names if name in summary}


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raises ConfigError for a folder that cannot hold a policy: it is a user's mistake."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def save_adapters(folder: Path, places: dict[str, Path], policy: PolicySetup, adapters) -> None:
    """With LoRA, saves the trained adapters without their base weights. Raises ValueError if they cannot be written.

    places: `start_places`, the base of adapters whose weights are, as they were, neither on the hub nor in a folder.
    """
    if policy.model.lora:
        source, base = policy.settings.policy.source, str(places[policy.name].absolute())
        if policy.settings.warm_start != "cloning" and (is_hub_name(source) or Path(source).is_dir()):
            base = source if is_hub_name(source) else str(Path(source).absolute())
        lora.save(folder / "adapter" / policy.name, policy.model, adapters, base=base)


def start_places(job: Job, folder: Path) -> dict[str, Path]:
    """Returns the folder of each policy's initial weights.

    Policies with the same ones share a folder, and one copy on the devices if adapters go beside it.
    """
    first = {id(policy.initial): name for name, policy in reversed(job.policies.items())}
    return {
        name: folder / "start" / (name if job.config.warm_start == "cloning" else first[id(policy.initial)])
        for name, policy in job.policies.items()
    }


def starting_params(job: Job, folder: Path, instead: bool = False) -> dict[str, dict]:
    """Returns the initial weights: those in `start/` if the run has begun already, otherwise cloned or configured ones.

    instead: delete the given weights where those in `start/` take their place, before both are in memory.
    """
    config, places = job.config, start_places(job, folder)
    by_place = {place: name for name, place in places.items()}
    if not distributed.broadcast_from_process_0(lambda: all((place / "config.json").is_file() for place in by_place)):
        reference = job.given_params
        if config.warm_start == "cloning":
            reference = warm_start(job)
        with refusals():
            for place, name in by_place.items():
                job.policies[name].save(reference[name], place)
        return reference
    for array in jax.tree.leaves(job.given_params) if instead else ():
        array.delete()
    params = {}
    for place, name in by_place.items():
        try:
            policy = load_policy(place, job.mesh)
            params[place] = policy.params
        except ValueError as error:
            raise ConfigError(f"{error}; remove {folder / 'start'}, and it will be recreated") from None
        if jax.tree.map(jnp.shape, params[place]) != jax.tree.map(jnp.shape, job.policies[name].initial.params):
            raise ConfigError(f"{place}: policy.* or env.* ask for another size of policy; start in another run_dir")
        try:
            check_words(place, policy, job.policies[name])
        except ValueError as error:
            raise ConfigError(f"{error}; start in another run_dir") from None
    return {name: params[place] for name, place in places.items()}
