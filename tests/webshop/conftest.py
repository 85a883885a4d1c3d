"""Shops for the tests: the tiny one, and the real one of ../shared, for tests that need "data"."""

import pytest
from webshop_tiny import write

from hgpo_jax.envs.webshop import load_shop
from tests.helpers.needs import DATA


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_files):
    return load_shop(*tiny_files[:2], order="original")


@pytest.fixture(scope="session")
def real_files():
    names = ("items_shuffle_1000.json.gz", "items_ins_v2_1000.json.gz", "items_human_ins_1000.json")
    return [DATA / "webshop" / name for name in names]


@pytest.fixture(scope="session")
def real(real_files):
    return load_shop(*real_files[:2])
