"""Broken data: one line that names file, field, fault and fix."""

import gzip
import json

import numpy as np
import pytest
from webshop_tiny import ATTRIBUTES, HUMAN, ITEMS, values, write

from hgpo_jax import config as configuration
from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.catalogue import FORMAT, Catalogue, build
from hgpo_jax.envs.webshop.products import read_products
from hgpo_jax.evaluation import panels
from hgpo_jax.rollout.environments import webshop_files, webshop_text
from hgpo_jax.utils.errors import ConfigError

GOOD = ITEMS[0]
WISH = ATTRIBUTES["B000000001"]


def refusal(function, *arguments, **options):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message and ";" in message
    return message


@pytest.mark.parametrize(("change", "parts"), [
    ({"name": None}, ("B000000001", "'name'", "not a string")),
    ({"asin": 5}, ("product 0", "'asin'")),
    ({"full_description": ["x"]}, ("'full_description'",)),
    ({"small_description": [None]}, ("'small_description'", "not a list of strings")),
    ({"pricing": 5}, ("'pricing'", "not a string")),
    ({"pricing": "$"}, ("'pricing'", "no number")),
    ({"pricing": "$" + "9" * 400}, ("'pricing'", "no number")),
    ({"customization_options": ["x"]}, ("'customization_options'", "not a JSON object")),
    ({"customization_options": {"size": [{"label": "x"}]}}, ("'customization_options'", "'size'")),
])  # fmt: skip
def test_broken_product(tmp_path, change, parts):
    message = refusal(load_shop, *write(tmp_path, [GOOD | change])[:2])
    assert message.startswith("items.json: ") and all(part in message for part in parts)


@pytest.mark.parametrize(("wish", "part"), [
    (WISH | {"attributes": "soft"}, "'attributes'"),
    (WISH | {"instruction_attributes": []}, "'instruction_attributes' is missing or empty"),
    (WISH | {"instruction_attributes": [1]}, "'instruction_attributes'"),
    ([], "not a JSON object"),
])  # fmt: skip
def test_broken_attributes(tmp_path, wish, part):
    message = refusal(load_shop, *write(tmp_path, [GOOD], {"B000000001": wish})[:2])
    assert message.startswith("attributes.json: product B000000001") and part in message


@pytest.mark.parametrize(("entry", "part"), [
    ("text", "'instruction'"),
    ([{"instruction": "x", "instruction_attributes": ["y"]}], "'instruction_options'"),
    ([{"instruction": "x", "instruction_attributes": [1], "instruction_options": []}], "'instruction_attributes'"),
])  # fmt: skip
def test_broken_human_goals(tmp_path, entry, part):
    message = refusal(load_shop, *write(tmp_path, human=HUMAN | {"B000000002": entry}), human_goals=True)
    assert message.startswith("human.json: product B000000002") and part in message


def test_broken_files(tmp_path):
    items, attributes, human = write(tmp_path)
    for path in (human, attributes):
        for text in ("", "[]", '{"a": '):
            path.write_text(text)
            assert refusal(load_shop, items, attributes, human, human_goals=True).startswith(f"{path.name}: ")
    attributes.write_text("{}")
    cut = ('[{"asin"', '[{"asin": "nan"} oops', "[{}", '[{"asin": "nan"}')
    for text in ("", "{}", "[1]", *cut, "[" * 100_000, f"[{'9' * 5000}]"):
        items.write_text(text)
        assert refusal(load_shop, items, attributes).startswith("items.json: ")
    items.write_text("[]")
    assert "holds no product" in refusal(load_shop, items, attributes)


