"""Workers on a Ray cluster of two nodes on this machine: the same episodes as local ones, and a killed node costs only its own."""

import functools
import os
import signal
import sys
from pathlib import Path

import jax
import pytest
from odd_env import ODD, Counting, Unreachable, broken, dying
from test_workers import MISHAPS, play

from hgpo_jax import config as configuration
from hgpo_jax.config.policies import SHARED
from hgpo_jax.rollout import chat_prompts, process_workers
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.process_workers import ProcessWorkers, env_workers
from hgpo_jax.rollout.workers import EnvFailure, LocalWorkers
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.agent_rollout import AgentRunner
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.agreement import assert_same
from tests.helpers.byte_policy import byte_policy
from tests.helpers.tiny import mesh_of

pytestmark = pytest.mark.needs("ray")
AGENTS = Path(__file__).parents[1] / "agents"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written to the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.syspath_prepend(str(AGENTS))
        node = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.nodes = {"head": cluster.head_node, "other": cluster.add_node(**node)}
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        import ray

        ray.shutdown()
        cluster.shutdown()


class Placed(Counting):
    """Says on which node it is."""

    def _tell(self):
        import ray

        return ray.get_runtime_context().get_node_id(), ["add 1"]


def test_x(cluster):
    import time
    workers = env_workers(Placed, "ray:4", 8, 60)
    def act(ws, *actions):
        t = time.time()
        workers.send([(i, i, actions) for i in ws])
        for n, a in workers.receive(len(ws)):
            print(n, a[0][:30], round(time.time() - t, 2), flush=True)
    act((0,4), "die")
    act((0,4))
    act((0,2,4,6), "die")
    act((0,2,4,6))
    cluster.remove_node(cluster.nodes["other"], allow_graceful=False)
    time.sleep(40); print("REMOVED", [(n["NodeID"][:6], n["Alive"]) for n in __import__("ray").nodes()])
    act((0,2,4,6))
    act((0,2,4,6))
    act((0,2,4,6), "die")
    act((0,2,4,6))
    act((0,2,4,6), "die")
    act((0,2,4,6))
    workers.close()
