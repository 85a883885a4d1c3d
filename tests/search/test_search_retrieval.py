"""Where passages come from: BM25 beside plain Python, JSON Lines, mapped folders, and retrieval servers, honest and not."""

import http.server
import json
import math
import socket
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.envs import search_server
from hgpo_jax.envs.lucene import index
from hgpo_jax.envs.lucene.analyzer import analyze
from hgpo_jax.envs.lucene.index import IndexBuilder
from hgpo_jax.envs.search import passages as passages_in_files
from hgpo_jax.envs.search import retrieval_client
from hgpo_jax.envs.search.files import read_folder, read_passages, read_questions
from hgpo_jax.envs.search.makers import ALONE, search_makers
from hgpo_jax.envs.search.passages import Passages
from hgpo_jax.envs.search.retrieval_client import RetrievalError, RetrievalServer
from hgpo_jax.envs.search.world import Question
from hgpo_jax.rollout.workers import EnvFailure, LocalWorkers
from hgpo_jax.serving.uvicorn_server import served
from tests.helpers.refusals import refused

TEXTS = ['"Red"\nRed is a colour.', '"Wine"\nWine may be red, and old.', '"Sea"\nThe sea is blue.', '"Ünïcode"\nnaïve café']


def opened(folder, texts, digest="corpus"):
    return Passages.open(folder, digest, lambda: texts)


def oracle(texts, query, k1=0.9, b=0.4):
    """BM25 as its formula says, for texts of fewer than 40 terms, one text and one term at a time."""
    documents = [Counter(analyze(text)) for text in texts]
    lengths = [terms.total() for terms in documents]
    count = sum(length > 0 for length in lengths)
    found = []
    for number, (terms, length) in enumerate(zip(documents, lengths, strict=True)):
        score = 0.0
        for term in analyze(query):
            n = sum(term in other for other in documents)
            if terms[term]:
                idf = math.log(1 + (count - n + 0.5) / (n + 0.5))
                score += idf * terms[term] / (terms[term] + k1 * (1 - b + b * length * count / sum(lengths)))
        if score:
            found.append((-score, number))
    return [(texts[number], -score) for score, number in sorted(found)]


_text = st.lists(st.sampled_from(["red", "wine", "sea", "blue", "the", "old", "colours", "naïve"]), max_size=12).map(" ".join)


@given(st.lists(_text, min_size=1, max_size=12), _text, st.integers(1, 5))
def test_scores_are_those_of_the_formula(tmp_path_factory, texts, query, k):
    builder = IndexBuilder()
    for text in texts:
        builder.add(text)
    documents = builder.documents
    encoded = [text.encode() for text in texts]
    texts_in = {"text_start": np.cumsum([0, *map(len, encoded)]), "texts": np.frombuffer(b"".join(encoded), np.uint8)}
    arrays = builder.finish() | texts_in
    found, wanted = Passages(arrays, documents).retrieve([query], k)[0], oracle(texts, query)
    assert len(found) == min(k, len(wanted))
    for (text, score), (_, best) in zip(found, wanted, strict=False):
        assert score == pytest.approx(best, rel=1e-5) == pytest.approx(dict(wanted)[text], rel=1e-5)


def test_an_index_is_the_same_however_many_documents_are_sorted_at_once(monkeypatch):
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(list("bcdefgh"), random.integers(6))) for _ in range(50)]

    def built():
        builder = IndexBuilder()
        for text in texts:
            builder.add(text)
        return builder.finish()

    whole = built()
    assert whole["post_start"][-1] == sum(len(set(text.split())) for text in texts)
    for part in (1, 7, 50):
        monkeypatch.setattr(index, "_PART", part)
        assert all((array == whole[name]).all() for name, array in built().items())


def test_the_best_of_many_are_the_first_of_all_with_ties_in_the_order_of_the_corpus(tmp_path):
    random = np.random.default_rng(0)
    passages = opened(tmp_path, [" ".join(random.choice(list("bcdefgh"), 4)) for _ in range(1000)])
    for query in ("b", "b c d", "h h g"):
        every = passages.retrieve([query], 1000)[0]
        assert len({score for _, score in every[:200]}) < 200  # there are ties
        for k in (1, 3, 14, 15, 16, 100):
            assert passages.retrieve([query], k)[0] == every[:k]


