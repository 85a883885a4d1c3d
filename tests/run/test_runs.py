"""Whole runs that are stopped, killed, damaged and crowded out; each is a process of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kills import RUN, arrays, assert_same_run, kill_again_and_again, timeless

from tests.helpers import fork_server, runs
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.glossary import unexplained

pytestmark = pytest.mark.slow

PLAIN = (*(field for field in RUN if not field.startswith(("iterations", "evaluation.every"))), "iterations=4")
SETTINGS = {
    "household": (),
    "critic": ("method=ppo",),
    "text": ("env.name=household_text", "warm_start=none", "rollout.prompt_limit=512", "rollout.response_limit=8",
             "env.max_turns=3", "iterations=2"),
    "lora": ("lora.rank=2", "warm_start=none"),
    "cloned lora": ("lora.rank=2", "cloning.stop_at=1", "cloning.max_steps=20", "cloning.check_every=20", "iterations=2"),
    "roles": ("env.name=household_team", "cloning.max_steps=20", "cloning.check_every=20", "roles.searcher.policy=own",
              "roles.searcher.lr=1e-3"),
    "adapters of roles": ("env.name=household_team", "warm_start=none", "roles.searcher.lora_rank=2",
                          "roles.carrier.lora_rank=2"),
    "text of roles": ("env.name=household_team_text", "warm_start=none", "rollout.prompt_limit=512", "rollout.response_limit=8",
                      "roles.searcher.response_limit=4", "env.max_turns=3", "iterations=2", "roles.searcher.policy=own"),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"cache_dir={tmp_path_factory.getbasetemp()}/survive"


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
    """The run in one piece."""
    home = tmp_path_factory.mktemp("whole")
    runs.run(home, *PLAIN, cache)
    return home / "run"


def copied(run, home) -> Path:
    home.mkdir(exist_ok=True)
    shutil.copytree(run, home / "run")
    return home / "run"


@pytest.fixture(scope="module")
def half(cache, tmp_path_factory):
    """The run, killed in the third iteration: two are checkpointed, a row more may be there."""
    home = tmp_path_factory.mktemp("half")
    runs.run(home, *PLAIN, cache, code=DIES_IN_THE_THIRD, expect=-signal.SIGKILL)
    return home / "run"


DIES_IN_THE_THIRD = """
import os, signal, time
from hgpo_jax.run.recorder import Recorder
row = Recorder.row
def row_and_die(self, iteration, *rest):
    row(self, iteration, *rest)
    if iteration == 2:
        self.wait(dumps=True)
        time.sleep(2)  # the checkpoint before is written by now
        os.kill(os.getpid(), signal.SIGKILL)
