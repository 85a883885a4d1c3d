"""`python -m hgpo_jax.bench NAME`: measures and prints a table; --json FILE also writes its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hgpo_jax.bench import (
    accelerator,
    advantages,
    attention,
    chat,
    conversations,
    environments,
    limits,
    plan,
    rollout,
    sample,
    serving,
    training,
    update,
)
from hgpo_jax.config import cli
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write

BENCHES = {
    "accelerator": accelerator,
    "advantages": advantages,
    "attention": attention,
    "chat": chat,
    "conversations": conversations,
    "envs": environments,
    "plan": plan,
    "rollout": rollout,
    "sample": sample,
    "serve": serving,
    "train": training,
    "update": update,
}


def table(rows: list[dict]) -> str:
    """Formats rows as a Markdown table; missing values stay empty."""
    cell = lambda value: "" if value is None else (value if isinstance(value, str) else f"{value:,.3g}")  # noqa: E731
    lines = ["| what | value | unit | share of limit | ratio to peer |", "|---|---|---|---|---|"]
    for row in rows:
        share = row.get("limit_share")
        share = "" if share is None else f"{share:.0%}"
        lines.append(f"| {row['name']} | {cell(row['value'])} | {row['unit']} | {share} | {cell(row.get('ratio'))} |")
    return "\n".join(lines)


def main() -> None:
    # One parser for each benchmark, because argparse allows `field=value` between options in a parser without commands only.
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        meanings = {name: (module.__doc__ or "").partition("\n")[0] for name, module in BENCHES.items()}
        listed = "\n".join(f"  {name:13s} {meaning}" for name, meaning in meanings.items())
        p = cli.parser("bench", f"{__doc__}\n\nNAME is one of\n{listed}")
        p.add_argument("name", metavar="NAME", choices=BENCHES)
        p.parse_args()
    module = BENCHES[name]
    p = cli.parser(f"bench {name}", module.__doc__)
    module.add_arguments(p)
    p.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    args = p.parse_intermixed_args(sys.argv[2:])
    # A device or a pipe would be replaced by a file.
    if args.json and (not Path(args.json).parent.is_dir() or (Path(args.json).exists() and not Path(args.json).is_file())):
        raise ConfigError(f"--json {args.json}: cannot be written; give a file in a folder that exists")
    rows = [*module.run(args), limits.machine()]
    print(table(rows))
    if args.json:
        with atomic_write(args.json) as file:
            file.write(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
