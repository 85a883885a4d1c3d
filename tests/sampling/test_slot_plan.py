"""Plans leave each prompt in its slot, whatever the rows held before, and compute no more for beginnings in common."""

import numpy as np
import pytest

from hgpo_jax.sampling.generate import buckets
from hgpo_jax.sampling.held_prefixes import HeldPrefixes
from hgpo_jax.sampling.slot_plan import Copy, Extend, Plan, Prefill, Shapes, SlotRequest

LIMIT = 600


class Sampler:
    """Follows plans on rows of token ids, in place of caches."""

    def __init__(self, shards: int, slots: int, rows: int = 0):
        self.shapes = Shapes(
            buckets(slots, factor=4, smallest=1)[-3:], buckets(LIMIT, factor=2, smallest=128), pieces=[32, 128, 512]
        )
        self.slots, self.held = [[None] * slots for _ in range(shards)], HeldPrefixes(shards, slots, 32)
        self.held.make_store(rows)
        self.rows = np.full((shards, slots + rows, LIMIT), -1)
        self.computed = self.without = 0

    def add(self, prompts: list[list[int]]) -> Plan:
        requests = [SlotRequest(number, 0, ids) for number, ids in enumerate(prompts)]
        self.without += Plan(requests, self.slots, self.held, self.shapes, split=False).computed
        plan = Plan.cheapest(requests, self.slots, self.held, self.shapes)
        computed = sum(self.follow(step) for step in plan.steps)
        assert computed == plan.computed
        self.computed += computed
        self.slots, self.held = plan.slots, plan.held
        for shard, some in enumerate(self.slots):
            for slot, request in enumerate(some):
                if request:
                    np.testing.assert_array_equal(self.rows[shard, slot, : len(request.ids)], request.ids)
        return plan

    def follow(self, step: Copy | Prefill | Extend) -> int:
        """Returns the tokens that the program computes."""
        count = self.shapes.counts[0]
        if isinstance(step, Copy):
            self.rows[step.shard, step.row] = self.rows[step.shard, step.source]
            return 0
        if isinstance(step, Prefill):
            assert max(map(len, step.prompts)) <= step.most
            for shard, prompts in enumerate(step.prompts):
                for slot, request in (one for same in prompts for one in same):
                    self.rows[shard, slot, : len(request.ids)] = request.ids
            return step.width * step.most * len(self.slots)
        (width,) = {piece.width for piece in step.pieces}
        places = [(piece.shard, piece.slot) for piece in step.pieces]
        assert len(set(places)) == len(places)
        assert max(sum(piece.shard == shard for piece in step.pieces) for shard in range(len(self.slots))) <= count
        for piece in step.pieces:
            assert 0 < piece.end - piece.begin <= width
            row = self.rows[piece.shard, piece.slot]
            np.testing.assert_array_equal(row[: piece.begin], piece.request.ids[: piece.begin])
            row[piece.begin : piece.end] = piece.request.ids[piece.begin : piece.end]
        return width * count * len(self.slots)

    def end(self, random: np.random.Generator) -> list[list[int]]:
        """Ends some responses; returns their texts."""
        texts = []
        for shard, some in enumerate(self.slots):
            for slot, request in enumerate(some):
                if request and random.random() < 0.6:
                    text = [*request.ids, *random.integers(0, 9, int(random.integers(20))).tolist()][:LIMIT]
                    self.rows[shard, slot, : len(text)], some[slot] = text, None
                    self.held.hold(shard, slot, text)
                    texts.append(text)
        return texts


@pytest.mark.parametrize("seed", range(8))
def test_prompts_of_trees_of_conversations(seed):
    random = np.random.default_rng(seed)
    sampler = Sampler((1, 2, 4)[seed % 3], (2, 3, 5, 17)[seed % 4], rows=(0, 3)[seed // 4])
    texts, reused = [random.integers(0, 9, int(random.integers(1, LIMIT))).tolist() for _ in range(4)], 0
    for _ in range(8):
        prompts = []
        for _ in range(int(random.integers(1 + sum(some.count(None) for some in sampler.slots)))):
            text = texts[int(random.integers(len(texts)))]
            keep = len(text) if random.random() < 0.5 else int(random.integers(1, len(text) + 1))
            prompts.append([*text[:keep], *random.integers(0, 9, int(random.integers(1, 40)))][:LIMIT])
            texts.append(prompts[-1])
        reused += sampler.add(prompts).reused
        assert sampler.computed <= sampler.without
        texts = [*texts, *sampler.end(random)][-30:]
    assert reused


@pytest.mark.parametrize(
    ("shards", "slots", "computed"),
    [
        (1, 16, 600 + 15 * 2 * 128),
        (1, 64, 4 * 600 + 63 * 2 * 128 + 2 * 128),
        (4, 4, 4 * 600 + 12 * 2 * 128),
        (4, 16, 4 * 600 + 60 * 2 * 128),
        (8, 1, 8 * 600),
    ],
)
def test_a_beginning_in_common_is_computed_once_for_each_shard(shards, slots, computed):
    """As many prompts as a program takes are continued at a time."""
    random = np.random.default_rng(0)
    head, sampler = random.integers(0, 9, 300).tolist(), Sampler(shards, slots)
    plan = sampler.add([head + random.integers(0, 9, 200).tolist() for _ in range(shards * slots)])
    assert plan.computed == computed <= sampler.without == shards * slots * 600


def test_turns_from_the_store_are_computed_together():
    random = np.random.default_rng(0)
    sampler, texts = Sampler(1, 17, rows=34), [random.integers(0, 9, 300).tolist() for _ in range(34)]
    for some in (texts[:17], texts[17:]):
        sampler.add(some)
        sampler.slots = [[None] * 17]
    plan = sampler.add([[*text, 1] for text in texts[:4]])
    assert plan.reused == 4 * 300
    assert [len(step.pieces) for step in plan.steps if isinstance(step, Extend)] == [2, 2]


def test_what_begins_with_a_prompt_of_the_same_time_waits_for_it():
    random = np.random.default_rng(0)
    sampler, text = Sampler(1, 17), random.integers(0, 9, 100).tolist()
    sampler.add([text])
    more = [*text, *random.integers(0, 9, 200).tolist()]
    plan = sampler.add([more, [*more, 1], [*more, 2]])
    assert plan.reused == 100 + 2 * 300