Recorder.row = row_and_die
"""


def states(run) -> dict:
    """Every array of the last checkpoint, by its path."""
    script = (
        "import sys, numpy, jax, orbax.checkpoint as ocp\n"
        "tree = ocp.StandardCheckpointer().restore(sys.argv[1])\n"
        "leaves = jax.tree_util.tree_flatten_with_path(tree)[0]\n"
        "numpy.savez(sys.argv[2], **{jax.tree_util.keystr(p).replace('/', '|'): numpy.asarray(a) for p, a in leaves})"
    )
    newest = max((p for p in (run / "checkpoints").iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    out = run.parent / "state.npz"
    subprocess.run([sys.executable, "-c", script, newest / "state", out], check=True, env=runs.ENVIRONMENT, capture_output=True)
    return {"step": newest.name, **arrays(out)}


def assert_same_state(run, wanted):
    ours, theirs = states(run), states(wanted)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("setting", SETTINGS)
def test_halves_equal_the_whole_to_the_bit(cache, whole, tokenizer, tmp_path, setting):
    fields = (*PLAIN, cache, *SETTINGS[setting])
    if "text" in setting:
        fields += (f"policy.tokenizer={tokenizer}",)
    if "lora" in setting:
        fields += (f"policy={whole / 'policy'}",)
    if setting == "household":
        wanted = whole
    else:
        runs.run(tmp_path / "whole", *fields)
        wanted = tmp_path / "whole" / "run"
    middle = len(timeless(wanted)) // 2
    home = tmp_path / "halves"
    child = runs.start(home, *fields, code=DIES_IN_THE_THIRD.replace("iteration == 2", f"iteration == {middle}"))
    assert child.wait() == -signal.SIGKILL, child.log.read_text()
    assert len(timeless(home / "run")) == middle + 1  # a row after the checkpoint, to be dropped
    assert f"resumed after iteration {middle} in" in runs.run(home, "--resume", "run")  # its own configuration is enough
    assert_same_run(home / "run", wanted)
    assert_same_state(home / "run", wanted)
    rows = [json.loads(line) for line in (wanted / "metrics.jsonl").read_text().splitlines()]
    assert not [name for row in rows for name in unexplained(row)]


UPLOADS_AT_ONCE = """
from hgpo_jax.run import remote
remote.EVERY = 0.05
"""


def test_a_run_in_a_bucket_goes_on_on_another_machine(cache, whole, tmp_path):
    """Killed while it trains; a folder that is reached by its URL stands for the bucket."""
    url, store = f"file://{tmp_path}/bucket/run", Path(cache.removeprefix("cache_dir="))
    fields = (*(field for field in PLAIN if not field.startswith("run_dir")), cache)
    runs.run(
        tmp_path, *fields, f"run_dir={url}", code=UPLOADS_AT_ONCE + DIES_IN_THE_THIRD, expect=-signal.SIGKILL
    )  # fmt: skip
    bucket = tmp_path / "bucket/run"
    assert {path.name for path in (bucket / "checkpoints").iterdir()} >= {"2"}
    shutil.rmtree(store / "remote")  # another machine has none
    said = runs.run(tmp_path, "--resume", url, cache)
    assert f"resumed after iteration 2 in {url}" in said
    assert f"everything is in {url}" in said
    assert_same_run(bucket, whole)
    assert_same_state(bucket, whole)
    runs.run(tmp_path, "--resume", url, cache, "iterations=5")
    assert len(timeless(bucket)) == 5
    assert (bucket / "evaluation-4.json").is_file()

    for command in (["report", url], ["evaluate", url, "evaluation.episodes=4", cache], ["watch", url, cache]):
        done = fork_server.run(["-m", f"hgpo_jax.{command[0]}", *command[1:]], tmp_path, runs.ENVIRONMENT)
        assert done.returncode == 0, done.stderr
    assert (bucket / "report.html").is_file()
    assert len(list((bucket / "evaluations").glob("*.json"))) == 1


def test_another_mesh_goes_on(cache, half, whole, tmp_path):
    run = copied(half, tmp_path)
    runs.run(tmp_path, *PLAIN, cache, "mesh=fsdp=2")
    ours, theirs = timeless(run), timeless(whole)
    assert ours[:2] == theirs[:2]
    for row, wanted in zip(ours[2:], theirs[2:], strict=True):
        assert row["steps"] == wanted["steps"]
        assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert row["kl"] == pytest.approx(wanted["kl"], abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_and_leaves(cache, whole, tmp_path, number):
    """Once in the rollout and once in the update, with checkpoints that would come much later."""
    rare = (*PLAIN, cache, "log.checkpoint_every=50")
    where = "training.sample" if number == signal.SIGTERM else "Recorder.row"
    said = runs.run(tmp_path, *rare, code=SIGNALLED.format(where=where, number=int(number)), expect=128 + number)
    done = 2 if number == signal.SIGTERM else 3
    assert f"stopped by {number.name}: {done} of 4 iterations are saved; continue with --resume run" in said
    assert "Traceback" not in said
    assert len(timeless(tmp_path / "run")) == done
    assert f"resumed after iteration {done} " in runs.run(tmp_path, "--resume", "run")
    assert_same_run(tmp_path / "run", whole)


SIGNALLED = """
import os
from hgpo_jax import training
from hgpo_jax.run.recorder import Recorder
call, calls = {where}, []
def signalled(*given):
    calls.append(given)
    if len(calls) == 3:
        os.kill(os.getpid(), {number})
    return call(*given)
{where} = signalled
"""


def test_a_signal_before_there_is_anything_to_save(cache, tmp_path):
    code = "import os\nfrom hgpo_jax import training_run\ntraining_run.build = lambda *given: os.kill(os.getpid(), 15)"
    said = runs.run(tmp_path, *PLAIN, cache, code=code, expect=143)
    assert said == "stopped by SIGTERM: no iteration was done\n"


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(cache, half, whole, tmp_path):
    run = copied(half, tmp_path)
    largest = max((run / "checkpoints" / "2" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    said = runs.run(tmp_path, *PLAIN, cache)
    assert "warning: checkpoint run/checkpoints/2 is damaged: state/" in said
    assert "resumed after iteration 1 in run" in said
    assert_same_run(run, whole)


def refused(home, *fields, code=2) -> str:
    """The one line with which a run is refused."""
    said = runs.run(home, *fields, expect=code)
    lines = [line for line in said.splitlines() if not line.startswith(("iteration", "warm start", "run:", "resumed"))]
    assert len(lines) == 1, said
    assert lines[0].startswith("error: ")
    return lines[0]


def test_without_a_good_checkpoint_the_run_is_refused_and_left_alone(cache, half, tmp_path):
    run = copied(half, tmp_path)
    for path in (run / "checkpoints").rglob("digests.json"):
        path.unlink()
    rows = (run / "metrics.jsonl").read_text()
    assert "no intact checkpoint is left" in refused(tmp_path, *PLAIN, cache)
    assert (run / "metrics.jsonl").read_text() == rows


def test_a_damaged_start_is_named(cache, half, tmp_path):
    weights = copied(half, tmp_path) / "start" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    error = refused(tmp_path, *PLAIN, cache)
    assert "run/start" in error


def test_two_runs_in_one_folder(cache, tmp_path):
    fields = (*PLAIN, cache, "iterations=10000")
    first = runs.start(tmp_path, *fields)
    first.wait_for(first.trains)
    other = tmp_path / "other"
    error = refused(other, *fields, f"run_dir={tmp_path / 'run'}")
    assert "another process is writing this run" in error
    first.send_signal(signal.SIGKILL)
    first.wait()


def test_a_changed_configuration(cache, half, tmp_path):
    copied(half, tmp_path)
    changed = (*PLAIN, cache, "learner.lr=0.001", "advantage.gamma=0.9")
    error = refused(tmp_path, *changed)
    assert "learner.lr=0.001 (the run began with learner.lr=0.002), " in error or "advantage.gamma=0.9 (" in error
    allow = ("--allow-change=learner.lr", "--allow-change", "advantage.gamma")
    assert "resumed after iteration 2" in runs.run(tmp_path, *changed, *allow)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_room(cache, whole, small_disk, tmp_path):
    fields = (*PLAIN, cache, f"run_dir={small_disk / 'run'}")  # only the run: what it prints needs room, too
    filler = small_disk / "filler"
    code = (
        "from hgpo_jax import training\nsample, calls = training.sample, []\n"
        "def crowded(*given):\n"
        "    calls.append(given)\n"
        "    if len(calls) == 3:\n"
        f"        file = open({str(filler)!r}, 'wb', buffering=0)\n"
        "        try:\n"
        "            while True: file.write(bytes(4096))\n"
        "        except OSError: pass\n"
        "    return sample(*given)\n"
        "training.sample = crowded\n"
    )
    said = runs.run(tmp_path, *fields, code=code, expect=1)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "No space left on device" in errors[0] or "cannot be written" in errors[0]
    # Threads of Orbax and tensorstore that were still writing may print tracebacks of their own, now and then; none is ours.
    assert "hgpo_jax/" not in said
    filler.unlink()
    said = runs.run(tmp_path, *fields)
    assert re.search("resumed after iteration [12] in ", said)  # the second checkpoint was being written
    assert_same_run(small_disk / "run", whole)


@pytest.fixture
def read_only(tmp_path, half):
    """The half run on a file system that cannot be written."""
    copied(half, tmp_path / "original")
    folder = tmp_path / "view"
    folder.mkdir()
    mounted = os.geteuid() == 0 and not any(
        subprocess.run(command, capture_output=True).returncode
        for command in (["mount", "--bind", tmp_path / "original", folder],
                        ["mount", "-o", "remount,ro,bind", folder])
    )  # fmt: skip
    if not mounted:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_read_only_folder_is_named(cache, read_only, tmp_path):
    error = refused(tmp_path / "elsewhere", *PLAIN, cache, f"run_dir={read_only / 'run'}", code=1)
    assert "Read-only file system" in error
    assert str(read_only / "run") in error


NONFINITE = """
import jax, jax.numpy as jnp
from hgpo_jax import training
sample, calls = training.sample, []
def poisoned(job, params, iteration):
    result, sums, counts = sample(job, params, iteration)
    episodes = result.episodes
    if iteration in {bad}:
        episodes = episodes.replace(rewards=episodes.rewards.at[0, 0].set(jnp.nan))
    return result._replace(episodes=episodes), sums, counts
