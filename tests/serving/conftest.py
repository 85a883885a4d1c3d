"""A tiny policy that is served: one server for all files of tests."""

import pytest

from tests.helpers.byte_policy import byte_policy
from tests.helpers.serving import client_of, engine_of, served


@pytest.fixture(scope="package")
def policy():
    return byte_policy()


@pytest.fixture(scope="package")
def engine(policy):
    with engine_of(policy) as engine:
        yield engine


@pytest.fixture(scope="package")
def programs(engine):
    """For engines of a test's own, so that nothing is compiled again."""
    return engine._sampler._programs


@pytest.fixture(scope="package")
def port(engine, policy):
    with served(engine, policy) as port:
        yield port


@pytest.fixture(scope="package")
def client(port):
    return client_of(port)


@pytest.fixture
def cancelled(engine, monkeypatch):
    """Seats whose response was ended before its time."""
    seats, cancel = [], engine._sampler.cancel
    monkeypatch.setattr(engine._sampler, "cancel", lambda seat: [seats.append(seat), cancel(seat)])
    return seats
