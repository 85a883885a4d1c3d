"""A game in TextWorld itself, for tests and recordings. Needs the extra `alfworld-check`; Python 3.11 or 3.12.

PYTHONPATH=. python tests/alfworld/textworld_original.py     # writes data/recorded.jsonl anew
"""

import json
import random
from pathlib import Path

import textworld
from textworld.envs.pddl import PddlEnv

from hgpo_jax.envs.alfworld.game import Game, load_game
from hgpo_jax.envs.alfworld.planner import Unsolvable, plan


class Original:
    """A game in TextWorld, with ALFWorld's names for things."""

    def __init__(self, path: Path, logic: Path | None) -> None:
        data = json.loads(path.read_text())
        if logic is not None:
            task = data["grammar"].split("Your task is to: ")[1].split('."')[0]
            data["pddl_domain"] = (logic / "alfred.pddl").read_text()
            data["grammar"] = (logic / "alfred.twl2").read_text().replace("UNKNOWN GOAL", task)
        self.env = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        self.env.load(data)
        names = self.names(self.env._entity_infos)
        for info in self.env._entity_infos.values():
            info.name = names[info.id]

    @staticmethod
    def names(infos: dict) -> dict[str, str]:
        """ALFWorld's own naming where it is installed, else the rule as the reference describes it."""
        try:
            from alfworld.agents.utils.misc import Demangler
        except ImportError:
            groups: dict[str, list[str]] = {}
            for id in sorted(infos):
                name, bar, _ = id.partition("_bar_")
                groups.setdefault(name + ("basin" if "basin" in id else "") if bar else id, []).append(id)
            return {
                id: f"{name} {len(ids) - i if '_bar_' in id else ''}"
                for name, ids in groups.items()
                for i, id in enumerate(ids)
            }
        demangler = Demangler(game_infos=infos)
        return {id: demangler.demangle_alfred_name(id) for id in infos}

    def reset(self) -> tuple[str, list[str]]:
        state = self.env.reset()
        return state.feedback, state["admissible_commands"]

    def step(self, command: str) -> tuple[str, list[str], bool]:
        state, _, _ = self.env.step(command)
        return state.feedback, state["admissible_commands"], state["won"]


def choose(chance: random.Random, game: Game) -> str:
    """A command: one of a random verb, any admissible one, the planner's next, or one that is not admissible."""
    kind, commands = chance.random(), game.commands
    if kind < 0.35:
        verb = chance.choice(sorted({command.split()[0] for command in commands}))
        return chance.choice([command for command in commands if command.split()[0] == verb])
    if kind < 0.7:
        try:
            return (plan(game) or commands)[0]
        except Unsolvable:
            return chance.choice(commands)
    if kind < 0.8:
        word = chance.choice(commands)
        broken = [word.upper(), word + " 1", word[:-1], f"  {word}\n", word.replace(" ", "  "), "", "xyzzy", "help me"]
        return chance.choice(broken)
    return chance.choice(commands)


def record(path: Path, logic: Path | None, seed: int, steps: int) -> dict:
    """One episode as TextWorld tells it (the engine only helps to choose commands)."""
    chance, original, game = random.Random(seed), Original(path, logic), load_game(path, logic)
    observation, commands = original.reset()
    story = {"obs": observation, "admissible_commands": commands, "steps": []}
    for _ in range(steps):
        command = choose(chance, game)
        observation, commands, won = original.step(command)
        game.step(command)
        story["steps"].append({"action": command, "obs": observation, "admissible_commands": commands, "won": won})
    return story


if __name__ == "__main__":
    from alfworld_places import DATA, GAMES, LOGIC, TINY

    episodes = [(path, logic, seed) for seed, path in enumerate(GAMES) for logic in (None, LOGIC)]
    episodes += [(TINY, None, seed) for seed in range(4)]
    with (DATA / "recorded.jsonl").open("w") as out:
        for game_path, folder, seed in episodes:
            story = {"game": game_path.relative_to(DATA).as_posix(), "logic": folder is not None}
            out.write(json.dumps(story | record(game_path, folder, seed, steps=40)) + "\n")
