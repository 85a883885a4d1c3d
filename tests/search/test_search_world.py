"""The generated world: names that a search tells apart, facts that a reading of the passages confirms, held-out entities."""

import pickle
import re

import numpy as np
import pytest

from hgpo_jax.envs.lucene.analyzer import analyze
from hgpo_jax.envs.search.makers import ALONE, search_makers
from hgpo_jax.envs.search.passages import Passages
from hgpo_jax.envs.search.text import GeneratedSearch
from hgpo_jax.envs.search.world import CHOICES, PASSAGES, QUESTIONS, WORDS, World

# Read off the passages, not off the code: what stands after these words is the answer.
AFTER = {
    "born": r"{} was born in ([a-z ]+) in \d+",
    "come from": r"{} was born in ([a-z ]+) in \d+",
    "when born": r"{} was born in [a-z ]+ in (\d+)",
    "taught": r"{} was born in .* and learned from ([a-z ]+)\.",
    "founder": r"{} was founded by ([a-z ]+) in \d+",
    "founded when": r"{} was founded by [a-z ]+ in (\d+)",
    "maker": r"{} was made by ([a-z ]+) and finished",
    "finished when": r"{} was made by [a-z ]+ and finished in (\d+)",
}
READINGS = {
    "birthplace": "born", "birth": "when born", "teacher": "taught", "founder": "founder", "founding": "founded when",
    "maker": "maker", "finish": "finished when",
}  # fmt: skip


def test_words_are_different_terms_and_none_is_of_the_texts():
    words = [word for places in WORDS.values() for place in places for word in place]
    assert all(len(place) == CHOICES for places in WORDS.values() for place in places)
    terms = [term for word in words for term in analyze(word)]
    assert len(terms) == len(set(terms)) == len(words)
    texts = " ".join([*PASSAGES.values(), *(text for _, *wordings in QUESTIONS for text in wordings)])
    assert not set(terms) & set(analyze(texts))


@pytest.mark.parametrize("passages", [24, 3000, 90_000])
def test_names_are_unique_and_a_world_follows_from_its_key(passages):
    world, again, other = World(passages), World(passages), World(passages, key=1)
    sample = range(0, len(world), max(1, len(world) // 500))
    assert [world.passage(i) for i in sample] == [again.passage(i) for i in sample] != [other.passage(i) for i in sample]
    assert [world.question(i, False) for i in range(50)] == [again.question(i, False) for i in range(50)]
    assert world.question(2**64 - 1, True) == again.question(2**64 - 1, True)
    names = [world.passage(i)[0] for i in range(len(world))]
    assert len(world) == passages == len(set(names))


@pytest.mark.parametrize("passages", [0, 23, 900_001])
def test_sizes_that_no_world_has_are_refused(passages):
    with pytest.raises(ValueError, match=rf"passages={passages}: must be 24 to 900000"):
        World(passages)


def test_answers_are_what_the_passages_say_and_held_out_entities_keep_to_themselves():
    world = World(240)
    texts = dict(world.passage(i) for i in range(len(world)))
    asked = {False: set(), True: set()}
    for task in range(2000):
        held_out = task % 2 == 1
        question = world.question(task, held_out)
        wordings = {w.format(question.chain[0]): relations for relations, *ways in QUESTIONS for w in ways}
        relations = wordings[question.text]
        value = question.chain[0]
        for number, relation in enumerate(relations):
            assert value == question.chain[number]
            value = re.fullmatch(AFTER[READINGS[relation]].format(value) + ".*", texts[value])[1]
        assert question.answers == (value,) and question.task_type == len(relations) - 1
        asked[held_out] |= {*question.chain, *(() if value.isdecimal() else question.answers)}
    assert not asked[False] & asked[True]
    assert len(asked[True]) == len(world) / 4 and len(asked[False]) > 0.7 * len(world)  # all that there are, in time


@pytest.mark.parametrize("passages", [240, pytest.param(300_000, marks=pytest.mark.slow)])
def test_a_search_for_a_name_finds_its_passage_first_and_the_expert_solves_all(tmp_path, passages):
    env = GeneratedSearch.open(tmp_path, passages, held_out=True, max_turns=4)
    turns = []
    for task in range(100):
        env.reset(task)
        done = False
        while not done:
            action = env.expert(1)
            observation, _, reward, done, info = env.step(action)
            if "<search>" in action:
                assert observation.startswith("(1) " + re.fullmatch("<search> (.*)</search>", action)[1] + " was")
            turns.append((env.task_type, done))
        assert info["won"] and reward == 10 and info["signals"] == {"exact_match": 1, "f1": 1, "format": 1}
    assert np.mean([kind for kind, done in turns if done]) > 0.3  # both types occur
    assert sum(done for _, done in turns) == 100


def test_the_index_of_a_world_is_built_once_and_mapped(tmp_path, monkeypatch):
    first = GeneratedSearch.open(tmp_path, 24)
    monkeypatch.setattr("hgpo_jax.envs.search.passages.build", None)
    assert GeneratedSearch.open(tmp_path, 24)._retriever is first._retriever
    assert isinstance(first._retriever, Passages) and isinstance(first._retriever._texts, np.memmap)


def test_worker_processes_make_the_same_environment(tmp_path):
    for make in search_makers(ALONE, tmp_path, "", "", 24, top_k=2, max_turns=3):
        env, other = make(), pickle.loads(pickle.dumps(make))()
        assert (env.reset(5), env.goal, env.max_turns) == (other.reset(5), other.goal, 3)
        assert env.step(env.expert(1)) == other.step(other.expert(1))
