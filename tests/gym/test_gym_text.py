"""Gymnasium's environments and MiniGrid's levels as text environments."""

import itertools
import json
import re
import subprocess
import sys
from collections import Counter, deque

import gymnasium
import minigrid  # noqa: F401 (registers its levels)
import numpy as np
import pytest
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.core.grid import Grid

from hgpo_jax.config import load
from hgpo_jax.envs import minigrid_text, user_code
from hgpo_jax.envs.gym_text import GymnasiumText, plain
from hgpo_jax.envs.protocol import TextExpert
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.requirements import check_text
from hgpo_jax.trainer import provenance
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused

TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))  # each release knows the newest version alone
CLIFF = max(name for name in gymnasium.registry if name.startswith("CliffWalking-v"))
LARGEST = 2**64 - 1


def play(env, task, commands):
    """Everything that an episode with these commands returns, up to its end."""
    answers = [env.reset(task)]
    for command in commands:
        answers.append(env.step(command))
        if answers[-1][3]:
            break
    return answers


def said(won=False, admissible=True, truncated=False):
    """The info of a step."""
    return {"won": won, "admissible": admissible, "truncated": truncated}


# -- Gymnasium's own ------------------------------------------------------------------------------------------------


def test_frozen_lake_is_walked_over_by_its_commands():
    env = GymnasiumText("FrozenLake-v1", is_slippery=False)
    assert (env.max_turns, env.task_types, isinstance(env, TextExpert)) == (100, ("FrozenLake-v1",), False)
    check_text(env)
    first, *later = play(env, 0, ["right", "right", "down", "down", "down", "right"])
    assert first == ("[S] F F F\nF H F H\nF F F H\nH F F G", ["left", "down", "right", "up"])
    assert later[0][0] == "S [F] F F\nF H F H\nF F F H\nH F F G"
    assert later[-1][0] == "S F F F\nF H F H\nF F F H\nH F F [G]"
    assert [answer[2:] for answer in later] == [(0.0, False, said())] * 5 + [(1.0, True, said(won=True))]
    assert env.goal.startswith("walk from S") and "[]" in env.goal
    *_, (seen, _, reward, done, info) = play(env, 0, ["right", "down"])
    assert (seen.split("\n")[1], reward, done, info["won"]) == ("F [H] F H", 0.0, True, False)


def test_tasks_are_seeds_of_everything_random():
    make = lambda: GymnasiumText("FrozenLake-v1", map_name="8x8")  # noqa: E731 (slippery)
    used, commands = make(), ["right", "down"] * 50
    episodes = {task: play(used, task, commands) for task in (0, 1, 2, 3, LARGEST)}
    assert len({str(episode) for episode in episodes.values()}) == 5
    assert all(play(env, task, commands) == episodes[task] for task in episodes for env in (used, make()))
    assert used.reset(np.uint64(3)) == episodes[3][0]


def test_seeds_fit_into_31_bits():
    """Many environments take no others; tasks have 64."""
    env = GymnasiumText("FrozenLake-v1")
    seeds = []
    env._env.unwrapped.reset = (lambda reset: lambda *, seed, **more: seeds.append(seed) or reset(seed=seed, **more))(
        env._env.unwrapped.reset
    )
    for task in (5, 2**31 + 5, LARGEST):
        env.reset(task)
    assert seeds == [5, 5, 2**31 - 1]


def test_options_have_the_types_of_its_arguments_and_others_are_gymnasiums():
    given = {"id": "FrozenLake-v1", "actions": "w,s,e,n", "won_above": "0.5", "max_turns": "7", "map_name": "8x8"}
    env = GymnasiumText(**user_code.options(GymnasiumText, given))
    seen, commands = env.reset(0)
    assert (len(seen.split("\n")), commands, env.max_turns) == (8, ["w", "s", "e", "n"], 7)


