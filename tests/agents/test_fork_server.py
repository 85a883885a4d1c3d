"""Programs that are forked from a process with their modules: each is as if it had been started anew."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from hgpo_jax.serving.commands import Commands, Launcher, command_of, fork_server
from hgpo_jax.serving.fork_server import ForkServer
from hgpo_jax.serving.sessions import Session
from hgpo_jax.utils.errors import ConfigError

# Says what it finds, and leaves something behind wherever an episode could.
LEAVES = """
import atexit, os, random, sys, threading
import numpy
import shared
print(shared.seen, os.environ.get("LEFT"), sys.argv[1:], os.path.basename(os.getcwd()), os.getsid(0) == os.getpid(), __name__)
print(sys.modules["__main__"].__file__ == __file__, sys.path[0] == os.path.dirname(__file__), sys.stdin.read())
print(random.random(), numpy.random.rand())
shared.seen, os.environ["LEFT"] = "dirty", "dirty"
os.chdir("/")
threading.Thread(target=lambda: sys.stdout.write("a thread\\n")).start()
atexit.register(print, "at exit")
if "fails" in sys.argv:
    sys.exit("it fails")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared.py").write_text("print('imported')\nseen = 'clean'\n")
    (tmp_path / "agent.py").write_text(LEAVES)
    return tmp_path


def ran(server, **variables) -> tuple[int, list[str]]:
    with tempfile.TemporaryFile() as output:
        code = server.start(os.environ | variables, output).wait()
        output.seek(0)
        return code, output.read().decode().splitlines()


@pytest.fixture
def server(folder):
    server = ForkServer([str(folder / "agent.py"), "x"], ["numpy", "shared"], os.environ)
    yield server
    server.close()


def test_nothing_that_an_episode_leaves_is_found_by_the_next(server, folder):
    first, second = ran(server), ran(server)
    for code, lines in (first, second):
        assert code == 0
        assert lines[0] == f"clean None ['x'] {folder.name} True __main__"
        assert lines[1] == "True True " and sorted(lines[3:]) == ["a thread", "at exit"]
    ours, others = first[1][2].split(), second[1][2].split()
    assert all(one != other for one, other in zip(ours, others, strict=True))  # random states
    assert ran(server, LEFT="given")[1][0].startswith("clean given")


def test_a_program_ends_as_one_that_is_started_anew(folder):
    server = ForkServer(["agent.py", "fails"], ["json"], os.environ)
    code, lines = ran(server)
    server.close()
    command = [sys.executable, "agent.py", "fails"]
    anew = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
    assert code == anew.returncode == 1
    # All but random numbers, in any order: the error has no buffer.
    said = [line for line in (anew.stdout + anew.stderr).splitlines() if not line.startswith("0.")]
    assert {*said, "it fails"} == {line for line in lines if not line.startswith("0.")}
    (folder / "module.py").write_text("import os, sys\nprint(sys.argv[1:], __name__, sys.path[0], flush=True)\nos.abort()\n")
    server = ForkServer(["-m", "module", "y"], ["json"], os.environ)
    assert ran(server) == (-signal.SIGABRT, [f"['y'] __main__ {folder}"])
    server.close()


def test_a_package_whose_modules_were_imported(folder):
    (folder / "mine").mkdir()
    (folder / "mine/__init__.py").write_text("print('begun')\n")
    (folder / "mine/tools.py").write_text("name = 'tools'\n")
    (folder / "mine/__main__.py").write_text("import mine.tools\nprint(mine.tools.name, __name__)\n")
    server = ForkServer(["-m", "mine"], ["mine.tools"], os.environ)
    assert ran(server) == ran(server) == (0, ["tools __main__"])
    server.close()


def test_a_process_that_an_import_has_started_may_end(folder):
    (folder / "starts.py").write_text(
        "import os, subprocess\nchild = subprocess.Popen(['sh', '-c', 'until [ -e go ]; do sleep 0.01; done; mkdir gone'])\n"
    )
    server = ForkServer(["agent.py"], ["starts"], os.environ)
    (folder / "go").touch()
    while not (folder / "gone").exists():
        time.sleep(0.01)
    assert [ran(server)[0] for _ in range(3)] == [0, 0, 0] and not server.ended
    server.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has been killed may still wait for its parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(path) -> int:
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_runs_is_killed_with_its_children(folder, how, monkeypatch):
    (folder / "agent.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('new', 'w').write(str(child.pid))\nos.rename('new', 'pid')\ntime.sleep(600)\n"
    )
    if how == "killed":
        launcher, session = Launcher([sys.executable, "agent.py"], ["json"]), Session("x", 1)
        monkeypatch.setattr(Session, "silent", property(lambda _: 99.0 * (folder / "pid").exists()))
        with Commands(launcher, 60.0) as commands:
            assert commands.run(session, {}).kind == "silence"
        child = wait_for(folder / "pid")
        launcher.close()
    else:  # as if the trainer had died
        server = ForkServer(["agent.py"], ["json"], os.environ)
        with tempfile.TemporaryFile() as output:
            process = server.start(os.environ, output)
            child = wait_for(folder / "pid")
            server.close()
            assert process.wait() == -signal.SIGKILL
            while alive(process.pid):
                time.sleep(0.01)
    while alive(child):
        time.sleep(0.01)


def test_a_server_that_was_killed_costs_the_episodes_of_its_rollout(folder):
    launcher = Launcher([sys.executable, "agent.py"], ["json", "numpy", "shared"])
    os.kill(launcher._forks._process.pid, signal.SIGKILL)
    launcher._forks._process.wait()
    with Commands(launcher, 60.0) as commands:
        for _ in range(2):
            failure = commands.run(Session("x", 1), {})
            assert failure.kind == "infrastructure" and "could not be started" in failure.reason
        launcher.revive()
        assert commands.run(Session("x", 1), {}) is None
    launcher.close()


@pytest.mark.parametrize(
    "command, preload, message",
    [
        ("sh agent.py", "json", "env.preload=json: needs a command `python FILE` or `python -m MODULE`, not env.command=sh"),
        ("python -c pass", "json", "env.preload=json: needs a command"),
        ("python -m", "json", "env.preload=json: needs a command"),
        ("python agent.py", "dies", "env.preload=dies: the process died while it was imported"),
        ("python agent.py", "threads", "env.preload=threads: its import starts 1 threads, which a forked process would lack"),
        ("python agent.py", "broken", "env.preload=broken: cannot be imported: ValueError('not so')"),
    ],
)
def test_what_cannot_be_forked_is_refused(folder, command, preload, message):
    (folder / "dies.py").write_text("import os\nos._exit(3)\n")
    (folder / "broken.py").write_text("raise ValueError('not so')")
    (folder / "threads.py").write_text("import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()")
    with pytest.raises(ConfigError) as raised:
        fork_server(command_of(command), [preload])
    assert str(raised.value).startswith(message)
