"""An episode of questions: actions, observations, rewards and signals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.config import load
from hgpo_jax.envs.search.scores import exact_match, f1, normalize
from hgpo_jax.envs.search.text import BEGINNING, NOTHING, Action, SearchText, parse, shown
from hgpo_jax.envs.search.world import Question
from hgpo_jax.policy.answers import split_thought
from hgpo_jax.rollout.chat_prompts import load_template
from hgpo_jax.rollout.environments import environment
from hgpo_jax.setup.validate import check_together
from tests.helpers.refusals import refused

RED, WINE = '"Red"\nRed is a colour.', '"Wine"\nIt may be red.'
PASSAGES = {"red": [RED, WINE], "crimson": [RED], "wine": [WINE]}


class Shelf:
    def retrieve(self, queries, k):
        return [[(text, 1.0) for text in PASSAGES.get(query, [])[:k]] for query in queries]


def begun(**options):
    env = SearchText(lambda task: Question("what is red?", ("a colour", "The Color")), Shelf(), **options)
    assert env.reset(0) == (BEGINNING, []) and env.goal == "what is red?"
    return env


@pytest.mark.parametrize(("passage", "read"), [
    ('"Art"\nArt is a word.', "Art is a word."), ('"Art"\nArthur lived there.', "Art: Arthur lived there."),
    ('"Paris"\nParisian cafes.', "Paris: Parisian cafes."), ('"Who?"\nWho? A song.', "Who? A song."),
])  # fmt: skip
def test_a_title_is_shown_where_the_text_does_not_begin_with_it(passage, read):
    assert shown(passage) == read


@pytest.mark.parametrize(("answer", "accepted", "exact", "overlap"), [
    ("Denver Broncos", ["Denver Broncos"], 1, 1),
    ("  the DENVER  broncos! ", ["Denver Broncos"], 1, 1),
    ("Broncos", ["Denver Broncos"], 0, 2 / 3),  # precision 1, recall 1/2
    ("Denver Broncos of Colorado", ["Denver Broncos"], 0, 2 / 3),  # precision 1/2, recall 1
    ("new york new york", ["new york"], 0, 2 / 3),  # a word counts as often as it occurs
    ("new new york", ["new new jersey"], 0, 2 / 3),
    ("1,853", ["1853"], 1, 1),
    ("well-known", ["wellknown"], 1, 1),  # punctuation leaves no blank
    ("theatre", ["atre"], 0, 0),  # an article is a whole word
    ("Paris", ["London", "Paris, France"], 0, 2 / 3),  # the nearest accepted one
    ("the", ["a!"], 1, 1), ("the", ["London"], 0, 0),
])  # fmt: skip
def test_scores_by_hand(answer, accepted, exact, overlap):
    assert exact_match(answer, accepted) == exact
    assert f1(answer, accepted) == pytest.approx(overlap)


@given(st.text(), st.text())
def test_scores_are_fractions_and_a_match_is_whole(one, other):
    assert normalize(normalize(one)) == normalize(normalize(normalize(one)))
    assert 0 <= f1(one, [other]) <= 1 and f1(one, [other]) == pytest.approx(f1(other, [one]))
    assert exact_match(one, [one]) == f1(one, [one]) == 1
    if exact_match(one, [other]):
        assert f1(one, [other]) == 1


@pytest.mark.parametrize(("action", "read"), [
    ("<search> red  wine\n</search>", Action("search", "red wine", True)),
    ("so: <answer>red</answer>.", Action("answer", "red", False)),
    ("<search>a</search><answer>b</answer>", Action("search", "a", False)),
    ("<answer>a<search>b</search></answer>", Action("answer", "a<search>b</search>", True)),
    ("I may <search> or <answer>. <search>red</search>", Action("search", "red", False)),
    ("<search>red</answer>", Action("")), ("<search> </search>", Action("")), ("</search>red<search>", Action("")),
    ("red", Action("")), ("", Action("")), ("<Search>red</Search>", Action("")), ("<answer>red", Action("")),
    ("<answer>" + "x" * 100_000 + "</answer>", Action("")), ("<search>" * 1200, Action("")),
])  # fmt: skip
def test_actions(action, read):
    assert parse(action) == read


def test_a_turn():
    env = begun(top_k=2, max_turns=4)
    observation, commands, reward, done, info = env.step("<search>red</search>")
    assert observation == "(1) Red is a colour.\n(2) Wine: It may be red."
    assert (commands, reward, done) == ([], 0, False)
    assert info == {
        "won": False, "admissible": True, "truncated": False, "score": 0, "signals": {"exact_match": 0, "f1": 0, "format": 1},
    }  # fmt: skip
    again, _, _, _, info = env.step("I do not know")
    assert again == observation and not info["admissible"] and info["signals"]["format"] == 0
    assert env.step("<search>blue</search>")[0] == NOTHING
    _, _, reward, done, info = env.step("It is <answer>color</answer>")
    assert (reward, done, info["won"], info["truncated"], info["score"]) == (10, True, True, False, 1)
    assert info["signals"] == {"exact_match": 1, "f1": 1, "format": 0}


def test_other_ends():
    env = begun(max_turns=2)
    *_, reward, done, info = env.step("<answer> a bright colour</answer>")
    assert (reward, done, info["won"], info["truncated"]) == (0, True, False, False)
    assert info["score"] == info["signals"]["f1"] == pytest.approx(2 / 3)
    env.reset(0)
    env.step("<search>red</search>")
    *_, reward, done, info = env.step("<search>red</search>")
    assert (reward, done, info["won"], info["truncated"]) == (0, True, False, True)


def test_equal_passages_are_equal_states():
    observations = {begun(top_k=1).step(f"<search>{query}</search>")[0] for query in ("red", "crimson")}
    assert len(observations) == 1


@pytest.mark.parametrize(("passage", "line"), [
    ('"Red"\nRed is\n a colour.', "Red is a colour."),
    ('"Wine"\nIt may be red.', "Wine: It may be red."),
    ("First line of a passage.\nSecond line.", "First line of a passage. Second line."),
    ("no title", "no title"), ("x" * 9000, "x" * 4000),
])  # fmt: skip
def test_passages_are_shown_in_a_line(passage, line):
    assert shown(passage) == line


@pytest.mark.parametrize("name", ["search", "search_team", "math", "math_team", "math_plain", "search_conversation"])
def test_a_thought_that_is_cut_does_nothing(name):
    for text, opened in (("<think>I may <answer>1</answer> or", ""), ("I may <answer>1</answer> or", "<think>\n")):
        assert load_template(name).parse(text, 30, opened)[1:] == ("", False)
    assert load_template(name).parse("I may <answer>1</answer>", 30)[1:] == ("I may <answer>1</answer>", True)


@pytest.mark.parametrize("name", ["search", "math"])
def test_chats_have_a_template_of_their_own(name):
    template = load_template(f"{name}_conversation")
    assert template.chats and template.bare and template.tells_goal and not template.slots - {"goal", "observation"}
    check_together(load(None, [f"env.name={name}", f"env.template={name}_conversation", "policy=smollm2", "warm_start=none"]))
    for env, mend in ((name, f"leave it out, or give {name}_conversation for a chat"), (f"{name}_team", "leave it out")):
        with refused(f"env.template=conversation: env.name={env} lists no actions to choose from; {mend}"):
            check_together(load(None, [f"env.name={env}", "env.template=conversation", "policy=smollm2", "warm_start=none"]))


def test_the_template_asks_for_the_action_after_a_thought():
    template = load_template("search")
    answer = "<think>I look <search>this</search> up.</think>\n<search> red</search>"
    assert template.bare and template.parse(answer, 30).action == "<search> red</search>" == split_thought(answer)[1].strip()


@pytest.mark.parametrize(("overrides", "parts"), [
    (["env.passages=3"], ("env.passages=3",)),
    (["env.data=nowhere"], ("env.data=nowhere", "no folder")),
    (["env.retriever=ftp://x"], ("env.retriever=ftp://x", "no URL", "http://HOST:PORT")),
    (["env.size=8"], ("env.size=8", "does not read it")),
    (["env.name=household", "env.strict=false", "env.top_k=5"], ("env.top_k=5", "does not read it")),
])  # fmt: skip
def test_refused_before_a_run_begins(overrides, parts, tmp_path):
    with refused(parts[0]) as caught:
        config = load("search_small", [*overrides, f"cache_dir={tmp_path}"])
        check_together(config)
        environment(config.env).text(config)
    assert all(part in str(caught.value) for part in parts)
