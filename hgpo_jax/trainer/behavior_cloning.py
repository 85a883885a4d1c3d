"""The warm start: behaviour cloning on generated play.

A scripted expert (`envs/*/expert.py`) plays with some random actions mixed in, so that its play also visits the states that
a clumsy policy gets into. The label of every turn is the expert's action in that state. The labels depend only on information
that a prompt of the episode shows or has shown. Reinforcement learning needs this start because random admissible play
almost never succeeds. The weights to train are random or pretrained; with LoRA, only adapters are trained and then merged.
A small policy in a text environment without an expert clones random valid commands until most of its outputs parse.
The result is cached on disk under a hash of what it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.config import Config
from hgpo_jax.config.policies import SHARED, members
from hgpo_jax.envs.protocol import CompiledEnv, Expert, ListsGames
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.logprobs import make_logprobs
from hgpo_jax.learner.objective import make_cloning_loss
from hgpo_jax.learner.optimizer import frozen_parts, make_optimizer
from hgpo_jax.learner.update import make_map, make_update
from hgpo_jax.policy import Policy, huggingface_folder, load_policy
from hgpo_jax.policy.placement import shardings_like
from hgpo_jax.policy.source import find
from hgpo_jax.policy.tokenizer import ACT
from hgpo_jax.rollout.compiled import start_episode
from hgpo_jax.rollout.compiled_prompts import make_prompt, picture_of, role_of
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.runners import CompiledRunner, TextRunner
from hgpo_jax.rollout.scripted_play import play
from hgpo_jax.rollout.tasks import stream_key
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.job import Job, PolicySetup
from hgpo_jax.utils import distributed
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.heartbeat import phase
from hgpo_jax.utils.progress import Progress, say, warn

NOISE = 0.3  # share of random admissible actions in the generated play; the expert's choice stays the label
WARMUP_STEPS = 100
PLAYED = 4096  # episodes that the expert plays at once
LARGE = 2**26  # bytes of a file of data that counts by its size and time
ADMISSIBLE = 0.95  # share of admissible commands at which the cloning of random ones ends
# Raise it with every change of code after which the same fields clone another policy: of an environment, its expert or its
# prompts, of the network, the cloning loss, its optimizer or the random keys. Between releases nothing else makes a cached
# warm start stale.
CACHE_VERSION = 1


def generate_play(
    env: CompiledEnv, expert: Expert, key, tasks, *, noise: float, history_length: int, end: int, act: int
) -> tuple[TrainingBatch, jax.Array]:
    """Plays and labels one episode per task, given as for a rollout.

    Returns: (TrainingBatch of tasks x max_turns decisions with their roles, response_lengths 0 after an episode's end;
    success bool[tasks]).
    """

    def episode(env, task, key):
        row = start_episode(env, max(history_length, 1), task, key)

        def turn(row, t):
            keys = jax.random.split(jax.random.fold_in(row.key, t), 3)
            role = role_of(env, row.env)
            _, recent = row.history.of(role)
            label = expert.expert_action(env, row.env, recent, keys[0])
            action = jnp.where(jax.random.uniform(keys[1]) < noise, expert.random_action(env, row.env, keys[2]), label)
            history = row.history if history_length else jax.tree.map(lambda a: a[:, :0], row.history)
            prompt, length = make_prompt(env, row.env, row.goal, history, row.observation, act)
            words = (label != 0).sum()
            response = jnp.concatenate([label, jnp.zeros(1, jnp.int32)]).at[words].set(end)
            state, observation, _, done, _ = env.step(row.env, action)
            after = row.replace(env=state, observation=observation, history=row.history.push(role, row.observation, action))
            after = after.replace(done=row.done | done)
            rows = TrainingBatch(
                prompts=prompt,
                prompt_lengths=length,
                responses=response,
                response_lengths=jnp.where(row.done, 0, words + 1),
                old_logp=jnp.zeros(response.shape),
                advantages=jnp.float32(0),
                agents=role,
                pictures=picture_of(env, row.observation),
            )
            return after, (rows, env.won(state) & ~row.done)

        _, (rows, won) = jax.lax.scan(turn, row, jnp.arange(env.max_turns))
        return rows, won.any()

    def episodes(tables, tasks, keys):
        bound_env = env.bound(tables) if isinstance(env, ListsGames) else env
        return jax.vmap(functools.partial(episode, bound_env))(tasks, keys)

    env_tables = env.tables if isinstance(env, ListsGames) else None
    play_episodes, count = jax.jit(episodes), len(tasks)
    batch = min(PLAYED, count)
    numbers = jnp.arange(count + -count % batch).reshape(-1, batch) % count
    keys, parts = jax.random.split(key, count), []
    for some in numbers:
        parts.append(jax.block_until_ready(play_episodes(env_tables, tasks[some], keys[some])))
    rows, success = jax.tree.map(lambda *a: jnp.concatenate(a)[:count] if len(a) > 1 else a[0], *parts)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rows), success


def read_play(runner: TextRunner, tasks: Sequence[int], config: Config) -> tuple[TrainingBatch, jax.Array]:
    """Like `generate_play`, but in a text environment, with its expert or random commands; holds only decisions that happened.

    Raises ConfigError where an episode cannot be played, or an answer is too long.
    """
    inputs, roles, commands, won = [], [], [], []
    episodes = play(
        runner.make_env,
        tasks,
        noise=NOISE,
        history_length=config.rollout.history_length,
        seed=config.start_seed,
        time_limit=config.env.time_limit,
        budgets=config.env.budgets,
    )
    try:
        with Progress("warm start: play", len(tasks), "episode") as progress:
            for episode in episodes:
                inputs += episode.inputs
                roles += episode.roles
                commands += episode.commands
                won.append(episode.won)
                progress.update(1, {"won": f"{sum(won) / len(won):.2f}"})
    except ValueError as error:
        raise ConfigError(f"env.name={config.env.name}: {error}") from None
    prompts: list[list[int]] = [[]] * len(inputs)
    responses: list[list[int]] = [[]] * len(inputs)
    for role, form in enumerate(runner.formats):
        own = [at for at, acts in enumerate(roles) if acts == role]
        asked, answered = form.build([inputs[at] for at in own]), form.answers([commands[at] for at in own])
        for at, prompt, response in zip(own, asked, answered, strict=True):
            prompts[at], responses[at] = prompt.ids, response
    if (longest := max(map(len, responses), default=0)) > (limit := config.rollout.response_limit):
        raise ConfigError(f"rollout.response_limit={limit}: the answers to clone take up to {longest} tokens; give as many")
    padded = _padded(responses, 1)
    return TrainingBatch(
        prompts=_padded(prompts, 64),
        prompt_lengths=jnp.array(list(map(len, prompts))),
        responses=padded,
        response_lengths=jnp.array(list(map(len, responses))),
        old_logp=jnp.zeros(padded.shape),
        advantages=jnp.zeros(len(responses)),
        agents=jnp.array(roles),
    ), jnp.array(won)


def _padded(rows: list[list[int]], multiple: int) -> jax.Array:
    """Stacks rows of token ids into one array, whose width is that of the longest row, rounded up to `multiple`."""
    width = -(-max(map(len, rows)) // multiple) * multiple
    padded = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(padded)


@phase("playing the episodes to clone", says_end=False)
def demonstrations(job: Job, numbers: jax.Array) -> tuple[TrainingBatch, jax.Array]:
    """Returns decisions to clone in the tasks with these numbers, and each episode's success, bool[.]. Raises ConfigError."""
    config, runner, tokenizer = job.config, job.runner, job.tokenizer
    if isinstance(runner, TextRunner):
        return read_play(runner, runner.select_tasks("warm_start", config.start_seed, numbers), config)
    tasks = runner.select_tasks("warm_start", config.start_seed, numbers)
    assert isinstance(runner, CompiledRunner)  # an agent has no expert
    expert = environment(config.env).expert
    assert expert is not None  # `check_together` rejects environments without one
    return generate_play(
        runner.env,
        expert,
        stream_key("play", config.start_seed),
        tasks,
        noise=NOISE,
        history_length=config.rollout.history_length,
        end=tokenizer.eos_token_id,
        act=tokenizer.convert_tokens_to_ids(ACT),
    )


