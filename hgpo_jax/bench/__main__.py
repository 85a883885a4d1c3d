"""`python -m hgpo_jax.bench NAME`: measures and prints a table; --json FILE also writes its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hgpo_jax.bench import accelerator, advantages, environments, limits, plan, rollout, sample, serving, training, update
from hgpo_jax.config import cli
from hgpo_jax.utils.errors import ConfigError

BENCHES = {
    "accelerator": (accelerator, "one command for a lent accelerator: what no CPU can show, within a number of minutes"),
    "advantages": (advantages, "estimators against the dictionary loop of host code"),
    "envs": (environments, "environments: resets and steps per second"),
    "plan": (plan, "memory on each device, before anything is allocated; the real TPU compiler's count of it"),
    "rollout": (rollout, "text rollouts with long answers: continuous batching beside lockstep"),
    "sample": (sample, "the sampler with random weights of any shape, against bandwidth, matmul rate and transformers"),
    "serve": (serving, "a served policy beside the same sampler called directly: tokens per second, time to the first token"),
    "train": (training, "one iteration of the default run by phase, against the machine's matmul rate"),
    "update": (update, "the update with random weights of any shape, against the matmul rate and transformers"),
}


def table(rows: list[dict]) -> str:
    """Formats rows as a Markdown table; missing values stay empty."""
    shown = lambda value: "" if value is None else (value if isinstance(value, str) else f"{value:,.3g}")  # noqa: E731
    lines = ["| what | value | unit | share of limit | ratio to peer |", "|---|---|---|---|---|"]
    for row in rows:
        share = row.get("limit_share")
        share = "" if share is None else f"{share:.0%}"
        lines.append(f"| {row['name']} | {shown(row['value'])} | {row['unit']} | {share} | {shown(row.get('ratio'))} |")
    return "\n".join(lines)


def main() -> None:
    # One parser for each benchmark, because argparse allows `field=value` between options in a parser without commands only.
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        known = "\n".join(f"  {name:12s} {meaning}" for name, (_, meaning) in BENCHES.items())
        p = cli.parser("bench", f"{__doc__}\n\nNAME is one of\n{known}")
        p.add_argument("name", metavar="NAME", choices=BENCHES)
        p.parse_args()
    module, _ = BENCHES[name]
    p = cli.parser(f"bench {name}", module.__doc__)
    module.add_arguments(p)
    p.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    args = p.parse_intermixed_args(sys.argv[2:])
    if args.json and (not Path(args.json).parent.is_dir() or Path(args.json).is_dir()):
        raise ConfigError(f"--json {args.json}: cannot be written; give a file in a folder that exists")
    rows = [*module.run(args), limits.machine()]
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
