"""The search engine: its words and scores against recordings of Lucene, and the mapped files against memory."""

import json
import random
import subprocess
import sys
import time
from math import log
from pathlib import Path

import numpy as np
import pytest
from webshop_tiny import ITEMS

from hgpo_jax.envs.webshop import bench, load_shop
from hgpo_jax.envs.webshop.analyzer import STOP_WORDS, analyze
from hgpo_jax.envs.webshop.catalogue import Catalogue, build, main
from hgpo_jax.envs.webshop.index import lossy_length
from hgpo_jax.envs.webshop.products import read_products, search_text
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


def test_ties_go_by_asin(tiny):
    assert [asin for asin, _ in tiny.search("tape")] == ["B00000000C", "B00000000D"]
    assert len({score for _, score in tiny.search("tape")}) == 1


def test_stop_words():
    assert len(STOP_WORDS) == 33
    assert analyze(" ".join(STOP_WORDS)) == []


@pytest.mark.parametrize(("begin", "piece"), [("", "_"), ("", "a"), ("", "a_"), ("", "'"), ("é", "_"), ("", "❤\u200d")])
def test_garbage_is_read_in_time_that_grows_with_its_length(begin, piece):
    def cost(count, times):
        """The least seconds of processor time, which other processes hardly change."""
        seconds = []
        for _ in range(times):
            began = time.process_time()
            analyze(begin + piece * count)
            seconds.append(time.process_time() - began)
        return min(seconds)

    # 8 times the text takes 7 to 11 times as long; with rules that look back from each letter it takes 64 times as long.
    assert cost(8000, 2) < 25 * cost(1000, 3)


def test_lossy_length():
    assert [lossy_length(n) for n in (0, 39, 40, 41, 42, 100, 108, 1000, 5000)] == [
        0, 39, 40, 40, 42, 96, 104, 984, 4632,
    ]  # fmt: skip


def test_search_words_are_made_lower_case(tiny):
    assert tiny.search("RED Shirt") == tiny.search("red shirt") != []


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


def test_a_small_catalogue_can_be_measured(tmp_path):
    items, attributes = write_catalogue(tmp_path, 12)
    bench.build_folder(items, attributes, tmp_path)
    assert all(value > 0 for value in bench.use_folder(tmp_path).values())


def test_the_command_runs_without_a_warning():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "hgpo_jax.envs.webshop.catalogue", "--help"]
    assert "new or empty" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


def test_scores_against_the_formula(tiny):
    """BM25 in plain Python, 64 bits, over the terms of the tiny catalogue."""
    documents = [analyze(search_text(tiny.catalogue.product(i))) for i in range(len(tiny.catalogue))]
    average = sum(map(len, documents)) / len(documents)
    rng = random.Random(0)
    words = sorted({word for document in documents for word in document})
    compared = 0
    for _ in range(50):
        query = rng.choices(words, k=4)
        expected = {}
        for i, document in enumerate(documents):
            for word in query:
                n = sum(word in other for other in documents)
                f = document.count(word)
                idf = log(1 + (len(documents) - n + 0.5) / (n + 0.5))
                saturation = f / (f + 0.9 * (1 - 0.4 + 0.4 * lossy_length(len(document)) / average))
                expected[i] = expected.get(i, 0) + idf * saturation
        found = dict(tiny.catalogue.search(" ".join(query)))
        if all(analyze(word) == [word] for word in query):  # a stem that is its own stem
            assert found == pytest.approx({i: s for i, s in expected.items() if s}, rel=1e-5)
            compared += bool(found)
    assert compared > 20
