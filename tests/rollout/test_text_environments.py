"""The text faces of ALFWorld, WebShop and the household: rewards, turn limits, what is shown and what is admissible."""

import ast
import json
import pickle
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from hgpo_jax.config import load
from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.alfworld.dataset import TASK_TYPES
from hgpo_jax.envs.alfworld.planner import plan
from hgpo_jax.envs.alfworld.text import AlfworldText
from hgpo_jax.envs.household import TASKS, Household, world
from hgpo_jax.envs.household.text import HouseholdText
from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.text import SEARCH, WebshopText
from hgpo_jax.rollout.environments import ENVIRONMENTS
from tests.helpers.needs import DATA

TESTS = Path(__file__).resolve().parents[1]
ENVS = TESTS.parent / "envs"
GAMES = sorted((TESTS / "alfworld" / "data" / "json_2.1.1").rglob("game.tw-pddl"))
LOGIC = TESTS / "alfworld" / "data" / "logic"
RECORDED_SHOP = DATA / "conformance" / "webshop_transcripts.jsonl"
sys.path.insert(0, str(TESTS / "webshop"))
from webshop_tiny import write  # noqa: E402


def test_environments_know_nothing_of_hgpo_jax():
    files = list(ENVS.rglob("*.py"))
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("hgpo_jax") and not name.startswith("hgpo_jax.envs") for name in names), path


# -- ALFWorld ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "logic"), [(task, [None, LOGIC][task % 2]) for task in range(len(GAMES))])
def test_alfworld_pays_ten_for_the_goal_and_nothing_before(task, logic):
    env = AlfworldText(GAMES, logic)
    game = load_game(GAMES[task], logic)
    assert env.reset(task) == (game.reset()[0], [command for command in game.commands if command != "help"])
    assert env.goal == game.task and TASK_TYPES[env.task_type] in str(GAMES[task])
    *before, last = plan(game)
    for command in before:
        observation, commands, reward, done, info = env.step(command)
        expected, shown, _ = game.step(command)
        assert (observation, commands) == (expected, [command for command in shown if command != "help"])
        assert (reward, done, info) == (0.0, False, {"won": False, "admissible": True})
    assert env.step(last)[2:] == (10.0, True, {"won": True, "admissible": True})


def test_alfworld_ends_with_its_turns_and_tells_what_is_admissible():
    env = AlfworldText(GAMES, LOGIC, max_turns=4)
    env.reset(0)
    refused = {"won": False, "admissible": False}
    assert env.step("go to nowhere") == ("Nothing happens.", env.step(" look ")[1], 0.0, False, refused)
    help_text, commands, _, done, info = env.step("help")
    assert info["admissible"] and not done and "help" not in commands and help_text != "Nothing happens."
    assert env.step("look")[3:] == (True, {"won": False, "admissible": True})
    first = env.reset(0)
    assert env.step("look")[3] is False and AlfworldText(GAMES, LOGIC).reset(0) == first


def test_alfworld_games_of_no_known_type_or_none(tmp_path):
    (tmp_path / "mine.tw-pddl").write_bytes(GAMES[0].read_bytes())
    env = AlfworldText([tmp_path / "mine.tw-pddl"])
    env.reset(0)
    assert env.task_types[env.task_type] == "unknown" and len(env) == 1
    with pytest.raises(ValueError, match="games: is empty"):
        AlfworldText([])
    with pytest.raises(ValueError, match="max_turns=0"):
        AlfworldText(GAMES, max_turns=0)
    for task in (len(GAMES), -1):
        with pytest.raises(IndexError, match=f"task={task}"):
            AlfworldText(GAMES).reset(task)


# -- WebShop ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shop"))[:2]


def test_webshop_pays_ten_for_the_full_score_only(files):
    env = WebshopText.open(*files)
    shop = load_shop(*files)
    goals, paid = list(shop.goals), set()
    for task, goal in enumerate(goals):
        for asin in {goal["asin"], goals[0]["asin"], goals[-1]["asin"]}:
            session = shop.session(task)
            session.reset()
            env.reset(task)
            assert env.goal == goal["instruction_text"].strip()
            options = goal["goal_options"]
            values = [value for _, value in (options.items() if isinstance(options, dict) else options)]
            for action in [f"search[{goal['name']}]", f"click[{asin}]", *(f"click[{value}]" for value in values)]:
                _, _, reward, done, info = env.step(action)
                session.step(action)
                assert (reward, done, info["won"], info["score"]) == (0.0, False, False, 0.0)
            _, _, reward, done, info = env.step("click[buy now]")
            score = session.step("click[buy now]")[1]
            assert done == session.done and info["score"] == score
            assert reward == (10.0 if score == 1.0 else 0.0) and info["won"] == (score == 1.0)
            paid.add((reward, 0 < score < 1))
    assert paid >= {(10.0, False), (0.0, True)}


def test_webshop_shows_what_follows_the_instruction(files):
    env = WebshopText.open(*files, max_turns=4)
    assert env.reset(0) == ("'Search'", [SEARCH])
    page, commands, _, _, info = env.step("search[cotton]")
    assert page.startswith("'Back to Search' [SEP] 'Page 1 (Total results: ") and env.goal not in page
    assert commands[0] == "click[back to search]" and SEARCH not in commands and info["admissible"]
    assert env.step("click[search]")[4]["admissible"] is False
    assert env.step("buy everything")[0] == page
    _, _, _, done, info = env.step("search[more]")
    assert done and info["admissible"]  # a search works from every page


