"""`python -m hgpo_jax`, installed as `hgpo`: lists the commands and runs one of them.

hgpo train learner.lr=1e-3                  as python -m hgpo_jax.train learner.lr=1e-3
eval "$(register-python-argcomplete hgpo)"  what is typed can be completed, in bash and zsh (extra completion)
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.metadata import version

from hgpo_jax.envs.command_line import complete, nearest, run
from hgpo_jax.utils.errors import ConfigError

COMMANDS = {
    "train": ("hgpo_jax.train", "train an agent: in the household, by a configuration, or your own environment"),
    "evaluate": ("hgpo_jax.evaluate", "success on held-out tasks, with intervals"),
    "watch": ("hgpo_jax.watch", "see a trained policy play, turn by turn"),
    "report": ("hgpo_jax.report", "runs as one HTML page: curves, groups, every step's advantage"),
    "export": ("hgpo_jax.export", "a run's policy as a Hugging Face folder"),
    "tables": ("hgpo_jax.tables", "tables of runs, the paper's among them: plan, run, draw"),
    "chat": ("hgpo_jax.chat", "talk to a language model"),
    "serve": ("hgpo_jax.serve", "a policy behind OpenAI's and Anthropic's APIs"),
    "bench": ("hgpo_jax.bench", "speed and memory, as shares of what the machine can do"),
    "check": ("hgpo_jax.check", "say what is wrong with an environment, and what its episodes are like"),
    "credit": ("hgpo_jax.credit", "score estimators against true advantages of snapshots"),
    "play": ("hgpo_jax.envs.play", "play an environment yourself"),
}


def main() -> None:
    command = _command_to_complete() or sys.argv[1:2]
    if command == ["--version"]:
        print(f"hgpo_jax {version('hgpo_jax')}")
    elif not command or command[0] in ("-h", "--help"):
        print("usage: hgpo COMMAND ...        hgpo COMMAND --help explains one\n")
        print("\n".join(f"  {name:10s}{meaning}   (python -m {module})" for name, (module, meaning) in COMMANDS.items()))
    elif command[0] not in COMMANDS:
        raise ConfigError(f"{command[0]}: no such command; {nearest(command[0], list(COMMANDS))}")
    else:
        del sys.argv[1:2]
        if "" not in sys.path and os.getcwd() not in sys.path:  # where `python -m` finds a user's modules, too
            sys.path.insert(0, os.getcwd())
        runpy.run_module(COMMANDS[command[0]][0], run_name="__main__", alter_sys=True)


def _command_to_complete() -> list[str]:
    """Returns the command whose arguments a shell wants to complete, if any. Completes the command itself, too."""
    if "_ARGCOMPLETE" not in os.environ:
        return []
    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(typed) > 2 and typed[1] in COMMANDS:
        os.environ["_ARGCOMPLETE"] = "2"  # the number of words that belong to the program
        return [typed[1]]
    p = argparse.ArgumentParser()
    p.add_argument("command", choices=list(COMMANDS))
    complete(p)
    return []


def command() -> None:
    """Runs the console script."""
    run(main, (ConfigError,))


if __name__ == "__main__":
    command()
