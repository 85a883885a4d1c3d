"""Seeded mutations of stored inputs: bytes, words, lines, and the trees of JSON documents."""

import json
import random
import re
from collections.abc import Iterator

# What parsers trip over: ends of ranges, other kinds, brackets without end, markers, paths, characters that are no text.
WORDS = [
    b"", b"0", b"-1", b"1e999", b"NaN", b"Infinity", b"9" * 30, b"9" * 5000, b"0x1F", b"1_0", b"0.1.2", b"true", b"null", b"~",
    b"{}", b"[]", b'""', b"''", b"[" * 200, b"(" * 200, b"{" * 200, b"a: " * 50, b"../../x", b"/etc/passwd", b"\\u0000",
    b"\\ud800", b"<|im_end|>", b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"\x1b[2J", b"\r\n", b"\xe2\x80\xa8", b"\xc2\x85",
    "İ٣²".encode(), b"!!python/object/apply:os.system [x]", b"&a *a", b"<<: ", b"? ", b"- ", b": ", b"#", b"%", b"$", b"?x",
    b"|", b"and", b"or", b"not", b"forall", b"exists", b"when", b"- object", b'"""', b"search[", b"click[", b"]", b"<action>",
]  # fmt: skip
VALUES = [
    None, True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 2**64, 10**30, "", "x", "../../x", "\0",
    "\ud800", "<|im_end|>", "9" * 400, [], {}, [[]], [None], {"": None}, {"x": []}, ["x", 1], [0, 0], [-1, 8], [2**62, 2**63],
]  # fmt: skip
WORD = re.compile(rb"\w+|\s+|[^\w\s]", re.ASCII)


def inputs(corpus: list[bytes], count: int, seed: int, json_parts=None) -> Iterator[bytes]:
    """`count` inputs: the corpus as it is, then mutations of it, the same for the same seed.

    json_parts: (split, join), where an input holds JSON documents: `split(data) -> [bytes]`, `join([bytes]) -> data`.
    """
    rng = random.Random(seed)
    yield from corpus[:count]
    for _ in range(count - len(corpus)):
        data = rng.choice(corpus)
        for _ in range(min(5, 1 + int(rng.expovariate(1.5)))):
            in_tree = json_parts and rng.random() < 0.6
            data = change_tree(data, rng, *json_parts) if in_tree else change(data, rng, corpus)
        yield data


def change(data: bytes, rng: random.Random, corpus: list[bytes]) -> bytes:
    """One mutation of bytes, words or lines."""
    kind = rng.randrange(8)
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == 0:  # flipped bits
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 1:  # an end or a piece cut off
        return data[:at] if rng.random() < 0.3 else data[:at] + data[min(end, at + 40) :]
    if kind == 2:  # a piece twice
        return data[:end] + data[max(at, end - 200) : end] * rng.choice((1, 1, 2, 30)) + data[end:]
    if kind == 3:  # two inputs in one
        other = rng.choice(corpus)
        return data[:at] + other[rng.randrange(len(other) + 1) :]
    if kind == 4:
        return data[:at] + rng.choice(WORDS) + data[at:]
    if kind == 5:  # lines swapped or twice
        lines = data.split(b"\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = (lines[j], lines[i]) if rng.random() < 0.5 else (lines[i], lines[i])
        return b"\n".join(lines)
    words = WORD.findall(data)
    if not words:
        return rng.choice(WORDS)
    i, j = rng.randrange(len(words)), rng.randrange(len(words))
    if kind == 6:
        words[i], words[j] = words[j], words[i]
    else:
        words[i] = rng.choice((rng.choice(WORDS), words[j], words[i] * 2, b""))
    return b"".join(words)


def change_tree(data: bytes, rng: random.Random, split, join) -> bytes:
    """One mutation of one node of a JSON document; of its bytes where it is none."""
    parts = split(data)
    i = rng.randrange(len(parts))
    try:
        tree = [json.loads(parts[i])]
    except (ValueError, RecursionError):
        return change(data, rng, [data])
    nodes = [(tree, 0)]
    for node, key in nodes:  # grows while it is walked
        value = node[key]
        nodes += [(value, inner) for inner in (value if isinstance(value, dict) else range(len(value)))] if isinstance(
            value, dict | list) else []  # fmt: skip
    node, key = rng.choice(nodes)
    kind = rng.randrange(5)
    if kind == 0 or (isinstance(node[key], str) and rng.random() < 0.5 and not node[key]):
        node[key] = rng.choice(VALUES)
    elif kind == 1 and node is not tree:
        del node[key]
    elif kind == 2:  # another node's value here
        other, place = rng.choice(nodes)
        node[key] = json.loads(json.dumps(other[place]))
    elif kind == 3 and isinstance(node, dict):
        node[rng.choice(("", "x", key + "x", key.upper(), "__metadata__", "\ud800"))] = node.pop(key)
    elif isinstance(node[key], str):
        text = node[key].encode("utf-8", "surrogatepass")
        node[key] = change(text, rng, [text]).decode("utf-8", rng.choice(("replace", "surrogateescape")))
    elif isinstance(node[key], bool | int | float):
        node[key] = rng.choice((node[key] + 1, -node[key], node[key] * 2, str(node[key]), 0))
    else:
        node[key] = rng.choice(VALUES)
    parts[i] = json.dumps(tree[0], ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    return join(parts)
