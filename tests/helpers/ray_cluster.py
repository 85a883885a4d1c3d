"""A Ray cluster of two nodes on this machine, which RAY_ADDRESS names as long as it lasts."""

import contextlib

import pytest


@contextlib.contextmanager
def two_nodes():
    """Yields the cluster, and its node that may be killed."""
    node = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written to the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "300")  # on a busy machine; ray reads it when it is imported
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            other = cluster.add_node(**node)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster, other
        finally:
            ray.shutdown()
            cluster.shutdown()
