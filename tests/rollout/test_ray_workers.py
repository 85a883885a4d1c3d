"""Text environments on a Ray cluster: the answers of local workers; what dies or hangs, nodes too, costs its own episodes."""

import functools
import os
import signal
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from odd_env import ODD, Counting, Placed, Unreachable, broken, dying
from test_workers import MISHAPS, play

from hgpo_jax.rollout.process_workers import env_workers
from hgpo_jax.rollout.workers import EnvFailure, LocalWorkers
from hgpo_jax.utils.errors import RunError
from tests.helpers.ray_cluster import two_nodes

pytestmark = pytest.mark.needs("ray")


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def started(cluster):
    """Starts workers, which end with the test."""
    all_workers = []

    def start(make_env, workers, episodes, time_limit=60.0):
        all_workers.append(env_workers(make_env, workers, episodes, time_limit))
        return all_workers[-1]

    yield start
    for workers in all_workers:
        workers.close()


def test_answers_and_mishaps_are_those_of_local_workers(started):
    script = {episode: ["add 1", odd, "add 1"] for episode, odd in enumerate([*MISHAPS, *ODD])}
    script |= {len(script): ["add 5", "dance", "numpy", "add 1"], len(script) + 1: []}
    tasks = {episode: 13 if episode == 2 else episode for episode in script}
    before = signal.getsignal(signal.SIGTERM)
    workers, local = started(Counting, "ray:2", len(script)), LocalWorkers(Counting)
    assert signal.getsignal(signal.SIGTERM) is before  # with Ray's a run would end with nothing saved
    assert workers.spec == local.spec
    assert play(workers, script, tasks) == play(local, script, tasks)
    workers.send([(episode, 4, ()) for episode in script])
    workers.discard_answers()
    assert play(workers, {0: ["add 5"]}, {0: 3})[0][-1].observation == "at 8"


def test_what_dies_or_hangs_is_replaced_and_a_killed_node_costs_its_episodes(started, cluster):
    workers = started(Placed, "ray:4", 4)  # an episode each
    nodes = [play(workers, {n: []}, {n: 2})[n][-1].observation for n in range(4)]
    assert len(set(nodes)) == 2  # how evenly is Ray's affair
    workers._workers[0]._time_limit = 1.0
    outputs = play(workers, {0: ["hang"], 1: ["die"], 2: ["add 1"]}, dict.fromkeys(range(3), 2))
    assert outputs[0][-1] == EnvFailure("no answer in 1 s: action 'hang' in task 2")
    assert outputs[1][-1] == EnvFailure("its worker process died: action 'die' in task 2")
    assert outputs[2][-1].observation == nodes[2]
    workers._workers[0]._time_limit = 60.0
    nodes = [play(workers, {n: ["add 1"]}, {n: 2})[n][-1].observation for n in range(4)]

    workers.send([(n, 2, ("add 1", "wait")) for n in range(4)])
    time.sleep(0.5)
    cluster[0].remove_node(cluster[1], allow_graceful=False)
    answers = dict(workers.receive(4))
    lost = [n for n, answer in answers.items() if isinstance(answer, EnvFailure)]
    gone = {nodes[n] for n in lost}
    assert len(gone) <= 1  # a replaced worker may have gone to the other node, though it hardly does
    assert sorted(lost) == [n for n in range(4) if nodes[n] in gone]
    assert {answers[n].reason for n in lost} == {"its worker process died: action 'wait' in task 2"}
    again = [play(workers, {n: ["add 1"]}, {n: 2})[n][-1] for n in range(4)]  # on the node that is left
    assert len({output.observation for output in again}) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [(broken, "^environment: no such file: games.json$"), (dying, "^environment: its worker process died while it was made")],
)
def test_an_environment_that_cannot_be_made_is_refused(started, make, message):
    with pytest.raises(ValueError, match=message):
        started(make, "ray:1", 8)


def test_a_worker_that_cannot_be_replaced_ends_the_run(started, tmp_path):
    workers = started(functools.partial(Unreachable, tmp_path / "down"), "ray:1", 1)
    workers.send([(0, 2, ("die",))])
    assert list(workers.receive(1)) == [(0, EnvFailure("its worker process died: action 'die' in task 2"))]
    workers.send([(0, 2, ())])
    with pytest.raises(RunError, match=r"^environment: its server is down; a worker .* cannot be replaced$"):
        list(workers.receive(1))


def test_a_folder_that_the_nodes_have_not_is_refused(started, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "never"))
    with pytest.raises(ValueError, match=r"^environment: a node of the cluster cannot enter .*never: No such file"):
        started(Counting, "ray:1", 1)


@pytest.mark.parametrize("error", ["OutOfMemoryError", "ActorUnschedulableError", "RuntimeEnvSetupError", "ObjectLostError"])
def test_whatever_an_actor_dies_of_is_its_end(monkeypatch, error):
    import ray  # only where it is

    from hgpo_jax.rollout.ray_workers import Actor

    kind = getattr(ray.exceptions, error)
    told = kind("abc", None, "") if error == "ObjectLostError" else kind("abc")
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=told))
    with pytest.raises(EOFError):
        Actor.receive(SimpleNamespace(_answer=None))
