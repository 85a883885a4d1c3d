"""Shops for the tests: the tiny one, and the real one where ../shared is there."""

import pytest
from webshop_tiny import SHARED, write

from hgpo_jax.envs.webshop import load_shop


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_files):
    return load_shop(*tiny_files[:2], order="original")


@pytest.fixture(scope="session")
def real_files():
    folder = SHARED / "webshop"
    if not folder.is_dir():
        pytest.skip("the real catalogue is not here")
    return [folder / "items_shuffle_1000.json.gz", folder / "items_ins_v2_1000.json.gz",
            folder / "items_human_ins_1000.json"]  # fmt: skip


@pytest.fixture(scope="session")
def real(real_files):
    return load_shop(*real_files[:2])
