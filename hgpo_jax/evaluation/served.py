"""Evaluation of a policy behind any server with OpenAI's chat API, on the tasks of a panel.

    vllm serve MODEL        # or SGLang, llama.cpp, Ollama, ...
    python -m hgpo_jax.evaluate openai:http://localhost:8000/v1#MODEL env.name=household_text --panel household --to FOLDER

The server gets the same user messages as our policies, in its own chat template; the same rules find the actions in its
answers. Because the server tokenizes, three things differ: rollout.prompt_limit shortens nothing, special tokens in an
observation are not neutralized, and rollout.stop are strings. The server receives a seed for every sampled answer; its
effect is up to the server. A rejected message, most often because the context is full, ends only that episode, as not
solved: dropping it would exclude the long episodes. An episode whose first message is rejected was not played. The key for a
server that needs one is read from OPENAI_API_KEY. Models whose temperature is fixed (OpenAI's o-series) cannot be evaluated:
they reject `temperature`, and `max_tokens`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from hgpo_jax.config import Config
from hgpo_jax.policy.answers import THINK, THINK_END, split_thought
from hgpo_jax.policy.chat_template import sanitized
from hgpo_jax.rollout.chat_prompts import NO_CHAT, Prompt, PromptInput, load_template
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.process_workers import env_workers
from hgpo_jax.rollout.tasks import task_numbers
from hgpo_jax.rollout.turn_budgets import with_budget
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, EnvSpec
from hgpo_jax.sampling.continuous_batching import SlotResponse
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError, RunError, one_line
from hgpo_jax.utils.progress import Progress

log = logging.getLogger(__name__)

PREFIX = "openai:"
AT_ONCE = 32  # requests at a time
# Seconds for one request, and retries if it did not arrive or the server is busy: over about a minute, in which it may restart.
TIMEOUT, RETRIES = 300.0, 10
REFUSED = (400, 413, 422)  # what servers answer to a message that is too long for them


class _Answer(NamedTuple):
    text: str
    ended: bool  # by the model, not by rollout.response_limit


class ServedPolicy:
    """A player of held-out tasks of a text environment that asks a server for every action.

    Args:
      policy: openai:URL#MODEL.

    Attributes:
      task_types: those of the environment.

    Raises:
      ConfigError: a policy that is not written like this or does not answer, an environment without texts, or a field that
        the server would not receive.
    """

    def __init__(self, policy: str, config: Config):
        url, _, model = policy.removeprefix(PREFIX).partition("#")
        try:
            parts = urlsplit(url)
            right = parts.scheme in ("http", "https") and parts.hostname and model and parts.port != 0
        except ValueError:  # a host in brackets, or a port
            right = False
        if right and (parts.username or parts.password or parts.query):
            raise ConfigError("openai:URL#MODEL: the URL holds more than a place, and is written down; set OPENAI_API_KEY")
        if not right:
            raise ConfigError(f"{policy}: expected openai:URL#MODEL, as in openai:http://localhost:8000/v1#Qwen/Qwen3-4B")
        if config.env.compiled:
            raise ConfigError("env.compiled=true: a served policy needs texts; leave it out")
        config = config.model_copy(update={"env": config.env.model_copy(update={"compiled": False})})
        entry = environment(config.env)
        if entry.is_seen:
            raise ConfigError(f"env.name={config.env.name}: a served policy reads texts, and these are pictures")
        check_together(config)
        if entry.text is None:
            raise ConfigError(f"env.name={config.env.name}: a served policy needs texts, as those of env.name=household_text")
        try:
            import openai
        except ImportError:
            raise ConfigError(f"{policy}: needs the package openai; pip install 'hgpo_jax[openai]'") from None
        _, make_env = entry.text(config)
        try:
            self._template = load_template(config.env.template or entry.template)
            if self._template.chats:
                raise ValueError(f"env.template={config.env.template}: a served policy reads one message; {NO_CHAT}")
            self._workers = env_workers(make_env, config.env.workers, config.evaluation.episodes, config.env.time_limit)
        except (ValueError, OSError) as error:
            raise ConfigError(f"env.name={config.env.name}: {one_line(str(error))}") from None
        spec: EnvSpec = self._workers.spec
        self.task_types = spec.task_types
        self._spec, self._config, self._entry, self._policy, self._model = spec, config, entry, policy, model
        key = os.environ.get("OPENAI_API_KEY") or "none"  # most servers need none, but the client does
        self._client = openai.OpenAI(base_url=url, api_key=key, timeout=TIMEOUT, max_retries=RETRIES)
        self._failures = openai.OpenAIError, ValueError, AttributeError
        try:  # the address, the key and the model's name, before hundreds of requests
            self._ask(self._client.with_options(max_retries=1), "Hello", Decoding(), 0, limit=1)
        except self._failures as error:
            raise ConfigError(self._describe_error(error)) from None

    def play(self, decoding: Decoding, seed: int) -> tuple[Episodes, np.ndarray | None, list[str]]:
        """Plays one episode on each of the first evaluation.episodes held-out tasks, in their own order.

        seed: for the samples.
        Returns: as in `evaluation.play_held_out`; the Episodes hold no tokens.
        """
        count = self._config.evaluation.episodes
        tasks = task_numbers("held_out", None, range(count), self._spec.num_tasks)
        episodes = Episodes.zeros(count, self._spec.max_turns, 1, 1)
        buffer = EpisodeBuffer(episodes, np.arange(count), self._config.rollout.history_length, self._config.env.strict)
        requests: dict[Future[_Answer], int] = {}
        unplayed: list[tuple[int, EnvFailure]] = []
        refused: dict[int, str] = {}
        self._workers.discard_answers()
        self._workers.send([(episode, task, ()) for episode, task in enumerate(tasks)])
        name, pending, ended, won = "greedy" if decoding.temperature == 0 else f"sampled, seed {seed}", count, 0, 0
        pool = ThreadPoolExecutor(AT_ONCE)
        with contextlib.ExitStack() as ended_with, Progress(name, count, "episode") as progress:
            ended_with.callback(pool.shutdown, wait=False, cancel_futures=True)  # queued requests are never sent
            while requests or pending:
                for episode, output in [*unplayed, *self._workers.receive(0 if requests or unplayed else 1)]:
                    pending -= 1
                    output = with_budget(output, episode, self._config.env.budgets)
                    if buffer.add_output(episode, output):
                        draw = seed, episode, buffer.turn(episode)
                        requests[pool.submit(self._answer, buffer.prompt_input(episode), decoding, draw)] = episode
                    else:
                        ended += 1
                        won += isinstance(output, EnvOutput) and bool(output.won)
                        progress.update(1, {"won": f"{won / ended:.2f}"})
                unplayed = []
                answered, _ = wait(requests, timeout=0.05 if pending else None, return_when=FIRST_COMPLETED)
                for future in answered:
                    episode = requests.pop(future)
                    try:
                        text, whole = future.result()
                    except self._failures as error:
                        if getattr(error, "status_code", None) not in REFUSED:
                            raise RunError(self._describe_error(error)) from None
                        refused[episode] = self._describe_error(error)
                        if buffer.turn(episode):
                            log.warning("episode %d ends unsolved: %s", episode, refused[episode])
                            ended += 1
                            progress.update(1, {"won": f"{won / ended:.2f}"})
                            continue
                        unplayed.append((episode, EnvFailure(refused[episode])))
                    else:
                        parsed = self._template.parse(text, self._entry.fallback, lower_case=self._entry.lower_case)
                        nothing = SlotResponse(episode, np.zeros(0, np.int32), np.zeros(0, np.float32))
                        actions = buffer.add_response(Prompt([]), nothing, parsed, whole)
                        self._workers.send([(episode, tasks[episode], actions)])
                    pending += 1
        if len(buffer.excluded) == count and refused:
            raise RunError(next(iter(refused.values())))
        episodes, report = buffer.result()
        assert report is not None  # a host rollout has one
        stories = [report.story(episodes, i, self._spec.roles).text() for i in range(count)]
        for episode in refused.keys() - report.failures.keys():
            stories[episode] += f"\nended by a refusal: {refused[episode]}\n"
        return episodes, report.scores, stories

    def _describe_error(self, error: Exception) -> str:
        return f"{self._policy}: {one_line(f'{type(error).__name__}: {error}')[:300]}"

    def _answer(self, prompt: PromptInput, decoding: Decoding, draw: tuple[int, ...]) -> _Answer:
        """Asks for an answer to a prompt. draw: makes the seed of its sample."""
        seed = int(np.random.SeedSequence(draw).generate_state(1)[0]) % 2**31
        message = sanitized(self._template.render(prompt))
        return self._ask(self._client, message, decoding, seed, self._config.rollout.response_limit)

    def _ask(self, client, message: str, decoding: Decoding, seed: int, limit: int) -> _Answer:
        """Asks the server for an answer of at most `limit` tokens to one user message. Raises ValueError if there is none."""
        request: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": limit,
            "temperature": float(np.asarray(decoding.temperature)),
            "top_p": float(np.asarray(decoding.top_p)),
            "seed": seed,
        }
        if self._config.rollout.stop:
            request["stop"] = list(self._config.rollout.stop)
        completion = client.chat.completions.create(**request)
        if not getattr(completion, "choices", None):  # the client turns a page that is not an API's into a string
            raise ValueError("what it sent has no choices; such a URL usually ends in /v1")
        choice = completion.choices[0]
        text = choice.message.content or ""
        # Some servers take the reasoning out of the text, others leave out the tag that the chat template has written.
        thought = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
        if not thought and THINK not in text:
            thought, text = split_thought(text)
        if thought and not self._template.bare:
            text = f"{THINK}{thought.removesuffix(THINK_END)}{THINK_END}{text}"
        return _Answer(text, choice.finish_reason != "length")
