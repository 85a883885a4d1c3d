"""Odd commands: what the original ignores, what it does specially, and what would crash it."""

import pytest

from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.commands import parse, search
from hgpo_jax.envs.webshop.synthetic import write_catalogue

IGNORED = [
    "", " ", "look around", "buy now", "search", "search[]", "click[]", "search[a", "Search[hat]", "CLICK[search]",
    "click[search]", "click[buy now]", "click[nonsense]", " search[hat]", "search[hat][x]", "click[[hat]]", "[x]",
    "search\n[hat]", "click[< prev]", "search[<a> soft]", "search[<a>]", "search[<c>]", "search[<r>]", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("command", IGNORED)
def test_ignored_on_the_search_page(tiny, command):
    session = tiny.session(0)
    start = session.reset()
    observation, reward, done, actions = session.step(command)
    assert ((observation, actions), reward, done) == (start, 0.0, False)


@pytest.mark.parametrize("command", ["search[<a> soft]", "search[<c>]", "search[<r>]", "click[b00000008x]"])
def test_what_crashes_the_original_changes_nothing(tiny, command):
    session = tiny.session(0)
    session.reset()
    before = session.step("search[lower case cotton belt]")
    assert "b00000008x" in before[3]["clickables"]
    assert session.step(command) == before
    assert session.step("click[next >]")[0] != before[0]
    assert session.step("click[< prev]") == before


def test_argument_ends_at_the_last_bracket():
    assert parse("search[A]b] tail") == ("search", "a]b")
    assert parse("click[x][y]") == ("click[x]", "y")
    assert parse("no command") == ("", "")
    assert search("a [b]\n c") == "search[a b c]"


def test_label_searches(tiny):
    session = tiny.session(0)
    session.reset()
    text, _, _, actions = session.step("search[<c> garden]")
    assert "Page 1 (Total results: 1)" in text and actions["clickables"][-1] == "b000000009"
    text, _, _, actions = session.step("search[<q> cotton things]")
    assert "Page 1 (Total results: 12)" in text  # all but the candy, in catalogue order
    assert actions["clickables"][2:5] == ["b000000001", "b000000002", "b000000003"]
    assert "Page 1 (Total results: 0)" in session.step("search[<q> nothing]")[0]


def test_random_search_draws_anew_for_each_page_but_the_same_each_episode(tmp_path):
    shop = load_shop(*write_catalogue(tmp_path, 80, vocabulary=3000))
    session = shop.session(0)
    session.reset()
    pages = [session.step(command) for command in ("search[<r>]", "click[next >]", "click[< prev]")]
    assert all("(Total results: 50)" in page[0] for page in pages)
    assert pages[0] != pages[2]
    session.reset()
    assert session.step("search[<r>]") == pages[0]


def test_option_named_like_a_button_or_not_expressible(tiny):
    session = tiny.session(0)
    session.reset()
    session.step("search[rug]")
    item = session.step("click[b00000000a]")
    assert "a[1]" in item[3]["clickables"]
    assert session.step("click[a[1]]") == item and session.options == {}