def test_a_command_that_is_none_takes_a_turn_and_changes_nothing():
    env, other = (GymnasiumText("FrozenLake-v1", max_turns=4) for _ in range(2))
    first = env.reset(5)
    for nonsense in ("jump", "", "Left"):
        assert env.step(nonsense) == (*first, 0.0, False, said(admissible=False))
    last = env.step(" left ")
    other.reset(5)
    assert last == (*other.step("left")[:3], True, said(truncated=True))
    longer = GymnasiumText("FrozenLake-v1", is_slippery=False, max_turns=150)
    assert len(play(longer, 0, ["left"] * 200)) == 151


def route(level):
    """A shortest way to win from a Taxi's state, by its table of transitions."""
    came, left = {int(level.s): []}, deque([int(level.s)])
    while left:
        state = left.popleft()
        for action, [(_, after, reward, done)] in level.P[state].items():
            if done and reward == 20:
                return [*came[state], action]
            if after not in came:
                came[after] = [*came[state], action]
                left.append(after)


@pytest.mark.parametrize("task", [0, LARGEST])
def test_taxi_shows_its_state_and_is_solved(task):
    env = GymnasiumText(TAXI)
    names = ("south", "north", "east", "west", "pick up", "drop off")
    seen, commands = env.reset(task)
    # What its mask rules out does nothing, and costs no 10 points.
    assert env.step("drop off") == (seen, commands, 0.0, False, said(admissible=False))
    level, total = env._env.unwrapped, 0.0
    plan = route(level)
    for number, action in enumerate(plan):
        taxi_row, taxi_column, passenger, destination = level.decode(level.s)
        lines = seen.split("\n")[1:-1]
        cells = [re.findall(r"[|:]([^|:]+)", line) for line in lines]
        where = lambda marks: [(r, c) for r, c in itertools.product(range(5), range(5)) if marks[0] in cells[r][c]]  # noqa: E731, B023
        assert len(lines) == 5 and where("[]") == [(taxi_row, taxi_column)] and where("()") == [level.locs[destination]]
        assert where("**") == ([level.locs[passenger]] if passenger < 4 else [])
        assert names[action] in commands and ("pick up" in commands) == (names[action] == "pick up")
        seen, commands, reward, done, info = env.step(names[action])
        total += reward
        assert done == info["won"] == (number == len(plan) - 1)
    assert total == 20 - (len(plan) - 1)


def test_a_cliff_whose_reward_is_never_above_zero():
    env = GymnasiumText(CLIFF, max_turns=20)
    first, fallen = play(env, 0, ["right"])
    assert first[0].split("\n")[-1] == "x  C  C  C  C  C  C  C  C  C  C  T"
    assert fallen == (*first, -100.0, False, said())
    assert play(env, 0, ["up", *["right"] * 11, "down"])[-1][2:] == (-1.0, True, said(won=True))


