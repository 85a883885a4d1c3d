"""The READMEs: short enough, links that lead somewhere, commands that parse, Python that runs and gives its numbers."""

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from hgpo_jax import advantages
from hgpo_jax import config as configuration
from hgpo_jax.rollout.requirements import check_text

ROOT = Path(__file__).parents[2]
READMES = sorted(path for path in ROOT.rglob("README.md") if not {"runs", "build"} & set(path.relative_to(ROOT).parts[:1]))
NAMES = [str(path.relative_to(ROOT)) for path in READMES]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_room_that_the_front_page_names_has_one():
    linked = re.findall(r"\]\(([\w/.]*README\.md)\)", (ROOT / "README.md").read_text())
    ours = ("advantages", "bench", "learner", "policy", "rollout", "serving", "trainer")
    rooms = (*(f"hgpo_jax/{name}" for name in ours), "envs", "configs/tables", "configs/launch")
    assert {f"{room}/README.md" for room in rooms} <= set(linked)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_its_links_lead_somewhere_and_its_commands_parse(name):
    text = (ROOT / name).read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL) if name == "README.md" else text
    assert len(re.findall(r"[^\s|#`*-][^\s|]*", prose)) <= (700 if name == "README.md" else 1000)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith("https://") or ((ROOT / name).parent / link).exists(), link
    for line in "\n".join(blocks(text, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        for module in (words[at + 1] for at, word in enumerate(words) if word == "-m"):
            assert importlib.util.find_spec(module), module
        if "hgpo_jax.train" in words:
            fields = [word for word in words if re.fullmatch(r"[a-z_.]+=.*", word) and not word.startswith("data=")]
            config = words[words.index("--config") + 1] if "--config" in words else None
            configuration.load(config, [field for field in fields if not words[words.index(field) - 1].startswith("--")])


def test_the_estimator_on_the_front_page_runs(monkeypatch):
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(advantages.ESTIMATORS))
    text = (ROOT / "README.md").read_text()
    names = {}
    exec(blocks(text[text.index("## Your own estimator") :], "python")[0], names)
    states = np.array([[0, 1], [0, 2], [0, 1]])
    rewards = np.array([[0, 10], [0, 0], [0, 0]])
    estimate = advantages.estimate(
        "leave_one_out", rewards=rewards, mask=np.ones((3, 2), bool), states=states, groups=np.zeros(3, int), gamma=0.5
    )
    np.testing.assert_allclose(estimate.advantages, [[5, 10], [-2.5, 0], [-2.5, -10]], atol=1e-5)


def test_the_environment_on_the_front_page_can_be_played():
    text = (ROOT / "README.md").read_text()
    names = {}
    exec(blocks(text[text.index("## Your own environment") :], "python")[0], names)
    env = names["GuessTheNumber"]()
    check_text(env)
    _, commands = env.reset(17)
    assert commands == [f"guess {n}" for n in range(10)]
    texts, _, _, done, info = zip(*(env.step(action) for action in ("guess 3", "guess 9", "sing", "guess 7")), strict=True)
    assert texts == ("Larger.", "Smaller.", "Nothing happens.", "Right.")
    assert done == (False, False, False, True)
    assert info[2] == {"won": False, "admissible": False}
    assert info[3] == {"won": True, "admissible": True}


def test_one_version_is_named_everywhere():
    patterns = {"pyproject.toml": r'^version = "(.*)"$', "CITATION.cff": "^version: (.*)$", "CHANGELOG.md": "^## (.*)$"}
    found = {name: re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1] for name, pattern in patterns.items()}
    assert len(set(found.values())) == 1, found
