"""Every page, its text and its clickables, on the tiny catalogue; and odd commands: what the original ignores, what it does
specially, and what would crash it."""

import pytest

from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.commands import parse, search
from hgpo_jax.envs.webshop.synthetic import write_catalogue

HEAD = "Instruction: [SEP] {} [SEP] Back to Search"


@pytest.fixture
def session(tiny):
    """A session towards B000000001, size small, colour red."""
    wanted = {"size": "small", "color": "red"}
    index = next(i for i, g in enumerate(tiny.goals) if g["asin"] == "B000000001" and g["goal_options"] == wanted)
    session = tiny.session(index)
    session.reset()
    return session


@pytest.fixture
def head(session):
    return HEAD.format(session.goal["instruction_text"])


def go(session, *commands):
    for command in commands:
        out = session.step(command)
    return out


def test_search_page(session):
    text = session.goal["instruction_text"]
    assert text.startswith("Find me soft cotton things with color: red, and size: small, and price lower than ")
    assert session.reset() == (
        f"WebShop [SEP] Instruction: [SEP] {text} [SEP] Search", {"has_search_bar": True, "clickables": ["search"]},
    )  # fmt: skip


def test_results_page(session, head):
    observation, reward, done, actions = session.step("search[Peppermint hat]")
    assert observation == (
        f"{head} [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] B000000002 [SEP] Ranged Cotton Hat [SEP] "
        "$1010.0 to $1020.5 [SEP] B000000006 [SEP] Cotton Candy [SEP] $19.99"
    )
    assert (reward, done) == (0.0, False)
    assert actions == {
        "has_search_bar": False, "clickables": ["back to search", "next >", "b000000002", "b000000006"],
    }  # fmt: skip


def test_pages_without_title_and_default_price(session, head):
    assert "[SEP] B000000005 [SEP] $19.99" in go(session, "search[plain string]")[0]
    assert "[SEP] B000000003 [SEP] Bare Cotton Sock [SEP] $100.0" in go(session, "search[sock]")[0]
    assert "[SEP] B00000000B [SEP] Cotton Rope [SEP] $100.0" in go(session, "search[rope]")[0]
    assert go(session, "search[plain]", "click[b000000005]")[0].startswith(f"{head} [SEP] < Prev [SEP] Price: $19.99")
    assert ' [SEP] Cotton Lamp <b>&amp; "Shade" [SEP] ' in go(session, "search[lamp]")[0]  # text, not markup


def test_paging(session, head, tiny):
    found = [asin for asin, _ in tiny.search("cotton")]
    assert len(found) == 13
    first = session.step("search[cotton]")
    assert first[3]["clickables"] == ["back to search", "next >", *(asin.lower() for asin in found[:10])]
    second = observation, _, _, actions = session.step("click[next >]")
    assert observation.startswith(f"{head} [SEP] Page 2 (Total results: 13) [SEP] < Prev [SEP] Next > [SEP] ")
    assert actions["clickables"] == ["back to search", "< prev", "next >", *(asin.lower() for asin in found[10:])]
    assert go(session, f"click[{actions['clickables'][-1]}]", "click[< prev]") == second  # back from a product
    # Past the end there is an empty page, and one more, and the way back.
    observation, _, _, actions = session.step("click[next >]")
    assert observation == f"{head} [SEP] Page 3 (Total results: 13) [SEP] < Prev [SEP] Next >"
    assert actions["clickables"] == ["back to search", "< prev", "next >"]
    assert session.step("click[next >]")[0].startswith(f"{head} [SEP] Page 4 ")
    assert go(session, "click[< prev]", "click[< prev]", "click[< prev]") == first


def test_item_page(session, head):
    observation, _, _, actions = go(session, "search[shirt]", "click[b000000001]")
    assert observation == (
        f"{head} [SEP] < Prev [SEP] size [SEP] small [SEP] large [SEP] color [SEP] red [SEP] blue | white [SEP] "
        "Red Cotton Shirt [SEP] Price: $19.99 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews "
        "[SEP] Buy Now"
    )
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert actions == {"has_search_bar": False, "clickables": [*buttons, "small", "large", "red", "blue | white"]}


