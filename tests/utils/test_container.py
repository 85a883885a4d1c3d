"""Limits of a container, by both versions of the interface, in a folder that stands for the kernel's."""

import pytest

from hgpo_jax.utils import container


@pytest.mark.parametrize(("files", "memory", "processors"), [
    ({}, None, None),
    ({"memory.max": "8589934592\n", "cpu.max": "150000 100000\n"}, 2**33, 2),
    ({"memory.max": "max\n", "cpu.max": "max 100000\n"}, None, None),
    ({"cpu.max": "20000 100000"}, None, 1),
    ({"memory/memory.limit_in_bytes": "1073741824",
      "cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 2**30, 4),
    ({"memory/memory.limit_in_bytes": "9223372036854771712", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
     None, None),
])  # fmt: skip
def test_the_limits_of_a_control_group(files, memory, processors, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (container.memory_limit(tmp_path), container.processor_limit(tmp_path)) == (memory, processors)


def test_processors_are_no_more_than_the_limit(monkeypatch):
    there = container.processors()
    monkeypatch.setattr(container, "processor_limit", lambda: 1)
    assert container.processors() == 1 <= there
