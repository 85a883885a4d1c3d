"""The default states of agents that call tools: equal for two visits of a state, whatever always differs in their results."""

import pytest

from hgpo_jax.serving.requests import Conversation
from hgpo_jax.serving.tool_results import VARYING, without_varying_parts


def result(text):
    return {"role": "tool", "content": text}


def calls(*all_):
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in all_]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def state(*messages):
    return Conversation([{"role": "user", "content": "Tidy up."}, *messages]).state


PYTEST = """\
============================= test session starts ==============================
rootdir: /tmp/pytest-of-root/pytest-%d
collected 12 items

tests/test_cup.py ..........F.                                           [100%%]

E       AssertionError: <cup.Cup object at 0x7f%s> is not clean
=================== 1 failed, 11 passed in %s ===================="""
LISTING = "total 8\n-rw-r--r-- 1 root root  812 Nov %s main.py\ndrwxr-xr-x 2 root root 4096 Nov %s tests"
REQUEST = 'HTTP/1.1 200 OK\nDate: %s\nX-Request-Id: %s\n\n{"status": "open", "items": 3, "created": %s}'
LOG = "%s INFO worker[pid %d] attempt %d/5: cannot reach the database (after %s)"
BUILD = "[+] Building %s (8/8) FINISHED\n => exporting layers %s\n\nreal\t%s\nuser\t0m0.004s"
UUIDS = "0b5c2f6e-8a51-4f0e-9d3a-5d1f4be0c1aa", "9F1B3C7D-22aa-4b6e-8c1d-77e0a1b2c3d4"


@pytest.mark.parametrize(
    ("form", "one", "other"),
    [
        (PYTEST, (3, "3a1c2b40", "0.34s"), (117, "9e77aa10", "12.08s (0:00:12)")),
        (LISTING, ("28 05:13", "28 05:13"), (" 2 17:40", "12 00:01")),
        (
            REQUEST,
            ("Sat, 28 Nov 2026 05:13:17 GMT", UUIDS[0], 1795842797),
            ("Sun, 06 Dec 2026 23:59:59 GMT", UUIDS[1], 1796601599123),
        ),
        (LOG, ("2026-11-28 05:13:17,482", 812, 1, "30 s"), ("2026-12-06 23:59:59,001", 90210, 4, "1m 30s")),
        (LOG, ("2026-11-28T05:13:17Z", 1, 2, "250 ms"), ("2026-11-28T06:13:17.123456+01:00", 2, 3, "4.5 seconds")),
        (BUILD, ("3.4s", "0.1s", "0m3.412s"), ("41s", "1.25s", "1m2.001s")),
        ("Out[%d]: 42", (7,), (31,)),
        ("%s\nstep %s", ("Sat Nov 28 05:13:17 UTC 2026", "3 of 20"), ("Sun Dec  6 23:59:59 CET 2026", "14 of 20")),
        ("saved to %s/plan.txt", ("/tmp/tmpk3j9x_a1",), ("/var/folders/zz/q8_x2/T/tmpab12cd34",)),
        ("saved to %s/plan.txt", ("/tmp/tmp.Xb3kPq9LmZ",), ("/tmp/tmp8d2f0aqq",)),
    ],
)
def test_results_that_differ_in_time_and_random_names_are_one_state(form, one, other):
    one, other = form % one, form % other
    if "(0:00:12)" in other:  # which pytest adds to a long time
        one = one.replace("0.34s", "0.34s (0:00:00)")
    assert one != other and without_varying_parts(one) == without_varying_parts(other)


@pytest.mark.parametrize(
    "text",
    [
        "You see a cup 1, a shelf 12 and a desk 3.", "src/main.py:12:34: error: 2 arguments", "41 passed, 2 failed",
        '{"price": 19.99, "stock": 1204, "id": 48213}', "-rw-r--r-- 1 root root 812 main.py", "/tmp/project/main.py",
        "version 3.11.7", "[5, 3, 0.25]", "meeting at 10:30", "turned 3 times, steps: 4", "1.5 GB of 16 GB",
        "commit f383644", "room 404", "It costs $15.",
    ],
)  # fmt: skip
def test_what_tells_states_apart_stays(text):
    assert without_varying_parts(text) == text


def test_every_kind_is_named():
    text = f"{UUIDS[0]} /tmp/tmpk3j9x_a1 2026-11-28 0.3 s 0x7f3a1c2b In [3]"
    assert without_varying_parts(text) == "<uuid> <temp> <time> <duration> <address> In [<count>]"
    assert set(VARYING) == {"<uuid>", "<temp>", "<time>", "<duration>", "<address>", "<count>"}


def test_a_state_is_the_last_calls_and_their_results():
    look, take = ("look", {"at": "désk", "from": 1}), ("take", {"what": "cup"})
    seen = state(calls(look), result("A cup."), calls(look, take), result("A desk."), result("Taken in 0.2 s."))
    assert seen == 'look {"at":"désk","from":1}\nA desk.\ntake {"what":"cup"}\nTaken in <duration>.'
    # Neither what was before nor the order of the arguments matters.
    assert seen == state(calls(("look", {"from": 1, "at": "désk"}), take), result("A desk."), result("Taken in 31 ms."))
    assert seen != state(calls(("look", {"at": "wall"}), take), result("A desk."), result("Taken in 0.2 s."))
    assert state(calls(take), result("Taken."), result("and more")) == 'take {"what":"cup"}\nTaken.\nand more'
    assert state(result("A desk.")) == "A desk."
    assert state(calls(look), result("A cup."), {"role": "user", "content": "And at 05:13:17?"}) == "And at 05:13:17?"