@phase("cloning", says_end=False)
def clone(job: Job) -> dict:
    """Trains the job's policy on generated play; returns its parameters, adapters merged. Prints its progress.

    Pretrained weights that are good enough are returned unchanged. Raises ConfigError if cloning is not possible.
    """
    config, settings = job.config, job.config.cloning
    initial = job.given_params
    reference = job.by_policy(lambda policy, params: policy.compute_copy(params) if policy.model.lora else None, initial)
    trained = job.by_policy(PolicySetup.trainable, initial)
    practice_numbers = settings.episodes + jnp.arange(job.batch)
    # Random commands are cloned for their form, not for their success.
    aim, stop_at = ("success", settings.stop_at) if job.runner.has_expert() else ("admissible", ADMISSIBLE)

    def practised(trained, step: int) -> float:
        params = job.rollout_params(trained, reference)
        with job.on_rollout_mesh():
            groups = jnp.arange(job.batch, dtype=jnp.int32)
            practice = job.runner.select_tasks("warm_start", config.start_seed, settings.episodes + groups)
            keys = jax.random.split(jax.random.fold_in(stream_key("practice", config.start_seed), step), job.batch)
            decoding = Decoding(temperature=config.rollout.temperature)
            episodes, report = jax.device_get(job.runner.rollout(params, practice, keys, groups, decoding))
        if aim == "success" or report is None:
            return float(episodes.success.mean())
        return 1 - report.counts["inadmissible"] / max(int(episodes.mask.sum()), 1)

    pretrained = any(policy.settings.policy.source for policy in job.policies.values())
    if pretrained and (reached := practised(trained, settings.max_steps)) >= stop_at:
        reach = f"reach success {reached:.0%} (cloning.stop_at={stop_at:g})"
        say(f"warm start: not needed, the pretrained weights {reach}")
        return initial
    decisions, success = demonstrations(job, jnp.arange(settings.episodes))
    held_out = _held_out_loss(job, practice_numbers, reference) if isinstance(job.runner, TextRunner) else None
    students = job.by_policy(functools.partial(Student, decisions, job.runner.roles), trained, reference)
    batches = stream_key("cloning", config.start_seed)
    with Progress("warm start", settings.max_steps, "step") as progress:
        for step in range(0, settings.max_steps, settings.check_every):
            steps = min(settings.check_every, settings.max_steps - step)
            losses = {name: one.learn(jax.random.fold_in(batches, step), steps) for name, one in students.items()}
            if any(skipped for _, skipped in losses.values()):
                raise RunError(f"warm start: a loss or gradient is not finite after {step} steps; lower cloning.lr")
            trained = {name: student.trained for name, student in students.items()}
            reached = practised(trained, step)
            shown = {f"loss {name}".strip(): f"{loss:.3f}" for name, (loss, _) in losses.items()}
            if held_out:
                shown["held-out loss"] = f"{held_out(trained):.3f}"
            shown[aim] = f"{reached:.0%}"
            progress.update(steps, shown)
            if reached >= stop_at:
                break
    if aim == "success" and not success.any():
        warn("warm start: the environment calls none of the cloned episodes a success; see its player with hgpo_jax.check")
    decided = sum(student.count for student in students.values())
    say(
        f"warm start: {step + steps} steps of behaviour cloning on {decided:,} decisions of "
        f"{settings.episodes:,} generated episodes ({float(success.mean()):.0%} of them successful); "
        + ", ".join(f"{name} {value}" for name, value in shown.items())
    )
    return job.merged_params(trained, initial)


