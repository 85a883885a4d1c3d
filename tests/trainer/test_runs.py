"""Whole runs that are stopped, killed, damaged and crowded out; each is a process of its own."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import jax
import kills
import numpy as np
import orbax.checkpoint as ocp
import pytest
from kills import RUN, arrays, assert_same_run, timeless

from tests.helpers import runs
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.glossary import unexplained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with the run in one piece and the cache of all runs; how long the run took."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, kills.undisturbed(folder)


@pytest.fixture(scope="module")
def whole(undisturbed):
    return undisturbed[0] / "whole" / "run"


@pytest.fixture(scope="module")
def cache(undisturbed):
    return f"cache_dir={undisturbed[0] / 'cache'}"


@pytest.fixture(scope="module")
def half(cache, tmp_path_factory):
    """The run, killed in the third iteration: two are checkpointed, and there is a row more."""
    home = tmp_path_factory.mktemp("half")
    killed(home, 2, *RUN, cache)
    return home / "run"


def killed(home: Path, iteration: int, *fields: str) -> None:
    runs.run(home, *fields, code=DIES % iteration, expect=-signal.SIGKILL)


DIES = """
import os, signal, time
from hgpo_jax.trainer.recorder import Recorder
row = Recorder.row
def row_and_die(self, iteration, *rest):
    row(self, iteration, *rest)
    if iteration == %d:
        self.wait(dumps=True)
        end = time.monotonic() + 300
        while not (self._folder / "checkpoints" / str(iteration)).exists():  # the one before, which another thread writes
            assert time.monotonic() < end, "the checkpoint was not written"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