def test_broken_gzip(tmp_path):
    items, attributes, _ = write(tmp_path)
    packed = tmp_path / "items.json.gz"
    packed.write_bytes(gzip.compress(items.read_bytes())[:-200])
    assert refusal(load_shop, packed, attributes).startswith("items.json.gz: ")
    whole = bytearray(gzip.compress(items.read_bytes(), mtime=0))
    for at in (12, 20, 40, len(whole) // 2):
        packed.write_bytes(whole[:at] + b"\xff\x00\xff" + whole[at + 3 :])
        assert refusal(load_shop, packed, attributes).startswith("items.json.gz: ")
    packed.write_bytes(b"not gzip")
    assert refusal(load_shop, packed, attributes).startswith("items.json.gz: ")


def test_gzip_and_a_file_longer_than_one_read(tmp_path, monkeypatch, tiny):
    monkeypatch.setattr("hgpo_jax.envs.webshop.products._CHUNK", 50)
    items, attributes, _ = write(tmp_path)
    packed = tmp_path / "items.json.gz"
    packed.write_bytes(gzip.compress(items.read_bytes()))
    shop = load_shop(packed, attributes, order="original")
    assert list(shop.goals) == list(tiny.goals)


def test_missing_pieces(tmp_path, tiny_files):
    assert "attributes is missing" in refusal(load_shop, tiny_files[0])
    with pytest.raises(FileNotFoundError):
        load_shop(tmp_path / "none.json", tiny_files[1])
    assert "build it again" in refusal(Catalogue.open, tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"format": "other"}))
    assert "another format or version" in refusal(load_shop, tmp_path)


BUILT = {
    "another kind": lambda folder: (folder / "meta.json").write_text("[]"),
    "no numbers": lambda folder: (folder / "meta.json").write_text(json.dumps(FORMAT)),
    "a pickle": lambda folder: np.save(folder / "low.npy", np.array([object()], object), allow_pickle=True),
    "cut off": lambda folder: (folder / "low.npy").write_bytes((folder / "low.npy").read_bytes()[:100]),
    "too short": lambda folder: np.save(folder / "goal_count.npy", np.zeros(1, np.int64)),
    "another type": lambda folder: np.save(folder / "low.npy", np.load(folder / "low.npy").astype("U9")),
    "missing": lambda folder: (folder / "post_doc.npy").unlink(),
    "no records": lambda folder: (folder / "records.bin").write_bytes(b""),
    "half the records": lambda folder: (folder / "records.bin").write_bytes((folder / "records.bin").read_bytes()[:500]),
    "other records": lambda folder: (folder / "records.bin").write_bytes(b"x" * (folder / "records.bin").stat().st_size),
}


@pytest.mark.parametrize("name", BUILT)
def test_damaged_catalogues(tmp_path, tiny_files, name):
    build(read_products(*tiny_files[:2]), tmp_path / "built")
    BUILT[name](tmp_path / "built")
    assert "build it again" in refusal(lambda: load_shop(tmp_path / "built").goals[0])


def test_missing_price_and_options_are_fine(tmp_path):
    item = {k: v for k, v in GOOD.items() if k not in ("pricing", "customization_options", "images")}
    shop = load_shop(*write(tmp_path, [item, GOOD | {"asin": "B2", "customization_options": {"size": values()}}])[:2])
    assert shop.price("B000000001") == 100.0
    with pytest.raises(KeyError, match="no product 'B3'"):
        shop.price("B3")


def test_a_built_catalogue_is_played_and_makes_no_panel(tiny_files, tmp_path):
    """It is mapped, so that the processes of env.workers share it."""
    build(read_products(*tiny_files[:2]), tmp_path / "built")
    config = configuration.load(None, ["env.name=webshop", f"env.data={tmp_path / 'built'}", "warm_start=none"])
    assert webshop_files(config.env.data) == [tmp_path / "built"]
    with pytest.raises(ConfigError, match="panel webshop is of WebShop's own files, not of a built catalogue"):
        panels.panel_tasks("webshop", config)
    train, _ = webshop_text(config)
    assert train.args == (tmp_path / "built",)
    from_files = load_shop(*tiny_files[:2], order="original")
    ours = load_shop(*train.args, order="original")
    assert [ours.goals[n] for n in range(len(ours.goals))] == [from_files.goals[n] for n in range(len(from_files.goals))]