def test_a_folder_is_mapped_and_another_corpus_or_damage_is_refused(tmp_path):
    passages = opened(tmp_path, TEXTS)
    assert len(passages) == 4 and [passages[n] for n in range(4)] == TEXTS
    assert [text for text, _ in passages.retrieve(["the naïve wine"], 3)[0]] == [TEXTS[1], TEXTS[3]]
    assert passages.retrieve(["", "the", "x" * 100_000], 3) == [[], [], []]
    (tmp_path / "corpus").rename(tmp_path / "other")
    with refused("another corpus, 'corpus'"):
        opened(tmp_path, TEXTS, "other")
    with refused("no passages"):
        opened(tmp_path, [], "none")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]  # nothing unfinished is left
    opened(tmp_path, TEXTS, "cut")
    np.save(tmp_path / "cut" / "post_doc.npy", np.zeros(2, np.int32))
    passages_in_files._mapped.cache_clear()
    with refused("does not fit"):
        opened(tmp_path, TEXTS, "cut")


def lines(file, *records):
    file.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in records), "utf-8")
    return file


def folder(place, **files):
    place.mkdir(exist_ok=True)
    for name, records in files.items():
        lines(place / f"{name}.jsonl", *records)
    return place


ONE = {"id": "test_0", "question": "what  is red?", "golden_answers": ["a colour", "wine"], "metadata": {"hop": 1}}
PASSAGES = [{"id": str(n), "contents": text} for n, text in enumerate(TEXTS)]


def test_layouts_of_questions_and_passages(tmp_path):
    read = Question("what is red?", ("a colour", "wine"))
    squad = {"question": "when?", "answer": "1853"}
    assert read_questions(lines(tmp_path / "q.jsonl", ONE, "\n", squad)) == (read, Question("when?", ("1853",)))
    titled = {"_id": "1", "title": "Red", "text": "Red is a colour.", "metadata": {}}
    assert list(read_passages(lines(tmp_path / "p.jsonl", titled, PASSAGES[1]))) == TEXTS[:2]
    assert read_folder(str(folder(tmp_path / "both", train=[ONE], dev=[squad]))) == ((read,), (Question("when?", ("1853",)),))
    numbered = [{"question": f"{n}?", "golden_answers": [str(n)]} for n in range(1, 21)]
    train, held_out = read_folder(str(folder(tmp_path / "one", questions=numbered)))
    assert [q.text for q in held_out] == ["10?", "20?"] and len(train) == 18


@pytest.mark.parametrize(("record", "found"), [
    ({"golden_answers": None, "answer": "x"}, ("x",)),  # frames that were put together
    ({"answers": ["x", "y"]}, ("x", "y")), ({"golden_answers": ["x", "", 1999, "x"]}, ("x", "1999")),
    ({"answer": {"value": "x", "aliases": ["X", "x"]}}, ("x", "X")),  # TriviaQA
    ({"answer": "x", "answer_aliases": ["y"]}, ("x", "y")),  # MuSiQue
    ({"answers": {"text": ["x", "x", "y"], "answer_start": [1, 5, 9]}}, ("x", "y")),  # SQuAD
    ({"possible_answers": '["x", "y"]'}, ("x", "y")), ({"golden_answers": "['x', \"y's\"]"}, ("x", "y's")),  # PopQA, CSV files
    ({"answer": "[sic]"}, ("[sic]",)), ({"answer": "[1]"}, ("[1]",)), ({"answers": "['a b' 'x']"}, ("a b", "x")),
    ({"answers": """["The 'Burbs' '89"]"""}, ("The 'Burbs' '89",)), ({"answers": r'["caf\u00e9 \/ x"]'}, ("café / x",)),
    ({"reward_model": {"ground_truth": {"target": ["x"]}}}, ("x",)), ({"golden_answers": ["x"], "answer": "y"}, ("x",)),
])  # fmt: skip
def test_answers_in_the_layouts_of_the_hub(tmp_path, record, found):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "q?"} | record))
    (question,) = read_questions(tmp_path / "q.jsonl")
    assert question.answers == found


@pytest.mark.parametrize(("record", "reason"), [
    ("{\n", "is no JSON"), ("[1]\n", "is no JSON object"), ("[" * 100_000 + "\n", "is no JSON"), ("\x00\n", "is no JSON"),
    ({"question": "x"}, "expected"), ({"question": "x", "golden_answers": []}, "expected"),
    ({"question": "x", "golden_answers": [["y"]]}, "expected"), ({"question": "", "answer": "x"}, "expected"),
    ({"question": "x", "golden_answers": ["", None]}, "expected"), ({"question": "x", "answer": {"aliases": None}}, "expected"),
    ({"question": "x" * 100_000, "answer": "x"}, "4000 characters"), ({"query": "x", "answers": ["y"]}, "golden_answers"),
])  # fmt: skip
def test_damaged_questions_are_refused_with_their_line(tmp_path, record, reason):
    with refused(f"q.jsonl line 3: {'is no' if 'expected' not in reason else 'is no question'}") as caught:
        read_questions(lines(tmp_path / "q.jsonl", ONE, "\n", record, ONE))
    assert reason in str(caught.value)