Recorder.row = row_and_die
"""


def state(run: Path) -> dict:
    """Every array of the last checkpoint, by its path."""
    newest = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
    tree = ocp.StandardCheckpointer().restore((run / "checkpoints" / str(newest) / "state").absolute())
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"iterations": newest} | {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_state(run, wanted):
    ours, theirs = state(run), state(wanted)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


CLONING = ("cloning.stop_at=1", "cloning.max_steps=20", "cloning.check_every=20")
SETTINGS = {
    "critic and adapters": ("method=ppo", "lora.rank=2", *CLONING),
    "text of roles": ("env.name=household_team_text", "warm_start=none", "rollout.prompt_limit=512", "rollout.response_limit=8",
                      "env.max_turns=3", "roles.searcher.policy=own",
                      "rollout.decode_batch_size=1",  # one program for prompts, one for responses
                      "roles.searcher.lr=1e-3", "roles.carrier.lora_rank=2"),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_halves_equal_the_whole_to_the_bit(cache, whole, tmp_path, setting):
    fields = (*RUN, cache, *SETTINGS[setting], "iterations=2")
    if "text" in setting:
        byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
        fields += (f"policy.tokenizer={tmp_path / 'tokenizer'}",)
    if "adapters" in setting:
        sizes = "policy.hidden_size=", "policy.intermediate_size=", "policy.num_hidden_layers="  # which the folder has
        fields = (*(field for field in fields if not field.startswith(sizes)), f"policy={whole / 'policy'}")
    runs.run(tmp_path / "whole", *fields)
    run, wanted = (tmp_path / home / "run" for home in ("halves", "whole"))
    killed(run.parent, 1, *fields)
    assert len(timeless(run)) == 2  # a row after the checkpoint, to be dropped
    assert "resumed after iteration 1 in" in runs.run(run.parent, "--resume", "run")  # its own configuration is enough
    assert_same_run(run, wanted)
    assert_same_state(run, wanted)
    rows = [json.loads(line) for line in (wanted / "metrics.jsonl").read_text().splitlines()]
    assert not [name for row in rows for name in unexplained(row)]


def test_a_run_in_a_bucket_goes_on_on_another_machine(cache, whole, tmp_path):
    """Killed while it trains; a folder that is reached by its URL stands for the bucket."""
    url, bucket = f"file://{tmp_path}/bucket/run", tmp_path / "bucket/run"
    fields = (*(field for field in RUN if not field.startswith("run_dir")), cache)
    killed(tmp_path, 2, *fields, f"run_dir={url}")
    assert {path.name for path in (bucket / "checkpoints").iterdir()} >= {"2"}
    shutil.rmtree(Path(cache.removeprefix("cache_dir="), "remote"))  # another machine has none
    said = runs.run(tmp_path, "--resume", url, cache)
    assert f"resumed after iteration 2 in {url}" in said
    assert f"everything is in {url}" in said
    assert_same_run(bucket, whole)
    assert_same_state(bucket, whole)


def copied(run, home) -> Path:
    shutil.copytree(run, home / "run")
    return home / "run"


def test_another_mesh_goes_on(cache, half, whole, tmp_path):
    run = copied(half, tmp_path)
    runs.run(tmp_path, *RUN, cache, "mesh=fsdp=2")
    ours, theirs = timeless(run), timeless(whole)
    assert ours[:2] == theirs[:2]
    for row, wanted in zip(ours[2:], theirs[2:], strict=True):
        assert row["steps"] == wanted["steps"]
        assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert row["kl"] == pytest.approx(wanted["kl"], abs=1e-5)


def test_signals_save_and_leave(cache, whole, tmp_path):
    """One in a rollout and one in an update, with checkpoints that would come much later."""
    fields = (*RUN, cache, "log.checkpoint_every=50")
    for number, where, done in ((signal.SIGTERM, "training.sample", 1), (signal.SIGINT, "Recorder.row", 3)):
        said = runs.run(tmp_path, *fields, code=SIGNALLED.format(where=where, number=int(number)), expect=128 + number)
        assert f"stopped by {number.name}: {done} of 4 iterations are saved; continue with --resume run" in said
        assert "Traceback" not in said
        assert len(timeless(tmp_path / "run")) == done
    assert "resumed after iteration 3 " in runs.run(tmp_path, "--resume", "run")
    assert_same_run(tmp_path / "run", whole)


SIGNALLED = """
import os
from hgpo_jax.trainer import loop as training
from hgpo_jax.trainer.recorder import Recorder
call, calls = {where}, []
def signalled(*given):
    calls.append(given)
    if len(calls) == 2:
        os.kill(os.getpid(), {number})
    return call(*given)
{where} = signalled
"""


def test_a_signal_before_there_is_anything_to_save(cache, tmp_path):
    code = "import os\nfrom hgpo_jax.trainer import main\nmain.build = lambda *given: os.kill(os.getpid(), 15)"
    said = runs.run(tmp_path, *RUN, cache, code=code, expect=143)
    assert said == "stopped by SIGTERM: no iteration was done\n"


def test_a_signal_does_not_wait_for_the_compiler(cache, tmp_path):
    code = """
import os, threading
from hgpo_jax.trainer import loop
loop.compile_ahead = lambda *_: threading.Event().wait(300)
loop.starting_params = lambda *_, **__: os.kill(os.getpid(), 2)
"""
    said = runs.run(tmp_path, *RUN, cache, code=code, expect=130)
    assert said.endswith("stopped by SIGINT: no iteration was done; continue with --resume run\n")


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(cache, half, whole, tmp_path):
    run = copied(half, tmp_path)
    largest = max((run / "checkpoints" / "2" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    said = runs.run(tmp_path, *RUN, cache)
    assert "warning: checkpoint run/checkpoints/2 is damaged: state/" in said
    assert "resumed after iteration 1 in run" in said
    assert_same_run(run, whole)


CROWDED = """
import resource
from hgpo_jax.trainer import loop as training
sample, calls = training.sample, []
def crowded(*given):
    calls.append(given)
    if len(calls) == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return sample(*given)
