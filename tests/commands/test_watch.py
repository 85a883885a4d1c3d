"""`python -m hgpo_jax.watch`: what it says of a turn; test_evaluate.py watches a run play."""

import io
import sys

import jax
import numpy as np
from PIL import Image, ImageSequence

from hgpo_jax import watch
from hgpo_jax.envs.sokoban import SokobanPixels


def test_probabilities_are_those_of_the_tokens():
    logp = np.log(np.array([0.5, 0.25, 1.0], np.float32))
    said = watch.probabilities([" go_to", " fridge_1", "<end>"], logp)
    assert said == "probability 12.5%: go_to 50%, fridge_1 25%, <end> 100%"
    assert watch.probabilities(["\n"], logp[2:]) == r"probability 100.0%: '\n' 100%"
    long = watch.probabilities([f"w{i}" for i in range(10)], np.log(np.array([0.8] * 9 + [0.3], np.float32)))
    assert long == f"probability {0.8**9 * 0.3:.1%}: 10 tokens, 75% each on average, least 'w9' 30%"


def test_in_a_terminal_enter_shows_the_next_turn(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    story = (["  here\n    > go", "  there\n    > stop"], ["probability 1", "probability 2"], "success")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    watch.show(*story)
    assert asked == []
    shown = capsys.readouterr().out
    assert shown == "  here\n    > go\n      probability 1\n  there\n    > stop\n      probability 2\n\nsuccess after 2 turns\n"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    watch.show(*story)
    assert asked == ["turn 1> "] and capsys.readouterr().out == shown


def test_a_film_shows_each_picture_magnified(tmp_path):
    env = SokobanPixels(tile=4)
    reset = jax.jit(env.reset)
    pictures = np.stack([env.picture(reset(jax.random.key(seed))[1]) for seed in range(3)])
    watch.save_film(tmp_path / "film.gif", pictures)
    with Image.open(tmp_path / "film.gif") as film:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(film)]
        assert film.info["duration"] == watch.FRAME_MS
    times = watch.FILM_SIDE // 24
    assert [frame.shape for frame in frames] == [(24 * times, 24 * times, 3)] * 3
    for frame, picture in zip(frames, pictures, strict=True):
        np.testing.assert_array_equal(frame[times // 2 :: times, times // 2 :: times], picture)
        np.testing.assert_array_equal(frame[:times, :times], np.broadcast_to(picture[0, 0], (times, times, 3)))
