"""Environments in this process and in workers: the same answers, and mishaps that stay with their own episode."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from odd_env import ODD, WRONG, Counting, Lingers, Sandbox, Slow, Unreachable, broken, dying

from hgpo_jax.rollout.process_workers import ProcessWorkers
from hgpo_jax.rollout.shared_workers import SharedWorkers
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, LocalWorkers
from hgpo_jax.utils import distributed
from hgpo_jax.utils.errors import ConfigError, RunError

MISHAPS = ["raise alarm", "leave", "cancel", "unspeakable", "endless", "iterator", *(name for name in WRONG if name != "numpy")]


def play(workers, script: dict[int, list[str]], tasks: dict[int, int]):
    """Lets every episode do its actions, one each turn: episode -> all that it saw."""
    outputs = {episode: [] for episode in tasks}
    for turn in range(-1, max(map(len, script.values()))):
        requests = [
            (episode, tasks[episode], tuple(actions[: turn + 1])) for episode, actions in script.items()
            if turn < len(actions) and not any(isinstance(answer, EnvFailure) for answer in outputs[episode])
        ]  # fmt: skip
        workers.send(requests)
        answers = dict(workers.receive(len(requests)))
        assert set(answers) == {episode for episode, *_ in requests}
        for episode, answer in answers.items():
            outputs[episode].append(answer)
    return outputs


MAKE = {
    "local": lambda: LocalWorkers(Counting),
    "processes": lambda: ProcessWorkers(Counting, 2, 8, time_limit=30),
    "shared": lambda: SharedWorkers(lambda: LocalWorkers(Counting)),
}


@pytest.fixture(scope="module", params=MAKE)
def workers(request):
    with pytest.MonkeyPatch.context() as patch:
        # What process 0 says goes to the others as JSON.
        patch.setattr(distributed, "broadcast_from_process_0", lambda call: json.loads(json.dumps(call())))
        workers = MAKE[request.param]()
        yield workers
        workers.close()


def test_answers(workers):
    assert workers.spec == (("even", "odd"), 100, 6, ("agent",), (), None)
    script = {0: ["add 5", "dance", "numpy"], 3: ["add 1"], 7: ["add 5", "add 5", "add 5", "add 1"]}
    outputs = play(workers, script, {0: 2, 3: 3, 7: 4})
    begin = EnvOutput("at 2", ["add 1", "add 5"], "from 2", 0)
    assert outputs[0] == [
        begin, begin._replace(observation="at 7"), begin._replace(observation="at 7", admissible=False),
        begin._replace(observation="at 7", admissible=False, reward=1.5),
    ]  # fmt: skip
    assert [answer.observation for answer in outputs[7]] == ["at 4", "at 9", "at 14", "at 19", "at 20"]
    assert outputs[7][-1] == EnvOutput("at 20", ["add 1", "add 5"], "from 4", 0, 10.0, True, True, True, 1.0)
    assert outputs[3][-1].task_type == 1
    # Another batch starts over, whatever the slots did before.
    assert play(workers, {0: ["add 1"]}, {0: 2})[0][-1].observation == "at 3"


class Scoring(Counting):
    """Says how far it is, and knows a task type that it has not named."""

    def reset(self, task):
        output = super().reset(task)
        self.task_type = task % 3
        return output

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, info | {"score": self.number / 20}


def test_a_score_of_its_own_and_a_task_type_without_a_name():
    outputs = play(LocalWorkers(Scoring), {0: ["add 5"], 1: ["add 5"]}, {0: 3, 1: 5})
    assert (outputs[0][-1].score, outputs[0][-1].task_type, outputs[0][-1].won) == (0.4, 0, False)
    assert outputs[1] == [EnvFailure("ValueError: task_type is 2, there are 2")]


def test_what_was_not_received_is_forgotten_when_others_begin(workers):
    workers.send([(episode, 4, ()) for episode in range(8)])
    workers.discard_answers()
    assert play(workers, {0: ["add 5"], 7: []}, {0: 3, 7: 2})[0][-1].observation == "at 8"
    assert not list(workers.receive(0))


def test_a_mishap_ends_only_its_own_episode(workers):
    script = {episode: ["add 1", mishap, "add 1"] for episode, mishap in enumerate(MISHAPS[:7])} | {7: ["add 1"] * 3}
    outputs = play(workers, script, dict.fromkeys(script, 4) | {6: 13})
    for episode in range(6):
        assert len(outputs[episode]) == 3 and isinstance(outputs[episode][-1], EnvFailure), MISHAPS[episode]
    assert outputs[6] == [EnvFailure("ValueError: unlucky")]
    assert [answer.observation for answer in outputs[7]] == ["at 4", "at 5", "at 6", "at 7"]
    assert play(workers, {0: ["add 5"]}, {0: 3})[0][-1].observation == "at 8"


@pytest.mark.parametrize("mishap", MISHAPS)
def test_every_kind_of_wrong_answer(mishap):
    outputs = play(LocalWorkers(Counting), {0: ["add 1", mishap]}, {0: 4})[0]
    assert isinstance(outputs[-1], EnvFailure) and "\n" not in outputs[-1].reason


def test_odd_texts_come_through_as_they_are(workers):
    outputs = play(workers, {episode: [odd, "add 1"] for episode, odd in enumerate(ODD)}, dict.fromkeys(range(len(ODD)), 4))
    for episode, text in enumerate(ODD.values()):
        assert [answer.observation for answer in outputs[episode]] == ["at 4", f"at 4 {text}", "at 5"]
        assert outputs[episode][1].commands == ["add 1", "add 5", text]


def test_workers_that_die_or_hang_are_replaced_and_the_others_go_on():
    workers = ProcessWorkers(Counting, 2, 8, time_limit=2)
    try:
        script = {
            0: ["add 1", "add 1", "add 1"], 1: ["add 1", "die", "add 1"], 2: ["add 1", "add 1", "add 1"],
            4: ["add 1", "garbage", "add 1"], 5: ["add 5", "add 5", "hang"], 6: ["add 1", "add 5", "add 1"],
        }  # fmt: skip
        outputs = play(workers, script, dict.fromkeys(script, 2))
        assert outputs[4][-1].reason.startswith("no answer: UnpicklingError") and len(outputs[4]) == 3
        assert outputs[1][-1] == EnvFailure("its worker process died: action 'die' in task 2") and len(outputs[1]) == 3
        assert outputs[5][-1] == EnvFailure("no answer in 2 s: action 'hang' in task 2") and len(outputs[5]) == 4
        for episode in (0, 2):
            assert [answer.observation for answer in outputs[episode]] == ["at 2", "at 3", "at 4", "at 5"]
        assert [answer.observation for answer in outputs[6]] == ["at 2", "at 3", "at 8", "at 9"]
        # A signal that is meant for the run does not cost an episode.
        os.kill(workers._workers[0].process.pid, signal.SIGTERM)
        assert play(workers, {0: ["add 1"]}, {0: 2})[0][-1].observation == "at 3"
        # A worker that was killed while it had nothing to do costs one episode.
        os.kill(workers._workers[0].process.pid, signal.SIGKILL)
        workers._workers[0].process._process.join()
        outputs = play(workers, {0: ["add 1"], 1: ["add 1"]}, {0: 2, 1: 2})
        assert isinstance(outputs[0][-1], EnvFailure) and outputs[1][-1].observation == "at 3"
        processes = [worker.process._process for worker in workers._workers]
    finally:
        workers.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("count", [0, 1])
def test_what_environments_start_ends_with_them(tmp_path, count):
    """Programs can be terminated, other processes asked, and at the end environments are closed."""
    make = functools.partial(Sandbox, str(tmp_path))
    workers = ProcessWorkers(make, 1, 8, time_limit=30) if count else LocalWorkers(make)
    outputs = play(workers, {0: ["add 1", "fail"], 1: ["add 1", "add 1"]}, {0: 2, 1: 2})
    assert [answer.observation for answer in outputs[1]] == ["at 2", "at 3", "at 4"]
    assert isinstance(outputs[0][-1], EnvFailure)
    notes = (tmp_path / "notes").read_text().split()
    assert (notes.count("closed"), len(notes)) == (2, 5)  # the one for the spec, and the one that failed
    workers.close()
    notes = (tmp_path / "notes").read_text().split()
    assert (notes.count("closed"), len(notes)) == (3, 6)


def test_workers_end_at_the_same_time_and_a_dead_one_is_known_whatever_it_has_forked(tmp_path):
    """Three take longer, one after the other, than they have."""
    workers = ProcessWorkers(functools.partial(Lingers, str(tmp_path)), 3, 3, time_limit=60)
    outputs = play(workers, {0: ["add 1"], 1: ["add 1"], 2: ["add 1"]}, dict.fromkeys(range(3), 2))
    assert all(answers[-1].observation == "at 3" for answers in outputs.values())
    ended = lambda: len((tmp_path / "ended").read_text().split())  # noqa: E731
    before = ended()  # those for the spec
    workers.send([(0, 2, ("add 1", "die"))])
    ((_, answer),) = workers.receive(1)
    assert answer.reason.startswith("its worker process died")
    workers.send([(0, 2, ())])  # to the one that replaces it
    list(workers.receive(1))
    workers.close()
    assert ended() == before + 1 + 3


@pytest.mark.slow  # programs that start and end
def test_a_worker_whose_parent_is_gone_ends_and_all_that_it_has_forked(tmp_path):
    (tmp_path / "dies.py").write_text(
        "import os, sys\nfrom hgpo_jax.rollout.process_workers import ProcessWorkers\nfrom odd_env import Leaves, Lingers\n"
        "if __name__ == '__main__':\n    workers = ProcessWorkers(Lingers if 'fork' in sys.argv else Leaves, 1, 1)\n"
        "    workers.send([(0, 2, ())])\n    list(workers.receive(1))\n    os._exit(0)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    given = {"env": os.environ | {"PYTHONPATH": paths}, "cwd": tmp_path, "stderr": subprocess.DEVNULL}
    for how in ("fork", "start"):  # until nobody can write to its output
        subprocess.check_output([sys.executable, tmp_path / "dies.py", how], timeout=60, **given)


def test_what_a_killed_worker_has_started_is_killed_with_it(tmp_path):
    workers = ProcessWorkers(functools.partial(Sandbox, str(tmp_path)), 1, 8, time_limit=1)
    play(workers, {0: ["add 1", "hang"]}, {0: 2})
    *_, pid = (int(note) for note in (tmp_path / "notes").read_text().split() if note != "closed")
    workers.close()
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow  # it waits for what hangs
def test_a_replaced_worker_has_time_to_play_what_it_takes_over():
    """Four steps take longer than one answer may."""
    workers = ProcessWorkers(Slow, 1, 3, time_limit=0.5)
    try:
        script = {0: ["add 1"] * 5, 1: [*["add 1"] * 4, "hang"], 2: ["add 1"] * 5}
        outputs = play(workers, script, dict.fromkeys(script, 2))
    finally:
        workers.close()
    assert outputs[1][-1] == EnvFailure("no answer in 0.5 s: action 'hang' in task 2")
    assert [outputs[episode][-1].observation for episode in (0, 2)] == ["at 7", "at 7"]


class Teamwork(Counting):
    """Ends at once; the action says whose turn would be the next one."""

    roles = ("planner", "doer")

    def reset(self, task):
        self.role = 0
        return super().reset(task)

    def step(self, action):
        cut, role = action.split()
        self.role = int(role)
        *answer, _, info = super().step(action)
        return *answer, True, info | {"truncated": True} if cut == "cut" else info


def test_the_prompt_after_a_time_limit_is_the_next_roles():
    script = {0: ["cut 1"], 1: ["over 1"], 2: ["over 7"], 3: ["cut 7"]}
    outputs = play(LocalWorkers(Teamwork), script, dict.fromkeys(script, 2))
    assert [outputs[episode][-1].role for episode in range(3)] == [1, 0, 0]
    assert outputs[3][-1] == EnvFailure("ValueError: role is 7, there are 2")


@pytest.mark.parametrize(("begin", "before"), [([], 1), (["add 1"], 3)])
def test_an_environment_that_hangs_everywhere_ends_the_run(begin, before):
    """After one limit, or two where it has worked before; once it took as many as there were episodes."""
    workers = ProcessWorkers(Counting, 2, 20)
    try:
        for actions in ((), tuple(begin)):
            workers.send([(episode, episode, actions) for episode in range(20)])
            assert len(list(workers.receive(20))) == 20
        for worker in workers._workers:
            worker._time_limit = 0.1  # which nothing has to keep from here on
        workers.send([(episode, episode, (*begin, "hang")) for episode in range(20)])
        said = r"^env\.time_limit=60: no answer in 0.1 s: action 'hang' in task \d+, and {} times before .* more time$"
        with pytest.raises(RunError, match=said.format(before)):
            list(workers.receive(20))
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("make", "message"), [(broken, "environment: no such file: games.json"), (dying, "died while it was made")]
)
def test_an_environment_that_cannot_be_made_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        ProcessWorkers(make, 2, 8)
    if make is broken:
        with pytest.raises(ConfigError, match="games"):
            SharedWorkers(lambda: LocalWorkers(make))


def test_a_worker_that_cannot_be_replaced_ends_the_run(tmp_path):
    workers = ProcessWorkers(functools.partial(Unreachable, tmp_path / "down"), 1, 1, time_limit=5)
    try:
        workers.send([(0, 2, ("die",))])
        assert list(workers.receive(1)) == [(0, EnvFailure("its worker process died: action 'die' in task 2"))]
        workers.send([(0, 2, ())])
        with pytest.raises(RunError, match=r"^environment: its server is down; a worker .* cannot be replaced$"):
            list(workers.receive(1))
    finally:
        workers.close()


def test_workers_that_nobody_ended_do_not_keep_a_program_from_ending(tmp_path):
    """Once it hung: the interpreter waits for processes that nobody has asked to end."""
    (tmp_path / "forgets.py").write_text(
        "from hgpo_jax.rollout.process_workers import ProcessWorkers\n"
        "from odd_env import Counting\n"
        "if __name__ == '__main__':\n"
        "    workers = ProcessWorkers(Counting, 1, 1)\n"
        "    print(workers.spec.max_turns)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, tmp_path / "forgets.py"], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == [b"6"]