@pytest.mark.parametrize(("files", "reason"), [
    ({}, "holds neither train.jsonl with test.jsonl or dev.jsonl, nor"), ({"train": [ONE]}, "nor questions.jsonl"),
    ({"questions": [ONE]}, "give 10 or more"), ({"train": [ONE], "test": []}, "has no questions"),
    ({"train": [ONE], "test": [ONE]}, "holds no passages.jsonl or corpus.jsonl"),
    ({"train": [ONE], "test": [ONE], "corpus": [{"id": "0", "body": "x"}]}, "corpus.jsonl line 1: is no passage"),
    ({"train": [ONE], "test": [ONE], "corpus": []}, "there are no passages"),
])  # fmt: skip
def test_folders_that_lack_something_are_refused(tmp_path, files, reason):
    data = str(folder(tmp_path / "data", **files))
    with refused(f"data={data}: ") as caught:
        search_makers(ALONE, tmp_path / "cache", data, "", 24, top_k=3, max_turns=3)
    assert reason in str(caught.value)


def test_a_folder_is_played_and_a_changed_corpus_is_indexed_anew(tmp_path):
    data = folder(tmp_path / "data", train=[ONE], test=[ONE, ONE], passages=PASSAGES)

    def first_found():
        makers = search_makers(ALONE, tmp_path / "cache", str(data), "", 24, top_k=1, max_turns=3)
        train, held_out = (make() for make in makers)
        assert (len(train), len(held_out)) == (1, 2) and not hasattr(train, "expert")
        train.reset(0)
        return train.step("<search>red</search>")[0]

    assert first_found() == "(1) Red is a colour."
    lines(data / "passages.jsonl", {"id": "0", "contents": "a red rose"})
    assert first_found() == "(1) a red rose"


class Mock(http.server.BaseHTTPRequestHandler):
    """A retrieval server that answers /retrieve with what `answers` gives, one after another, the last one for ever."""

    answers: list
    asked: list

    def do_POST(self):
        self.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            return answer(self)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def mock(monkeypatch):
    monkeypatch.setattr(retrieval_client, "WAIT", 0.001)
    Mock.asked, ended = [], threading.Event()
    Mock.ended = ended
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mock)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def client(*answers, **options):
        Mock.answers = list(answers)
        return RetrievalServer(f"http://127.0.0.1:{server.server_port}", **options)

    yield client
    ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


GOOD = {"result": [[{"document": {"id": "7", "contents": "red"}, "score": 2}, {"document": {"contents": "wine"}, "score": 1}]]}


def hang(handler):
    Mock.ended.wait()


def drip(handler):
    """Sends a header for ever, a byte at a time."""
    while not Mock.ended.wait(0.01):
        try:
            handler.wfile.write(b"H")
        except OSError:
            return


def test_the_protocol_and_a_second_try(mock):
    server = mock((500, b""), GOOD)
    assert server.retrieve(["what is red?"], 2) == [[("red", 2.0), ("wine", 1.0)]]
    assert Mock.asked == 2 * [("/retrieve", {"queries": ["what is red?"], "topk": 2, "return_scores": True})]
    plain = mock({"result": [[{"contents": "red"}], []]})  # as Search-R1's server answers without scores
    assert plain.retrieve(["a", "b"], 2) == [[("red", 0.0)], []]