def test_blackjack_as_numbers_and_by_a_describing_function(tmp_path, monkeypatch):
    source = "def told(seen, level):\n    return f'{seen[0]} against {seen[1]} of {level.dealer_top_card_suit}'\n"
    (tmp_path / "cards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    numbers = GymnasiumText("Blackjack-v1", max_turns=10)
    told = GymnasiumText("Blackjack-v1", describe="cards.py:told", max_turns=10, won_above=-1, goal="play")
    seen, commands = numbers.reset(3)
    assert re.fullmatch(r"\d+, \d+, [01]", seen) and commands == ["stick", "hit"] and "your sum" in numbers.goal
    assert re.fullmatch(r"{} against {} of [CDHS]".format(*seen.split(", ")), told.reset(3)[0])
    assert told.goal == "play"
    # The code that describes is recorded, and a part of what a warm start depends on.
    fields = ["env.name=gymnasium:Blackjack-v1", "env.options.describe=cards.py:told", "env.options.max_turns=5"]
    config = load(None, fields)
    provenance.record(config, tmp_path, 0)
    about = json.loads((tmp_path / "provenance.json").read_text())[0]["env.options.describe"]
    assert (about["name"], about["file"]) == ("cards.py:told", str(tmp_path / "cards.py"))
    assert about["sha256"] in environment(config.env).digest
    assert user_code.code_in({"describe": "none.py:told", "goal": "a:b", "size": 3, "file": "cards.py:not a name"}) == {}
    won = Counter(env.step("stick")[4]["won"] for task in range(40) for env in (numbers, told) if env.reset(task))
    draws = sum(numbers.step("stick")[2] == 0 for task in range(40) if numbers.reset(task))
    assert draws and won[True] == 2 * sum(numbers.step("stick")[2] > 0 for task in range(40) if numbers.reset(task)) + draws


def test_names_of_actions_and_a_goal_of_ones_own():
    env = GymnasiumText("CartPole-v1", describe=f"{__name__}:told", actions=("to the left", "to the right"))
    assert env.reset(0) == ("upright", ["to the left", "to the right"]) and env.goal == "solve CartPole-v1"
    assert GymnasiumText("CartPole-v1", describe=f"{__name__}:told").reset(0)[1] == ["action 0", "action 1"]


class Survey(gymnasium.Wrapper):
    """Says itself whether it succeeded, after three steps."""

    def __init__(self, steps=3, **info):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.steps, self.said = steps, info

    def reset(self, **given):
        self.left = self.steps
        return self.env.reset(**given)

    def step(self, action):
        self.left -= 1
        seen, reward, _, _, _ = self.env.step(action)
        return seen, reward, self.left == 0, False, self.said


gymnasium.register("Survey-v0", entry_point=Survey)
FALL, STAND = {"id": "CartPole-v1"}, {"id": "CartPole-v1", "max_turns": 3}


@pytest.mark.parametrize(("given", "won", "truncated"), [  # its rewards of 1 a step say nothing; a fall ends it
    (FALL, None, False), (STAND, None, True),
    (FALL | {"survival": True}, False, False), (STAND | {"survival": True}, True, True),
    (FALL | {"won_above": 0.5}, True, False), (STAND | {"won_above": 0.5}, False, True),
    ({"id": "Survey-v0", "is_success": np.True_, "max_turns": 9}, True, False),
    ({"id": "Survey-v0", "success": 0.0, "max_turns": 9}, False, False), ({"id": "Survey-v0", "max_turns": 9}, None, False),
    ({"id": "Survey-v0", "success": False, "max_turns": 9, "won_above": 0.5}, True, False),
    ({"id": "Survey-v0", "success": True, "max_turns": 2}, True, True), ({"id": "Survey-v0", "success": None}, None, False),
    ({"id": "Survey-v0", "is_success": None, "success": True, "max_turns": 9}, True, False),
])  # fmt: skip
def test_success_is_what_is_said_and_a_time_limit_is_no_end_of_the_task(given, won, truncated):
    *before, (_, _, _, done, info) = play(GymnasiumText(describe=f"{__name__}:told", **given), 0, ["action 0"] * 50)
    assert done and info == said(won=won, truncated=truncated)
    assert all(answer[4] == said() for answer in before[1:])


def test_whoever_gives_no_command_does_not_survive():
    env = GymnasiumText(describe=f"{__name__}:told", survival=True, **STAND)
    for words, won in ((["wait"] * 3, False), (["action 0", "wait", "action 1"], False), (["action 0", "action 1"] * 2, True)):
        *_, (_, _, _, done, info) = play(env, 0, words[:3])
        assert done and info == said(won=won, truncated=True, admissible=words[2] != "wait"), words


class Drawn(Survey):
    """Draws a text, or a list of its lines, or something else."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(self, drawing, render_mode=None):
        super().__init__()
        self.drawing = drawing

    def render(self):
        return self.drawing


gymnasium.register("Drawn-v0", entry_point=Drawn)


def test_a_drawing_is_a_text_or_its_lines():
    for drawing in ("a\nb", ["a", "b"], ("a", "b")):
        env = GymnasiumText("Drawn-v0", drawing=drawing)
        assert env.reset(0)[0] == "a\nb"
        env.close()
    with refused("id=Drawn-v0: draws a ndarray instead of a text; give the option describe=FILE.py:NAME"):
        GymnasiumText("Drawn-v0", drawing=np.zeros(3)).reset(0)


def told(observation, level):
    return "upright" if abs(observation[2]) < level.theta_threshold_radians else "fallen"


REGISTERS = "import gymnasium\ngymnasium.register('Mine-v0', entry_point='gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv')\n"


@pytest.mark.parametrize("place", ["./lakes.py", "lakes.py", "lakes_on_the_path"])
def test_code_of_ones_own_registers_it(tmp_path, monkeypatch, place):
    (tmp_path / "lakes.py").write_text(REGISTERS)
    (tmp_path / "lakes_on_the_path.py").write_text(REGISTERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    gymnasium.registry.pop("Mine-v0", None)
    config = load(None, [f"env.name=gymnasium:{place}:Mine-v0", "env.options.max_turns=5"])
    makers = environment(config.env).text(config)
    assert makers[0]().reset(0)[0].startswith("[S]")
    if place.endswith(".py"):
        assert makers[0]().task_types == ("Mine-v0",)
        provenance.record(config, tmp_path, 0)
        assert str(tmp_path / "lakes.py") in (tmp_path / "provenance.json").read_text()
    wrong = f"gymnasium:{place.replace('lakes', 'ponds')}:Mine-v0"
    with pytest.raises(ConfigError, match=f"^env.name={wrong}: .*ponds"):
        environment(load(None, [f"env.name={wrong}"]).env)


def test_colours_become_brackets():
    assert plain("  (Up)\nA\x1b[41mB\x1b[0m\nCD\n") == "A [B]\nC D"
    assert plain("|\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m: \x1b[35mG\x1b[0m|\n\n") == "|*[R]*: (G)|"
    assert plain("a (b) c\nd\n  (Up)\n") == "a (b) c\nd"
    assert plain("\x1b[2Jone two") == "one two" and plain("word") == "word"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "Pendulum-v1"}, r"id=Pendulum-v1: its actions are Box\(.*; choose one with discrete actions, or texts"),
        ({"id": "CartPole-v1"}, r"id=CartPole-v1: its observations are Box\(.* give the option describe=FILE.py:NAME"),
        ({"id": "Blackjack-v1"}, "max_turns=0: Blackjack-v1 has no limit of its own; give the option max_turns=N"),
        ({"id": "FrozenLake-v1", "max_turns": -3}, "max_turns=-3: must be a whole number above 0"),
        ({"id": "FrozenLake-v1", "won_above": 0.5, "survival": True}, "won_above=0.5: survival=true decides what is won"),
        ({"id": "FrozenLake-v1", "actions": ("a", "b")}, "actions=a,b: FrozenLake-v1 has 4 actions; name each"),
        ({"id": "FrozenLake-v1", "actions": ("a", "b", "c", "a ")}, "actions=a,b,c,a: FrozenLake-v1 has 4 actions"),
        ({"id": "FrozenLake-v1", "slipery": True}, "id=FrozenLake-v1: cannot be made: .*slipery"),
        ({"id": "FrozenLake-v1", "describe": "none.py:told"}, "describe=none.py:told: no file /.*/none.py"),
        ({"id": "NoSuchGame-v1"}, "id=NoSuchGame-v1: cannot be made: .*NoSuchGame"),
        ({"id": "no_such_module:Game-v1"}, "id=no_such_module:Game-v1: cannot be made: .*no_such_module"),
    ],
)
def test_refusals_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        GymnasiumText(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("package", "id"), [("gymnasium", "FrozenLake-v1"), ("minigrid", "BabyAI-GoToObj-v0")])
def test_a_missing_package_names_its_extra(monkeypatch, package, id):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"^id={id}: .*{package}.*; pip install 'hgpo_jax\[{package}\]'$"):
        GymnasiumText(id)


def test_its_module_needs_neither_package():
    script = "import sys, hgpo_jax.envs.gym_text; sys.exit(bool({'gymnasium', 'minigrid', 'jax'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", script], check=True)


# -- MiniGrid -------------------------------------------------------------------------------------------------------


def image(*things):
    """A view of 7 by 7 empty cells with things (right, forward, kind, colour, state)."""
    cells = np.zeros((7, 7, 3), np.uint8)
    cells[..., 0] = OBJECT_TO_IDX["empty"]
    for right, forward, kind, colour, state in things:
        cells[3 + right, 6 - forward] = OBJECT_TO_IDX[kind], COLOR_TO_IDX[colour], STATE_TO_IDX[state]
    return {"image": cells}


def test_views_made_by_hand():
    wall = lambda right, forward: (right, forward, "wall", "grey", "open")  # noqa: E731
    assert minigrid_text.describe(image()) == "You see no things. You carry nothing."
    things = [
        (1, 4, "door", "blue", "locked"), (0, 3, "door", "red", "open"), (-1, 2, "ball", "green", "open"),
        (1, 2, "key", "grey", "open"), (0, 0, "box", "purple", "open"), (3, 0, "goal", "green", "open"),
        (0, 1, "lava", "red", "open"),
    ]  # fmt: skip
    walls = [wall(0, 6), wall(0, 5), wall(-1, 0), wall(-3, 0), wall(2, 3)]
    assert minigrid_text.describe(image(*things, *walls)) == (
        "You see a red lava square 1 step forward; an open red door 3 steps forward; a green ball 2 steps forward and 1 step "
        "left; a grey key 2 steps forward and 1 step right; a green goal square 3 steps right; a locked blue door 4 steps "
        "forward and 1 step right. Walls: 5 steps forward; 1 step left. You carry a purple box."
    )
    unseen = image((2, 1, "ball", "red", "open"))
    unseen["image"][:, :5] = 0
    assert minigrid_text.describe(unseen) == "You see a red ball 1 step forward and 2 steps right. You carry nothing."


STEPS = r"(?:(\d) steps? forward)?(?: and )?(?:(\d) steps? (left|right))?"
THING = re.compile(rf"an? (?:(open|closed|locked) )?(\w+) (\w+)(?: square)? {STEPS}")


def read(seen):
    """A description taken apart: things (state, colour, kind, right, forward), walls (right, forward), and what is carried."""
    things, walls, carried = re.fullmatch(r"You see (.*?)\.(?: Walls: (.*?)\.)? You carry (.*)\.", seen).groups()
    place = lambda forward, side, way: (int(side or 0) * (-1 if way == "left" else 1), int(forward or 0))  # noqa: E731
    found = [THING.fullmatch(each).groups() for each in things.split("; ")] if things != "no things" else []
    sides = [place(*re.fullmatch(STEPS, each).groups()) for each in walls.split("; ")] if walls else []
    return [(*thing[:3], *place(*thing[3:])) for thing in found], sides, carried


@pytest.mark.parametrize("level", ["PutNextLocal", "UnlockLocalDist", "MiniBossLevel"])
def test_descriptions_hold_all_that_is_in_view_at_its_place_in_the_level(level):
    env, random = GymnasiumText(f"BabyAI-{level}-v0", max_turns=1000), np.random.default_rng(0)
    inside, kinds = env._env.unwrapped, Counter()
    chances = np.array([3, 3, 8, 6, 2, 3, 0]) / 25
    for task in range(3):
        seen, commands = env.reset(task)
        for _ in range(40):
            things, walls, carried = read(seen)
            kinds.update((state, kind) for state, _, kind, _, _ in things)
            view, in_view = Grid.decode(inside.gen_obs()["image"])
            expected, sides = Counter(), {}
            for column, row in zip(*np.nonzero(in_view), strict=True):
                cell, right, forward = view.get(int(column), int(row)), int(column) - 3, 6 - int(row)
                if cell is None or (right, forward) == (0, 0):
                    continue
                if cell.type == "wall":
                    if 0 in (right, forward):
                        side = (np.sign(right), np.sign(forward))
                        sides[side] = min(sides.get(side, (9, 9)), (right, forward), key=lambda at: abs(at[0]) + at[1])
                    continue
                door = cell.type == "door"
                state = ("open" if cell.is_open else "locked" if cell.is_locked else "closed") if door else None
                expected[state, cell.color, cell.type, right, forward] += 1
            assert Counter(things) == expected
            assert sorted(walls) == sorted(sides.values())
            distances = [abs(right) + forward for *_, right, forward in things]
            assert distances == sorted(distances)
            held = inside.carrying
            assert carried == (f"a {held.color} {held.type}" if held else "nothing")
            for _, colour, kind, right, forward in things:
                there = inside.grid.get(*(inside.agent_pos + forward * inside.dir_vec + right * inside.right_vec))
                assert (there.color, there.type) == (colour, kind)
            seen, commands, _, done, _ = env.step(str(random.choice(commands, p=chances)))
            if done:
                break
    assert kinds


def test_a_level_has_its_mission_its_actions_and_its_limit():
    env = GymnasiumText("BabyAI-GoToLocal-v0")
    _, commands = env.reset(LARGEST)
    assert commands == ["turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done"]
    assert env.goal == env._env.unwrapped.mission and env.goal.startswith("go to ")
    assert env.max_turns == 64 and len(play(env, 1, itertools.repeat("done", 100))) == 65
    few = GymnasiumText("MiniGrid-Dynamic-Obstacles-5x5-v0")
    assert few.reset(0)[1] == commands[:3] and not isinstance(few, TextExpert)


def test_a_limit_that_depends_on_the_mission_is_the_longest():
    env = GymnasiumText("BabyAI-MiniBossLevel-v0")
    limits = {env._env.unwrapped.max_steps for task in range(40) if env.reset(task)}
    assert len(limits) > 2 and max(limits) <= env.max_turns == 8 * min(limits)
    assert GymnasiumText("BabyAI-MiniBossLevel-v0", max_steps=90).max_turns == 90


def guided(env, task, noise):
    """Whether a task is won with the expert's commands, some of which are replaced by random ones."""
    random, (_, commands) = np.random.default_rng(task), env.reset(task)
    done = False
    while not done:
        command = env.expert(2)
        assert command in commands
        _, _, _, done, info = env.step(str(random.choice(commands)) if random.random() < noise else command)
    return info["won"]


@pytest.mark.parametrize(("level", "noise"), [("GoToLocal", 0), ("OpenDoor", 0), ("PutNextLocal", 0), ("PutNextLocal", 0.4)])
def test_the_bot_solves_levels_and_goes_on_after_commands_that_are_not_its_own(level, noise):
    env = GymnasiumText(f"BabyAI-{level}-v0", max_turns=128 if noise else 60)
    assert isinstance(env, TextExpert)
    assert sum(guided(env, task, noise) for task in range(12)) >= (10 if noise else 11)  # a box that is opened is lost


def test_the_bot_may_be_asked_at_any_turn():
    always, late = (GymnasiumText("BabyAI-GoToLocal-v0") for _ in range(2))
    for task in (4, 4, 9):
        always.reset(task), late.reset(task)
        for turn, command in enumerate(["turn left", "go forward", "nonsense", "turn right", "go forward"]):
            advice = always.expert(1)
            assert always.expert(5) == advice
            if turn == 4:
                assert late.expert(1) == advice
            assert always.step(command) == late.step(command)


def test_the_bot_begins_anew_with_every_episode():
    env = GymnasiumText("BabyAI-GoToLocal-v0")
    for task in range(3):
        first = [(env.reset(task), env.expert(2))[1], *(env.step(env.expert(2)) and env.expert(2) for _ in range(3))]
        again = [(env.reset(task), env.expert(2))[1], *(env.step(env.expert(2)) and env.expert(2) for _ in range(3))]
        assert first == again


def test_a_plan_of_the_bot_that_would_never_end_is_given_up():
    env = GymnasiumText("BabyAI-UnlockToUnlock-v0")
    for task in (4, 7, 9):  # from the second or third turn on, in MiniGrid 3.2, each of two locked doors waits for the other
        _, commands = env.reset(task)
        for _ in range(4):
            command = env.expert(2)
            assert command in commands
            env.step(command)


def test_levels_that_the_bot_cannot_solve_have_no_expert():
    for level in ("KeyInBox", "PutNextS5N2Carrying"):
        env = GymnasiumText(f"BabyAI-{level}-v0")
        assert not isinstance(env, TextExpert) and not hasattr(env, "expert")