class Student:
    """One policy that clones the decisions of its roles.

    Args:
      decisions: those of all roles.
      roles: names, which `decisions.agents` index.
      trained, reference: weights, or adapters and the weights that they adapt.

    Attributes:
      trained: the argument, updated in place.
      count: decisions to clone.
    """

    def __init__(self, decisions: TrainingBatch, roles: Sequence[str], policy: PolicySetup, trained, reference):
        config, settings = policy.settings, policy.settings.cloning
        self.trained, self._reference, self._decisions = trained, reference, decisions
        self._happened = decisions_of(policy.name, roles, decisions)
        total, self.count = decisions.response_lengths.shape[0], int(self._happened.sum())
        if not self.count:
            raise ConfigError(f"warm_start=cloning: {policy.name} has no turn in the generated play; give warm_start=none")
        passes = -(-settings.check_every * settings.batch_size // self.count)  # over few decisions, between evaluations
        optimizer = make_optimizer(
            settings.lr,
            WARMUP_STEPS,
            1.0,
            weight_decay=1e-4,
            beta2=0.98,
            decay_steps=settings.max_steps,
            kind=settings.optimizer,
            frozen=frozen_parts(policy.model),
        )
        update = make_update(
            make_cloning_loss(policy.model, config.learner.remat),
            optimizer,
            policy.mesh,
            minibatch_size=settings.batch_size,
            microbatch_size=config.learner.microbatch_size,
            compute_dtype=config.policy.compute_dtype,
        )

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def some_steps(trained, opt_state, reference, decisions, happened, key, steps):
            # Decisions that happened come first, pass by pass, in a random order.
            rank = jax.random.uniform(key, (passes, total)) + jnp.arange(passes)[:, None]
            order = jnp.argsort((rank + (passes + 1) * ~happened).reshape(-1)) % total
            return update(trained, opt_state, reference, decisions, order, steps * settings.batch_size, 1.0)

        moments = shardings_like(jax.eval_shape(optimizer.init, trained), policy.model, policy.mesh)
        self._some_steps, self._opt_state = some_steps, jax.jit(optimizer.init, out_shardings=moments)(trained)

    def learn(self, key, steps: int) -> tuple[float, int]:
        """Takes some optimizer steps; returns (the mean loss, how many steps were skipped)."""
        self.trained, self._opt_state, stats = self._some_steps(
            self.trained, self._opt_state, self._reference, self._decisions, self._happened, key, jnp.int32(steps)
        )
        return float(stats["loss"]), int(stats["nonfinite_steps"])


def decisions_of(policy: str, roles: Sequence[str], decisions: TrainingBatch) -> jax.Array:
    """Selects the decisions that happened, of the roles that use the policy of this name. Returns bool[N]."""
    happened = decisions.response_lengths > 0
    if policy == SHARED:
        return happened
    assert decisions.agents is not None
    return happened & jnp.array(members(policy, roles))[decisions.agents]


def _held_out_loss(job: Job, numbers: jax.Array, reference) -> Callable[[dict], float]:
    """Builds `loss(params)`, the mean loss over the response tokens of decisions in the tasks with these numbers."""
    decisions, _ = demonstrations(job, numbers)
    tokens = int(decisions.response_lengths.sum())

    def make_likelihood(policy: PolicySetup):
        logprobs, happened = make_logprobs(policy.model), decisions_of(policy.name, job.runner.roles, decisions)
        mapped = jax.jit(
            make_map(
                lambda params, batch: logprobs(params[0], params[1], batch)[0].sum(-1),
                job.mesh,
                microbatch_size=job.config.learner.microbatch_size,
            )
        )
        order, count = jnp.argsort(~happened), happened.sum()
        return lambda params, reference: mapped((policy.compute_copy(params), reference), decisions, order, count).sum()

    likelihoods = job.by_policy(make_likelihood)

    def loss(params) -> float:
        return -float(sum(of(params[name], reference[name]) for name, of in likelihoods.items())) / tokens

    return loss


@phase("finding the warm start")
def cache_key(config: Config) -> str:
    """Hashes what the warm start depends on: fields, files and packages, and the code by its version."""
    parts = [
        str(config.start_seed),
        config.model_dump_json(include={"env", "policy", "lora", "rollout"}),
        config.cloning.model_dump_json(exclude={"seed"}),
        *(role + fields.model_dump_json(exclude={"lr"}) for role, fields in sorted(config.roles.items())),
        str(config.learner.microbatch_size),
        str(CACHE_VERSION),
        *(f"{package} {version(package)}" for package in ("hgpo_jax", "jax", "jaxlib", "flax", "optax")),
    ]
    entry = environment(config.env)
    parts.append(entry.digest)
    if entry.games and entry.compiled:
        parts.append(entry.compiled(config).digest)
    options = [value for given in config.env.options.values() for value in (given if isinstance(given, list) else [given])]
    given = [Path(value) for value in options if isinstance(value, str) and os.path.isfile(value)]
    for file in (*(sorted(Path(config.env.data).glob("*")) if config.env.data else ()), *given):
        if file.is_file():
            about = file.stat()
            large = f"{about.st_size} {about.st_mtime_ns}" if about.st_size > LARGE else ""
            parts.append(f"{file.name} {large or hashlib.sha256(file.read_bytes()).hexdigest()}")
    digest = hashlib.sha256("\0".join(parts).encode())
    if Path(config.env.template).is_file():  # otherwise it names one of our templates
        digest.update(Path(config.env.template).read_bytes())
    sources = [role.policy for role in config.roles.values() if role.policy not in ("shared", "own")]
    for source in filter(None, [config.policy.source, *sources]):
        digest.update(huggingface_folder.digest(find(source, config.cache_dir)).encode())
    return digest.hexdigest()[:16]


def check_words(folder: Path, saved: Policy, policy: PolicySetup) -> None:
    """Raises ValueError if a policy with the environment's own words was saved when these were others."""
    small = not (policy.settings.policy.source or policy.settings.policy.tokenizer)
    if small and saved.tokenizer.get_vocab() != policy.initial.tokenizer.get_vocab():
        raise ValueError(f"{folder}: holds other words than env.* shows now; its texts or data have changed since")


def warm_start(job: Job) -> dict:
    """Returns the parameters to start from, out of the cache or freshly cloned."""
    key = distributed.broadcast_from_process_0(lambda: cache_key(job.config))
    folder = Path(job.config.cache_dir) / "warm_start" / key
    if distributed.broadcast_from_process_0(folder.is_dir):
        say(f"warm start: read from {folder}")
        try:
            found = {name: load_policy(folder / name, job.mesh) for name in job.policies}
            for name, saved in found.items():
                check_words(folder / name, saved, job.policies[name])
            return {name: saved.params for name, saved in found.items()}
        except ValueError as error:
            raise ConfigError(f"{error}; remove {folder}, and the next run makes a new one") from None
    params = clone(job)

    def make_room() -> str:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(dir=folder.parent)

    partial = Path(distributed.broadcast_from_process_0(make_room))
    first = jax.process_index() == 0
    try:
        for name, policy in job.policies.items():
            policy.save(params[name], partial / name)
        if first:
            partial.chmod(folder.parent.stat().st_mode & 0o777)  # others may share the cache; a temporary folder is private
            with contextlib.suppress(OSError):  # another run was faster
                os.replace(partial, folder)
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
    return params