def test_equal_values_collapse_and_set_the_last_option(session):
    _, _, _, actions = go(session, "search[twin]", "click[b000000004]")
    # "features" is a button first, so the option of that name has no place of its own.
    assert actions["clickables"][4:] == ["reviews", "buy now", "medium", "tall"]
    go(session, "click[medium]")
    assert session.options == {"size": "medium"}
    go(session, "click[tall]")
    assert session.options == {"size": "tall"}
    assert go(session, "click[features]")[3]["clickables"] == ["back to search", "< prev"]


def test_options_show_nothing_and_survive_sub_pages_only(session):
    item = go(session, "search[shirt]", "click[b000000001]")
    assert go(session, "click[LARGE]") == item
    assert session.options == {"size": "large"}
    go(session, "click[red]", "click[small]", "click[description]")
    assert go(session, "click[< prev]") == item
    assert session.options == {"size": "small", "color": "red"}
    results = go(session, "click[< prev]")
    assert "Page 1 " in results[0]
    assert session.options == {} and session.asin is None
    assert go(session, "click[b000000001]") == item
    assert session.options == {}


@pytest.mark.parametrize(("asin", "label", "content"), [
    ("b000000001", "description", " [SEP] A cotton thing."),
    ("b000000003", "description", ""),
    ("b000000003", "features", " [SEP]  [SEP] padded"),
    ("b000000005", "features", " [SEP] One plain string"),
    ("b000000001", "reviews", ""),
])  # fmt: skip
def test_sub_pages(session, head, asin, label, content):
    observation, reward, done, actions = go(session, "search[<q> cotton things]", f"click[{asin}]", f"click[{label}]")
    assert observation == f"{head} [SEP] < Prev{content}"
    assert (reward, done) == (0.0, False)
    assert actions == {"has_search_bar": False, "clickables": ["back to search", "< prev"]}


@pytest.mark.parametrize("path", [(), ("click[b000000001]",), ("click[b000000001]", "click[reviews]")])
def test_back_to_search_and_search_from_anywhere(session, path):
    start = session.reset()
    go(session, "search[shirt]", *path)
    observation, _, _, actions = go(session, "click[back to search]")
    assert (observation, actions) == start
    go(session, "search[shirt]", *path)
    assert "Page 1 (Total results: 1)" in go(session, "search[candy]")[0]


def test_done_page(session):
    go(session, "search[rug]", "click[b00000000a]", "click[<b> 'x' & \"y\"]")
    observation, reward, done, actions = go(session, "click[Buy Now] please")
    assert done and actions == {"has_search_bar": False, "clickables": []}
    assert reward == session.purchase["reward"]
    shown = '{"size": "\\u003cb\\u003e \\u0027x\\u0027 \\u0026 \\"y\\""}'
    assert observation == (
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk interface.) [SEP] "
        f"Purchased [SEP] asin [SEP] B00000000A [SEP] options [SEP] {shown} [SEP] attrs [SEP] None [SEP] category "
        "[SEP] None [SEP] query [SEP] None [SEP] product category [SEP] None [SEP] Target [SEP] asin [SEP] options "
        "[SEP] attrs [SEP] price upper [SEP] instuction text [SEP] category [SEP] product category [SEP] query [SEP] "
        f"Goal [SEP] None [SEP] Reward [SEP] Your score (min 0.0, max 1.0) [SEP] {reward} [SEP] Reward Details [SEP] "
        "None"
    )
    assert go(session, "search[shirt]") == (observation, 0.0, True, actions)
    assert session.reset()[0].startswith("WebShop") and not session.done and session.purchase is None


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


def test_full_purchase(session):
    _, reward, done, _ = go(session, "search[shirt]", "click[b000000001]", "click[small]", "click[red]", "click[buy now]")
    assert (reward, done) == (1.0, True)
    assert session.purchase["options"] == {"size": "small", "color": "red"}
    assert session.purchase["price"] == 19.99