training.sample = poisoned
"""


def test_a_batch_that_is_not_finite_is_skipped_counted_and_kept(cache, whole, tmp_path):
    said = runs.run(tmp_path, *PLAIN, cache, code=NONFINITE.format(bad=[1]))
    rows, wanted = timeless(tmp_path / "run"), timeless(whole)
    assert rows[0] == wanted[0]
    assert [row["nonfinite_steps"] > 0 for row in rows] == [False, True, False, False]
    assert said.count("warning: iteration 2: ") >= 1
    assert np.isnan(arrays(tmp_path / "run" / "episodes" / "nonfinite-00001.npz")["rewards"]).sum() == 1
    assert all(np.isfinite(row["entropy"]) for row in rows)


def test_batches_that_are_not_finite_end_the_run_in_one_line(cache, tmp_path):
    fields = (*PLAIN, cache, "learner.max_nonfinite=2")
    said = runs.run(tmp_path, *fields, code=NONFINITE.format(bad=[1, 2, 3]), expect=1)
    assert "learner.max_nonfinite=2" in said.splitlines()[-1]
    assert said.splitlines()[-1].startswith("error: iteration 3: ")
    assert "Traceback" not in said


def test_killed_again_and_again(tmp_path):
    """HGPO_KILLS=50 makes it long; `kills.py` alone can be stopped and resumed."""
    kills = int(os.environ.get("HGPO_KILLS", "3"))
    assert sum(kill_again_and_again(tmp_path, kills).values()) == kills


LONG = """
import json, os, threading, jax
from hgpo_jax.run.metrics import MetricsWriter
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
    count = int(os.environ.get("HGPO_LONG_RUN", "200"))
    fields = (*PLAIN, cache, f"iterations={count}", f"evaluation.every={count // 20}", f"log.checkpoint_every={count // 20}",
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
