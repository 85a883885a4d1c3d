"""`python -m hgpo_jax.bench NAME`: measures and prints a table; --json FILE also writes its rows."""

from __future__ import annotations

import json
from pathlib import Path

from hgpo_jax import cli
from hgpo_jax.bench import advantages, environments, training

BENCHES = {
    "advantages": (advantages, "estimators against the dictionary loop of host code"),
    "envs": (environments, "environments: resets and steps per second"),
    "train": (training, "one iteration of the main job by phase, against the machine's matmul rate"),
}


def table(rows: list[dict]) -> str:
    """Rows as a Markdown table; what a row does not have stays empty."""
    shown = lambda value: "" if value is None else (value if isinstance(value, str) else f"{value:,.3g}")  # noqa: E731
    lines = ["| what | value | unit | share of limit | ratio to peer |", "|---|---|---|---|---|"]
    for row in rows:
        share = row.get("limit_share")
        share = "" if share is None else f"{share:.0%}"
        lines.append(f"| {row['name']} | {shown(row['value'])} | {row['unit']} | {share} | {shown(row.get('ratio'))} |")
    return "\n".join(lines)


def main() -> None:
    p = cli.parser("bench", __doc__)
    commands = p.add_subparsers(dest="bench", metavar="NAME", required=True, parser_class=cli.Parser)
    for name, (module, meaning) in BENCHES.items():
        command = commands.add_parser(name, help=meaning, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(command)
        command.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    args = p.parse_args()
    rows = BENCHES[args.bench][0].run(args)
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