@pytest.mark.parametrize(("answer", "reason", "tries"), [
    (hang, "gave no answer in 0.1 s, 2 times", 2), (drip, "gave no answer in 0.1 s, 2 times", 2),
    ((503, b""), "status 503, 2 times", 2), ((404, b""), "status 404", 1), ((302, b""), "status 302", 1),
    (b"<html><body>Welcome\nto nginx</body></html>", "no JSON: b'<html>", 1), (b"", "no JSON", 1),
    (b"[" * 100_000, "no JSON", 1), ([], '"result"', 1), ({"result": "x"}, '"result"', 1),
    ({"result": [[], []]}, "2 queries", 1),
    ({"result": [[{"document": {"contents": "x"}, "score": 1}] * 3]}, "3 passages for a query, not the 2", 1),
    ({"result": [[{"document": {"text": "x"}}]]}, '"contents"', 1), ({"result": [[5]]}, '"contents"', 1),
    (b'{"result": [[{"document": {"contents": "x"}, "score": NaN}]]}', "score nan", 1),
])  # fmt: skip
def test_a_server_that_misbehaves_fails_the_episode_in_one_line(mock, answer, reason, tries, tmp_path):
    server = mock(answer, time_limit=0.1, tries=2)
    with refused(reason, RetrievalError):
        server.retrieve(["red"], 2)
    end = time.monotonic() + 10
    while len(Mock.asked) < tries and time.monotonic() < end:  # the mock may read a request after its client has gone
        time.sleep(0.01)
    assert len(Mock.asked) == tries
    make, _ = search_makers(ALONE, tmp_path, "", "", 24, top_k=2, max_turns=3)

    def with_server():
        env = make()
        env._retriever = server
        return env

    workers = LocalWorkers(with_server)
    workers.send([(0, 7, ()), (0, 7, ("<search>red</search>",)), (1, 7, ())])
    (_, begun), (_, failed), (_, other) = workers.receive(3)
    assert isinstance(failed, EnvFailure) and reason in failed.reason and "\n" not in failed.reason
    assert begun == other  # the other episode goes on
    assert len(Mock.asked) == (tries if tries > 1 else 2)  # a server that never answered is left alone for a while


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_is_busy_or_restarts_is_asked_again(mock, status):
    server = mock(*[(status, b"")] * 6, GOOD)
    assert server.retrieve(["red"], 2) == [[("red", 2.0), ("wine", 1.0)]] and len(Mock.asked) == 7


def test_a_server_that_has_answered_is_waited_for(mock, monkeypatch):
    monkeypatch.setattr(retrieval_client, "LONGEST_WAIT", 0.02)
    server = mock(GOOD, *[(503, b"")] * 20, GOOD, (503, b""), patience=60)
    for _ in range(2):
        assert server.retrieve(["red"], 2) == [[("red", 2.0), ("wine", 1.0)]]
    assert len(Mock.asked) == 22
    server._patience = 0.1
    with refused("answered with status 503, ", RetrievalError):
        server.retrieve(["red"], 2)


def test_a_url_is_used_whole_or_refused(mock, tmp_path):
    server = mock(GOOD)
    asked = RetrievalServer(f"{server._url}/find?index=wiki")
    asked.retrieve(["red"], 2)
    assert Mock.asked[0][0] == "/find?index=wiki"
    with refused("http://...@x:8000: holds a user name, which cannot be sent; leave it out"):
        RetrievalServer("http://me:secret@x:8000")
    with pytest.raises(ValueError, match="holds a user name") as caught:
        search_makers(ALONE, tmp_path, "", "http://me:secret@x:8000", 24, top_k=1, max_turns=3)
    assert "secret" not in str(caught.value) and str(caught.value).count("http") == 1


def test_a_server_that_gives_no_answer_in_time_is_asked_three_times(mock):
    server = mock(hang, time_limit=0.1)
    with refused("gave no answer in 0.1 s, 3 times", RetrievalError):
        server.retrieve(["red"], 2)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://[x"])
def test_what_is_no_url_is_refused(url):
    with refused("give http://HOST:PORT"):
        RetrievalServer(url)


def test_the_command_refuses_a_port_that_is_taken(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr("sys.argv", ["search_server", "--passages", "24", "--cache", str(tmp_path), "--port", port])
        with refused(f"--port {port}: cannot listen there"):
            search_server.main()


def test_our_own_server_speaks_the_protocol(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval_client, "WAIT", 0.001)
    passages = opened(tmp_path, TEXTS)
    with served(search_server.application(passages)) as url:
        url = url.removesuffix("/v1")
        server = RetrievalServer(url)
        queries = ["what is red?", "naïve", "nothing of this"]
        assert server.retrieve(queries, 2) == passages.retrieve(queries, 2)
        assert server._post(b'{"queries": ["blue"]}') == json.dumps(
            {"result": [[{"contents": TEXTS[2]}]]}, separators=(",", ":"), ensure_ascii=False
        ).encode()  # fmt: skip
        for body in (b"", b"[]", b"{}", b'{"queries": "x"}', b'{"queries": [], "topk": 0}', b'{"queries": [], "topk": true}'):
            with refused("status 400"):
                server._post(body)
        data = folder(tmp_path / "data", train=[ONE], test=[ONE])  # no passages here
        make, _ = search_makers(ALONE, tmp_path / "cache", str(data), url, 24, top_k=1, max_turns=3)
        env = make()
        env.reset(0)
        assert env.step("<search>red</search>")[0] == "(1) Red is a colour."
    with refused(f"retriever={url}: cannot be asked"):
        search_makers(ALONE, tmp_path / "cache", str(data), url, 24, top_k=1, max_turns=3)
