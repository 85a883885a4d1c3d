"""The reward's parts, worked out by hand, and its quirks."""

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.envs.webshop.fuzzy import similar
from hgpo_jax.envs.webshop.nouns import spacy_nouns, title_nouns
from hgpo_jax.envs.webshop.products import Product
from hgpo_jax.envs.webshop.purchase import choose, option_owner
from hgpo_jax.envs.webshop.reward import first_colour, option_hit, purchase_reward

SHIRT = Product(
    "B1", "Red Cotton Shirt", "Easy care.", ["Soft feel"], "$5.0", [5.0], "fashion", "shirts",
    "Clothing › Women › Tops", {"color": ["red"]}, ["machine washable"], None, [],
)  # fmt: skip


def test_no_option_is_set_by_a_button_of_the_page():
    product = SHIRT._replace(options={"color": ["red", "buy now"], "size": ["< prev", "red"]})
    assert option_owner(product) == {"red": "size"}
    assert choose(product, ["buy now", "red", "blue"]) == {"size": "red"}


GOAL = {
    "name": "Red Cotton Shirt", "query": "shirts", "product_category": "Clothing › Women › Tops",
    "attributes": ["machine wash", "soft", "warm"], "goal_options": {"color": "red", "size": "small"},
    "price_upper": 10.0,
}  # fmt: skip


def reward(product=SHIRT, options=(), price=5.0, **changes):
    return purchase_reward(product, GOAL | changes, dict(options), price, title_nouns)


def test_parts():
    parts = reward(options={"color": "red"})
    assert parts == {
        "reward": (2 + 1 + 1) / 6, "r_type": 1.0, "query_match": True, "category_match": True, "title_score": 1.0,
        "r_att": 2 / 3, "w_att": 3 / 6, "r_option": 1 / 2, "w_option": 2 / 6, "r_price": True, "w_price": 1 / 6,
    }  # fmt: skip


def test_price_limit_is_inclusive():
    assert reward(price=10.0)["r_price"] is True
    late = reward(price=10.01)
    assert late["r_price"] is False and late["reward"] == 2 / 6


def test_attributes_come_from_list_title_bullets_or_description():
    wanted = ["machine wash", "cotton sh", "soft feel", "easy care", "silk"]
    assert reward(attributes=wanted)["r_att"] == 4 / 5


def test_no_goal_options():
    assert reward(goal_options={})["r_option"] is None
    assert reward(goal_options={}, attributes=["soft"])["reward"] == 1.0
    assert reward(goal_options=[], attributes=["soft"])["reward"] == 1.0


@pytest.mark.parametrize(("name", "query", "category", "r_type", "score"), [
    ("Red Cotton Shirt", "other", "Other › Place", 1.0, 1.0),  # title alike
    ("Lamp Oil Jar", "shirts", "Clothing › Women", 0.0, 0.0),  # no noun shared: nothing else counts
    ("Shirt Lamp Oil Jar Tin Cup Pan Pot Mat Rug Bed", "shirts", "x", 0.1, 1 / 11),
    ("Shirt Lamp Oil Jar Tin", "other", "Clothing › Home", 0.5, 1 / 5),
    ("Shirt Lamp Oil Jar Tin", "shirts", "Clothing › Home", 1.0, 1 / 5),
    ("Shirt Lamp Oil Jar Tin", "other", " Women ›Clothing", 1.0, 1 / 5),
    ("of the 12", "other", "x", 0.5, 0.2),  # no noun at all
])  # fmt: skip
def test_type(name, query, category, r_type, score):
    parts = reward(name=name, query=query, product_category=category)
    assert (parts["r_type"], parts["title_score"]) == (r_type, score)


def test_colours():
    assert first_colour("peppermint cookie") == "mint"
    assert first_colour("colored") == "red"
    assert first_colour("dark red") == "dark"  # list order, not place in the text
    assert first_colour("medium") == "medium"
    assert first_colour(("color", "dark red")) == ("color", "dark red")
    assert first_colour(("color", "red")) == "red"


@pytest.mark.parametrize(("chosen", "wanted", "hit"), [
    ("red", ("color", "red"), True),
    ("dark red", ("color", "dark red"), True),  # "dark" is a word of the tuple
    ("peppermint cookie", ("flavor", "peppermint cookie"), False),  # "mint" is none
    ("peppermint cookie", "peppermint cookie", True),  # human goals: both cut down alike
    ("small", ("size", "small"), True),
    ("size", ("size", "small"), True),  # the name counts, too
    ("medium", ("size", "small"), False),
])  # fmt: skip
def test_options(chosen, wanted, hit):
    assert option_hit(chosen, wanted) is hit


@pytest.mark.parametrize(("first", "second", "alike"), [
    ("machine wash", "machine washable", True),
    ("wash machine", "machine wash", True),
    ("Machine-Wash!", "machine wash", True),
    ("abcdefg", "abcdefh", True),  # 2 * 6 / 14 = 0.857 -> 86
    ("abcdef", "abcdeg", False),  # 2 * 5 / 12 = 0.833 -> 83
    ("big_cat", "big", False),  # the underscore keeps the word whole
    ("café", "caf", True),  # U+0080 to U+00FF are dropped
    ("ab ab", "ab", True),
    ("", "x", False), ("!!", "!!", False), ("é", "é", False),
])  # fmt: skip
def test_similar(first, second, alike):
    assert similar(first, second) is alike


@given(st.text(max_size=30), st.text(max_size=30))
def test_similar_takes_any_text_and_shared_words_suffice(first, second):
    assert similar(first, second) in (True, False)
    assert similar(f"{first} word", "word") is True


def test_nouns(monkeypatch):
    """Also the wrapper on a stand-in for spaCy, whose models are not packages."""
    assert title_nouns("The Women's Shoes for 12 Hours, 3XL") == ["women's", "shoes", "hours"]
    tagged = (("Red", "ADJ"), ("Shoes", "NOUN"), ("Nike", "PROPN"))
    tokens = [SimpleNamespace(text=text, pos_=pos) for text, pos in tagged]
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=lambda model: lambda title: tokens))
    assert spacy_nouns()("Red Shoes Nike") == ["shoes", "nike"]