def test_webshop_goals_of_a_range(files):
    whole = WebshopText.open(*files)
    goals = []
    for task in range(len(whole)):
        whole.reset(task)
        goals.append(whole.goal)
    part = WebshopText.open(*files, first=1, last=3)
    assert len(part) == 2
    part.reset(1)
    assert part.goal == goals[2]
    with pytest.raises(IndexError, match="task=2"):
        part.reset(2)
    for first, last in ((len(goals), None), (-1, None), (2, 2)):
        with pytest.raises(ValueError, match=f"first={first}"):
            WebshopText.open(*files, first=first, last=last)


def test_webshop_goals_of_several_seeds(files):
    seeds, first = (4, 0, 1001), 1
    env = WebshopText.open(*files, first=first, seeds=seeds, order="verl-agent", reachable_only=True)
    shops = [load_shop(*files, seed=seed, reachable_only=True) for seed in seeds]
    assert len(env) == sum(len(shop.goals) - first for shop in shops)
    told = []
    for task in range(len(env)):
        env.reset(task)
        told.append(env.goal)
        assert env.goal == shops[task % 3].goals[first + task // 3]["instruction_text"].strip()
    assert told[::3] != told[1::3]


def test_webshop_settings_reach_the_shop(files, tmp_path):
    for file, name in zip(files, ("items_shuffle_1.json", "items_ins_1.json"), strict=True):
        (tmp_path / name).write_bytes(Path(file).read_bytes())
    given = ["env.name=webshop", f"data={tmp_path}", "rollout.prompt_groups=3"]
    for order in ("original", "verl-agent"):
        config = load(None, [*given, f"env.goal_order={order}"])
        train, held_out = ENVIRONMENTS["webshop"].text(config)
        shop = load_shop(*files, order=order)
        env = held_out()
        assert len(env) == len(shop.goals) * (128 if order == "verl-agent" else 1)
        env.reset(2)
        wanted = shop.with_seed(1002).goals[0] if order == "verl-agent" else shop.goals[2]
        assert env.goal == wanted["instruction_text"].strip()
        with pytest.raises(ValueError, match="first=500"):  # a shop of so few goals has none beyond the held-out ones
            train()


@pytest.mark.needs("data")
def test_webshop_shortens_recorded_pages_without_losing_a_difference():
    env = object.__new__(WebshopText)
    for line in RECORDED_SHOP.read_text().splitlines():
        record = json.loads(line)
        pages = list(_texts(record))
        env.goal = record["goal"]["instruction_text"].strip()
        short = {page: env._shorten(page) for page in pages}
        assert len(set(short.values())) == len(set(pages)) > 1
        for page, text in short.items():
            assert text == page or page.endswith(text.replace("' [SEP] '", " [SEP] ")[1:-1])


def _texts(node):
    """All observations of a recorded session."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in ("observation", "obs") and isinstance(value, str))
    if isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _texts(value)


# -- the household ----------------------------------------------------------------------------------------------


HOUSEHOLD = Household(rooms=tuple(world.ROOMS), tasks=tuple(TASKS), places=12, things=8, max_turns=30)


@pytest.fixture(scope="module")
def told():
    return HouseholdText(HOUSEHOLD)


@pytest.mark.slow
def test_household_tells_one_text_for_one_observation_and_one_command_for_one_action(told):
    rules, env = HOUSEHOLD, told
    step, admissible = jax.jit(rules.step), jax.jit(rules.admissible)
    rng = np.random.default_rng(0)
    texts: dict[tuple, str] = {}
    seen_phrases = set()
    likely = {"heat": 20, "cool": 20, "clean": 20, "use": 5, "take": 5, "open": 5, "move": 0.5, "go": 1}
    for task in range(40):
        text, commands = env.reset(task)
        state, ids = rules.reset(jax.random.key(task))
        for _ in range(25):
            key = (int(state.room), *ids.tolist())
            assert texts.setdefault(key, text) == text
            seen_phrases.add(rules.words[int(ids[0])])
            legal, words = (np.asarray(part) for part in admissible(state))
            actions = {tuple(pair) for pair in words[legal].tolist()}
            assert len(commands) == len(actions) == len(env._commands)
            chance = np.array([likely.get(command.split()[0], 0.2) for command in commands])
            command = str(rng.choice(commands, p=chance / chance.sum()))
            action = env._commands[command]
            text, commands, reward, done, info = env.step(command)
            state, ids, expected, ended, invalid = step(state, action)
            assert not invalid and info == {"won": bool(expected > 0), "admissible": True}
            assert (reward, done) == (float(expected), bool(ended))
            if done:
                break
    for room in range(4):
        here = [text for (r, *_), text in texts.items() if r == room]
        assert len(here) == len(set(here)) > 20
    within = ("you_see", "you_see_nothing")
    assert seen_phrases == {phrase for phrase in world.PHRASES if phrase.startswith("you_") and phrase not in within}


def test_household_goals_and_inadmissible_actions(told):
    env, goals = told, {}
    for task in range(40):
        first = env.reset(task)
        goals[env.task_types[env.task_type]] = env.goal
        for action in ("dance", "", "go_to fridge_1", "-1", "take mug 1 from nowhere"):
            text, commands, reward, _, info = env.step(action)
            assert (text, commands, reward) == ("Nothing happens.", first[1], 0.0) and not info["admissible"]
    assert set(goals) == set(TASKS)
    beginnings = {"place": "put a ", "two": "put two ", "look": "examine the ", "clean": "put a clean ", "heat": "put a hot ",
                  "cool": "put a cool "}  # fmt: skip
    assert all(goals[name].startswith(beginning) and goals[name].endswith(".") for name, beginning in beginnings.items())


def test_household_survives_a_trip_to_another_process_and_any_mesh(told):
    env, copy = told, pickle.loads(pickle.dumps(told))
    with jax.set_mesh(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])):
        assert copy.reset(2**63 + 3) == env.reset(2**63 + 3) != env.reset(3)
        env.reset(2**63 + 3)
        assert copy.step("look") == env.step("look")
