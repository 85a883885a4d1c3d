"""`python -m hgpo_jax.watch RUN`: a trained policy plays a held-out task, turn by turn, with the probability of what it says.

    python -m hgpo_jax.watch RUN                                 the first task of its evaluation, as it was played there
    python -m hgpo_jax.watch RUN --task 7 --greedy               another, always with the most likely tokens
    python -m hgpo_jax.watch HF_FOLDER --config household        a policy without a run, as `export` writes
    python -m hgpo_jax.watch RUN --gif episode.gif               what a policy that sees was shown, as a film

In a terminal, Enter shows the next turn.
"""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from hgpo_jax import config as configuration
from hgpo_jax.config import cli
from hgpo_jax.config.policies import policy_of_each
from hgpo_jax.evaluation.held_out import sampled_decoding
from hgpo_jax.rollout.environments import environment
from hgpo_jax.setup.build import build
from hgpo_jax.setup.devices import prepare_devices
from hgpo_jax.utils import remote
from hgpo_jax.utils.errors import ConfigError, printable
from hgpo_jax.utils.files import atomic_write

FILM_SIDE, FRAME_MS = 256, 500  # pixels up to which small pictures are magnified; of a film, milliseconds a turn
EACH = 8  # a response of up to this many tokens shows each probability; a longer one the mean and the least


def probabilities(tokens: list[str], logp: np.ndarray) -> str:
    """Describes a response's tokens and their log-probabilities f32[R] in a line."""
    chances = np.exp(logp)
    if len(tokens) <= EACH:
        parts = ", ".join(f"{token.strip() or repr(token)} {chance:.0%}" for token, chance in zip(tokens, chances, strict=True))
    else:
        least = int(np.argmin(logp))
        parts = f"{len(tokens)} tokens, {chances.mean():.0%} each on average, least {tokens[least]!r} {chances[least]:.0%}"
    return f"probability {np.exp(logp.sum()):.1%}: {parts}"


def show(turns: list[str], notes: list[str], outcome: str) -> None:
    """Prints the turns; in a terminal each one after Enter."""
    for number, (turn, note) in enumerate(zip(turns, notes, strict=True), 1):
        print(f"{turn}\n      {printable(note)}", flush=True)
        if sys.stdin.isatty() and number < len(turns):
            with contextlib.suppress(EOFError):
                input(f"turn {number}> ")
    print(f"\n{outcome} after {len(turns)} turns")


def save_film(path: Path, pictures: np.ndarray) -> None:
    """Writes pictures uint8[T, H, W, 3] as a GIF, one after the other; small ones are magnified by a whole number."""
    times = max(1, FILM_SIDE // max(pictures.shape[1:3]))
    frames = [Image.fromarray(picture) for picture in pictures.repeat(times, 1).repeat(times, 2)]
    with atomic_write(path, "wb") as file:
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)


def main() -> None:
    p = cli.parser("watch", __doc__)
    cli.add_trained_policy(p)
    p.add_argument("--task", type=int, default=0, metavar="N", help="number of the held-out task; default: 0")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampled tokens; default: 0, the evaluation's")
    p.add_argument("--greedy", action="store_true", help="take the most likely tokens; default: sample as the evaluation does")
    p.add_argument("--gif", type=Path, metavar="FILE.gif", help="save the pictures that the policy was shown, as a film")
    args = p.parse_intermixed_args()
    if args.gif and (args.gif.suffix != ".gif" or not args.gif.parent.is_dir()):
        raise ConfigError(f"--gif {args.gif}: must be a .gif file in a folder that exists")
    for name, value in (("task", args.task), ("seed", args.seed)):
        if not 0 <= value < 2**31:
            raise ConfigError(f"--{name} {value}: must be from 0 to {2**31 - 1}")
    args.run = remote.local(args.run)
    source, overrides = cli.trained_policy(args)
    config = configuration.load(source, overrides)
    if args.gif and not environment(config.env).is_seen:
        raise ConfigError(f"--gif {args.gif}: env.name={config.env.name} shows no pictures; leave it out")
    mesh = prepare_devices(config)
    # The minimum that the devices can share and that a group has; each has its budget of turns as in the evaluation.
    episodes = math.lcm(max(2, mesh.shape["data"] * mesh.shape["fsdp"]), len(config.env.budgets) or 1)
    row = args.task % (len(config.env.budgets) or 1)
    small = ["rollout.prompt_groups=1", f"rollout.group_size={episodes}"]
    job = build(configuration.load(source, [*overrides, *small]), mesh, trains=False)
    if job.runner.num_held_out_tasks and args.task >= job.runner.num_held_out_tasks:
        raise ConfigError(f"--task {args.task}: there are {job.runner.num_held_out_tasks} held-out tasks, counted from 0")

    last = (job.runner.num_held_out_tasks or 2**31) - 1
    index = jnp.asarray(np.clip(args.task - row + np.arange(episodes), 0, last).astype(np.int32))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(args.seed), index)
    decoding = sampled_decoding(job.config.evaluation)
    decoding = decoding.replace(temperature=0.0) if args.greedy else decoding
    tasks, params = job.runner.select_tasks("held_out", 0, index), job.base_rollout_params(job.given_params)
    result = jax.device_get(job.runner.rollout(params, tasks, keys, index, decoding, held_out=True))
    story, played = job.runner.story(result, row), result.episodes
    of_role, notes = [job.policies[name] for name in policy_of_each(job.config, job.runner.roles)], []
    for t in range(len(story.turns)):
        length = played.response_lengths[row, t]
        tokenizer = of_role[played.agents[row, t]].initial.tokenizer
        tokens = [tokenizer.decode([token]) for token in played.responses[row, t, :length]]
        notes.append(probabilities(tokens, played.logp[row, t, :length]))
    if args.gif:
        save_film(args.gif, played.pictures[row, : len(story.turns)])
    print(f"task: {story.task}")
    show(story.turns, notes, story.outcome)


if __name__ == "__main__":
    cli.run(main)