training.sample = crowded
"""


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_room(cache, whole, tmp_path):
    """A limit on the size of files stands for it; no checkpoint fits any more."""
    fields = (*RUN, cache)
    said = runs.run(tmp_path, *fields, code=CROWDED, expect=1)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "File too large" in errors[0] or "cannot be written" in errors[0]
    assert "Traceback" not in said and "Event loop" not in said  # of threads of tensorstore that were still writing
    said = runs.run(tmp_path, *fields)
    assert re.search("resumed after iteration [12] in ", said)  # the second checkpoint was being written
    assert_same_run(tmp_path / "run", whole)


NONFINITE = """
import jax.numpy as jnp
from hgpo_jax.trainer import loop as training
sample = training.sample
def poisoned(job, params, iteration):
    result, sums, counts = sample(job, params, iteration)
    episodes = result.episodes
    if iteration > 0:
        episodes = episodes.replace(rewards=episodes.rewards.at[0, 0].set(jnp.nan))
    return result._replace(episodes=episodes), sums, counts
training.sample = poisoned
"""


def test_a_batch_that_is_not_finite_is_skipped_and_three_in_a_row_end_the_run(cache, tmp_path):
    said = runs.run(tmp_path, *RUN, cache, code=NONFINITE, expect=1)
    rows = timeless(tmp_path / "run")
    assert [row["nonfinite_steps"] > 0 for row in rows] == [False, True, True, True]
    assert all(np.isfinite(row["entropy"]) for row in rows)
    assert said.count("warning: iteration 2: ") >= 1
    kept = sorted((tmp_path / "run" / "episodes").glob("nonfinite-*"))
    assert [path.name for path in kept] == [f"nonfinite-0000{iteration}.npz" for iteration in (1, 2, 3)]  # compiled, no texts
    assert np.isnan(arrays(kept[0])["rewards"]).sum() == 1
    last = said.splitlines()[-1]
    assert last.startswith("error: iteration 4: ") and "after 3 such iterations in a row" in last
    assert "Traceback" not in said
    assert "4 of " in said and " iterations are saved; continue with --resume run" in said
    assert max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == 4


def test_killed_again_and_again(undisturbed):
    """HGPO_KILLS=50 makes it long."""
    count = int(os.environ.get("HGPO_KILLS", "2"))
    assert kills.kill_again_and_again(*undisturbed, count).total() == count


LONG = """
import json, os, threading, jax
from hgpo_jax.trainer.metrics import MetricsWriter
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None)
write, log = MetricsWriter.write, open({path!r}, "w", buffering=1)
def counted(self, row):
    write(self, row)
    pages = int(open("/proc/self/statm").read().split()[1])
    tasks = len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    log.write(json.dumps([pages * 4096, files, tasks, len(compiled)]) + "\\n")
MetricsWriter.write = counted
"""


def test_a_long_run_keeps_its_memory_files_and_threads(cache, tmp_path):
    """HGPO_LONG_RUN=2000 is the long one."""
    count = int(os.environ.get("HGPO_LONG_RUN", "60"))
    fields = (*RUN, cache, f"iterations={count}", f"evaluation.every={count // 20}", f"log.checkpoint_every={count // 20}",
              f"log.dump_every={count // 20}", "log.tensorboard=true")  # fmt: skip
    runs.run(tmp_path, *fields, code=LONG.format(path=str(tmp_path / "usage")))
    usage = np.array([json.loads(line) for line in (tmp_path / "usage").read_text().splitlines()])
    assert len(usage) == count
    warm = usage[count // 5 :]
    memory, files, threads, compiled = warm.T
    tenth = len(memory) // 10
    begin, end = memory[:tenth].mean() / 2**20, memory[-tenth:].mean() / 2**20
    print(f"resident {begin:.1f} MB, then {end:.1f} MB; {compiled[-1] - compiled[0]} programs compiled")
    print(f"files {files.min()} to {files.max()}, threads {threads.min()} to {threads.max()}")
    assert end <= 1.02 * begin
    assert compiled[-1] == compiled[0]
    assert files[-tenth:].min() <= files[:tenth].min()  # a checkpoint that is being written has some open
    # Pools start threads when they need them, one or two late. One that each checkpoint or validation leaves would be 14 here.
    assert np.median(threads[-tenth:]) <= np.median(threads[:tenth]) + 3
