"""What is refused is said in one line."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(said: str, error: type[Exception] = ValueError):
    """What is inside raises this error; `said` is a part of its message, which is one line."""
    with pytest.raises(error) as caught:
        yield caught
    assert said in str(caught.value) and "\n" not in str(caught.value)
