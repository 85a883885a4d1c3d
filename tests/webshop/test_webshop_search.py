"""The search engine: its words and scores against recordings of Lucene, and the mapped files against memory."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from webshop_tiny import ITEMS

from hgpo_jax.envs.lucene.analyzer import STOP_WORDS, analyze
from hgpo_jax.envs.lucene.index import lossy_length
from hgpo_jax.envs.webshop import load_shop
from hgpo_jax.envs.webshop.catalogue import Catalogue, build, main
from hgpo_jax.envs.webshop.products import read_products
from hgpo_jax.envs.webshop.synthetic import write_catalogue

DATA = Path(__file__).parent / "data"


def recorded(name):
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def test_terms_equal_lucenes():
    cases = recorded("lucene_terms.jsonl")
    assert len(cases) > 500
    for case in cases:
        assert analyze(case["text"]) == case["terms"], ascii(case["text"])


def test_scores_equal_lucenes_to_the_last_bit(tiny):
    cases = recorded("lucene_search.jsonl")
    assert sum(bool(case["hits"]) for case in cases) > 50
    for case in cases:
        found = [[tiny.catalogue.product(i).asin, score] for i, score in tiny.catalogue.search(case["query"])]
        assert found == case["hits"], case["query"]


def test_ties_stop_words_and_capitals(tiny):
    assert [asin for asin, _ in tiny.search("tape")] == ["B00000000C", "B00000000D"]
    assert len({score for _, score in tiny.search("tape")}) == 1
    assert len(STOP_WORDS) == 33 and analyze(" ".join(STOP_WORDS)) == []
    assert tiny.search("RED Shirt") == tiny.search("red shirt") != []


@pytest.mark.parametrize(("begin", "piece", "times"), [("", "a_", 128), ("é", "_", 16), ("", "❤\u200d", 128)])
def test_garbage_is_read_in_time_that_grows_with_its_length(begin, piece, times):
    def cost(count):
        began = time.process_time()
        analyze(begin + piece * count)
        return time.process_time() - began

    # With rules that look back from each letter it takes `times` squared times as long. The limit is far from both: what
    # a busy machine or a collection of garbage adds does not reach it.
    assert cost(1000 * times) < 8 * times * min(cost(1000) for _ in range(3))


def test_lossy_length():
    assert [lossy_length(n) for n in (0, 39, 40, 41, 42, 100, 108, 1000, 5000)] == [
        0, 39, 40, 40, 42, 96, 104, 984, 4632,
    ]  # fmt: skip


def test_no_more_than_fifty_and_the_same_from_mapped_files(tmp_path, capsys, monkeypatch):
    items, attributes = write_catalogue(tmp_path, 300, vocabulary=3000)
    monkeypatch.setattr("sys.argv", ["catalogue", str(items), str(attributes), str(tmp_path / "built")])
    main()
    assert "300 products" in capsys.readouterr().out
    mapped, memory = load_shop(tmp_path / "built", seed=3), load_shop(items, attributes, seed=3)
    assert isinstance(mapped.catalogue.index._arrays["post_doc"], np.memmap)
    assert list(mapped.goals) == list(memory.goals)
    queries = [memory.goals[i]["name"] for i in range(20)]
    for query in queries:
        found = memory.search(query)
        assert mapped.search(query) == found
        assert len(found) == 50
    positions, scores = memory.catalogue.index.search(queries[0], k=300)
    best = [memory.catalogue.product(int(position)).asin for position in positions[:50]]
    assert best == [asin for asin, _ in memory.search(queries[0])]
    assert np.all(np.diff(scores) <= 0)


def test_an_unfinished_folder_is_refused(tmp_path, tiny_files):
    folder = tmp_path / "built"
    build(read_products(*tiny_files[:2]), folder)
    assert len(Catalogue.open(folder)) == 13
    (folder / "asins.npy").unlink()
    with pytest.raises(ValueError, match="built: no built catalogue"):
        Catalogue.open(folder)
    with pytest.raises(ValueError, match="is not empty"):  # what is left of it would pass for part of the new one
        build(read_products(*tiny_files[:2]), folder)


def test_positions(tiny):
    kept = [item["asin"] for item in ITEMS[:13]]
    assert [tiny.catalogue.position(asin) for asin in kept] == list(range(13))
    for asin in ("nan", "B0000000012", "", "b000000001", "zzz", "B00000001", "\ud800"):
        assert tiny.catalogue.position(asin) is None
