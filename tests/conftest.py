"""Settings of all tests: eight fake CPU devices, so that meshes are real, no look at a hub, one compilation cache."""

import atexit
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests compile many programs twice, and compiling is most of their time. Fresh for each session: nothing stale is read.
if "HGPO_TESTS_CACHE" not in os.environ:
    os.environ["HGPO_TESTS_CACHE"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, os.environ["HGPO_TESTS_CACHE"], ignore_errors=True)
