"""The default states of agents that call tools: equal for two visits of a state, whatever always differs in their results."""

import re

import pytest

from hgpo_jax.serving.requests import Conversation
from hgpo_jax.serving.tool_results import MEASUREMENTS, RANDOM_NAMES, without_varying_parts


def result(text):
    return {"role": "tool", "content": text}


def calls(*all_):
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in all_]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def state(*messages):
    return Conversation([{"role": "user", "content": "Tidy up."}, *messages]).state


PYTEST = """\
============================= test session starts ==============================
rootdir: /tmp/pytest-of-ann/pytest-%d
collected 12 items

tests/test_cup.py ..........F.                                           [100%%]

E       AssertionError: <cup.Cup object at 0x7f%s> is not clean
=================== 1 failed, 11 passed in %s ===================="""
LISTING = "total 8\n-rw-r--r-- 1 ann ann  812 Nov %s main.py\ndrwxr-xr-x 2 root root 4096 Nov %s tests"
REQUEST = 'HTTP/1.1 200 OK\nDate: %s\nX-Request-Id: %s\n\n{"status": "open", "items": 3, "created_at": %s}'
LOG = "%s INFO worker[pid %d] attempt 2/5: cannot reach the database (after %s)"
BUILD = "Compiling (8/8)\nFinished after %s\nElapsed: %s\n\nreal\t%s\nuser\t0m0.004s"
UUIDS = "0b5c2f6e-8a51-4f0e-9d3a-5d1f4be0c1aa", "9F1B3C7D-22aa-4b6e-8c1d-77e0a1b2c3d4"


@pytest.mark.parametrize(
    ("form", "one", "other"),
    [
        (PYTEST, (3, "3a1c2b40", "0.34s"), (117, "9e77aa10", "12.08s (0:00:12)")),
        (LISTING, ("28 05:13", "28 05:13"), (" 2 17:40", "12 00:01")),
        (
            REQUEST,
            ("Sat, 28 Nov 2026 05:13:17 GMT", UUIDS[0], 1795842797482),
            ("Sun, 06 Dec 2026 23:59:59 GMT", UUIDS[1], 1796601599123),
        ),
        (LOG, ("2026-11-28 05:13:17,482", 812, "30 s"), ("2026-12-06 23:59:59,001", 90210, "1m 30s")),
        (LOG, ("2026-11-28T05:13:17Z", 1, "250 ms"), ("2026-11-28T06:13:17.123456+01:00", 2, "4.5 seconds")),
        (BUILD, ("3.4s", "0.1s", "0m3.412s"), ("41s", "1.25s", "1m2.001s")),
        ("Out[%d]: 42", (7,), (31,)),
        ("%s\n", ("Sat Nov 28 05:13:17 UTC 2026",), ("Sun Dec  6 23:59:59 CET 2026",)),
        ("%s open", ("1795842797.482",), ("1796601599.0001",)),
        ("took %s, time=%s", ("3 s", "1h 2m 3s"), ("0.25 ms", "12.s")),
        ("saved to %s/plan.txt", ("/tmp/tmpk3j9x_a1",), ("/var/folders/zz/q8_x2/T/tmpab12cd34",)),
        ("saved to %s/plan.txt", ("/tmp/tmp.Xb3kPq9LmZ",), ("/tmp/tmp8d2f0aqq",)),
    ],
)
def test_results_that_differ_in_time_and_random_names_are_one_state(form, one, other):
    one, other = form % one, form % other
    assert one != other and without_varying_parts(one) == without_varying_parts(other)


@pytest.mark.parametrize(
    "text",
    [
        "You see a cup 1, a shelf 12 and a desk 3.", "src/main.py:12:34: error: 2 arguments", "41 passed, 2 failed",
        '{"price": 19.99, "stock": 1204, "id": 48213}', "-rw-r--r-- 1 ann ann 812 main.py", "/tmp/project/main.py",
        "version 3.11.7", "[5, 3, 0.25]", "meeting at 10:30", "turned 3 times, steps: 4", "1.5 GB of 16 GB",
        "commit f383644", "room 404", "It costs $15.", "drive 20 minutes", "free 10:30:00 to 11:00:00", "attempt 1/5",
        "step 3 of 20", "on 2026-11-28", "Sat, 28 Nov 2026", "a population of 1795842797", "at 1795842797", "id 1795842797482",
    ],
)  # fmt: skip
def test_what_tells_states_apart_stays(text):
    assert without_varying_parts(text) == text


def test_every_kind_is_named():
    text = f"{UUIDS[0]} /tmp/tmpk3j9x_a1 0x7f3a1c2b 2026-11-28 05:13 in 0.3 s In [3]"
    assert without_varying_parts(text) == "<uuid> <temp> <address> <time> in <duration> In [<count>]"
    assert [*RANDOM_NAMES, *MEASUREMENTS] == ["<uuid>", "<temp>", "<address>", "<time>", "<duration>", "<count>"]


@pytest.mark.parametrize("pattern", sum([*RANDOM_NAMES.values(), *MEASUREMENTS.values()], ()))
def test_no_repetition_is_unbounded(pattern):
    """One that is takes time quadratic in the length of a hostile result, and the server's event loop waits for it."""
    outside_classes = re.sub(r"\\.|\[[^]]*\]", "x", pattern)
    assert not re.search(r"[*+]|,\}", outside_classes)


def test_arguments_lose_only_random_names():
    def of(day, folder):
        return state(calls(("free", {"day": day, "at": "10:30:00", "in": folder})), result("3 rooms"))

    same = of("2024-05-01 10:30:00", "/tmp/tmpk3j9x_a1")
    assert same == of("2024-05-01 10:30:00", "/tmp/tmp8d2f0aqq") != of("2024-05-02 10:30:00", "/tmp/tmp8d2f0aqq")


def test_a_state_is_the_last_calls_and_their_results():
    look, take = ("look", {"at": "désk", "from": 1}), ("take", {"what": "cup"})
    seen = state(calls(look), result("A cup."), calls(look, take), result("A desk."), result("Taken in 0.2 s."))
    assert seen == 'look {"at":"désk","from":1}\nA desk.\ntake {"what":"cup"}\nTaken in <duration>.'
    # Neither what was before nor the order of the arguments matters.
    assert seen == state(calls(("look", {"from": 1, "at": "désk"}), take), result("A desk."), result("Taken in 31 ms."))
    assert seen != state(calls(("look", {"at": "wall"}), take), result("A desk."), result("Taken in 0.2 s."))
    assert state(calls(take), result("Taken."), result("and more")) == 'take {"what":"cup"}\nTaken.\nand more'
    assert state(result("A desk.")) == "A desk."


def test_a_reminder_after_a_result_belongs_to_its_state():
    """As Claude Code and others add one to each turn: it alone would make a state of all turns."""
    look, reminder = ("look", {}), {"role": "user", "content": "Continue; it took 0.5 s."}
    seen = [state(calls(look), result(text), reminder) for text in ("A cup.", "A desk.")]
    assert seen[0] == "look {}\nA cup.\nContinue; it took <duration>." != seen[1]
    answered = [calls(look), result("A cup."), {"role": "assistant", "content": "Done."}]
    assert state(*answered, {"role": "user", "content": "And at 05:13:17?"}) == "And at 05:13:17?"
