"""Commands in `control/`, without a run: what is read, refused and removed, and how one is asked from outside."""

import fcntl
import json
import os
import threading
import time

import pytest

from xtrain.cli.main import main
from xtrain.components.actions.requeue_torch import ask_slurm
from xtrain.plan.plan import Command
from xtrain.runtime.base.state import Clocks, Progress
from xtrain.runtime.jobs import runs as asking
from xtrain.runtime.loop.commands import Control, Inbox
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.watch import Poller

COMMANDS = (
    Command(name="stop", nodes=("event.control.checkpoint",), stop=True),
    Command(name="save", nodes=("event.control.checkpoint",)),
    Command(name="eval web", nodes=("event.control.eval.web",)),
    Command(name="eval code", nodes=("event.control.eval.code",)),
    Command(name="profile", nodes=("event.control.profile",), counts="steps"),
    Command(name="pause", nodes=("event.control.pause",)),
    Command(name="resume", nodes=()),
)


class Run:
    """A run directory whose inbox is looked into by the test."""

    def __init__(self, folder, commands=COMMANDS):
        self.folder = folder
        (folder / "control").mkdir(parents=True)
        self.inbox = self.again(commands)

    def again(self, commands=COMMANDS):
        self.records = Records.open(self.folder, 0)
        return Inbox(folder=self.folder / "control", commands=commands, records=self.records, progress=Progress(step=7))

    def put(self, name, content):
        text = content if isinstance(content, str) else json.dumps(content)
        (self.folder / "control" / f"{name}.json").write_text(text)

    def said(self):
        path = self.folder / "events.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [(line["id"], line["command"], line["state"], line["detail"]) for line in lines]

    def left(self):
        return sorted(path.name for path in (self.folder / "control").iterdir())


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def taken(inbox):
    found = []
    while (order := inbox.take()) is not None:
        found.append((order.id, order.command.name, order.amount))
    return found


def test_commands_are_taken_in_the_order_in_which_they_came(run):
    for number, content in enumerate([{"command": "save"}, {"command": "eval", "arg": "code"}, {"command": "stop"}]):
        run.put(f"{9 - number}", content)
        os.utime(run.folder / "control" / f"{9 - number}.json", (1000 + number, 1000 + number))
    run.inbox.look()
    assert taken(run.inbox) == [("9", "save", 0), ("8", "eval code", 0), ("7", "stop", 0)]
    assert [line[2] for line in run.said()] == ["accepted"] * 3 and run.left() == []


def test_names_and_words_that_are_no_text_are_refused_and_hold_nothing_up(run):
    run.put("a", '{"command": "\\ud800x"}')
    (run.folder / "control" / os.fsdecode(b"b\xff.json")).write_text('{"command": "nothing"}')
    run.put("c", {"command": "save"})
    run.put("d", "[" * 200_000)
    run.inbox.look()
    run.inbox.look()
    assert taken(run.inbox) == [("c", "save", 0)] and run.left() == []
    assert sorted(line[2] for line in run.said()) == ["accepted", "refused", "refused", "refused"]


def test_a_file_that_is_half_written_is_given_time(run):
    run.put("a", '{"command": "pro')
    run.inbox.look()
    assert run.said() == [] and run.left() == ["a.json"]
    run.put("a", {"command": "profile", "arg": 3})
    run.inbox.look()
    assert taken(run.inbox) == [("a", "profile", 3)]
    run.put("b", "")
    run.inbox.look()
    run.inbox.look()
    assert run.said()[-1] == ("b", "", "refused", "the file is not a complete JSON object") and run.left() == []


@pytest.mark.parametrize("content, reason", [
    ({"command": "eval"}, "which dataset: choose web or code"),
    ({"command": "eval", "arg": ["web"]}, "dataset ['web'] has no held-out part: choose web or code"),
    ({"command": "profile", "arg": True}, "profile takes a number of steps from 1 to 100, not True"),
    ({"command": "profile", "arg": 101}, "profile takes a number of steps from 1 to 100, not 101"),
    ({"command": "profile"}, "profile takes a number of steps from 1 to 100, not nothing"),
    ({"command": "eval web"}, "unknown command eval web"),
    ({"command": 3}, 'the file holds no object with a "command"'),
    ([], 'the file holds no object with a "command"'),
    ({"command": "resume"}, "the run is not paused"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(run, content, reason):
    run.put("x", content)
    run.inbox.look()
    ((_, _, state, detail),) = run.said()
    assert state == "refused" and detail.startswith(reason) and taken(run.inbox) == [] and run.left() == []


def test_a_run_without_checkpoints_or_hold_outs_says_what_it_lacks(tmp_path):
    run = Run(tmp_path / "run", (COMMANDS[0], *COMMANDS[4:]))
    run.put("a", {"command": "save"})
    run.put("b", {"command": "eval", "arg": "web"})
    run.inbox.look()
    assert sorted(line[3] for line in run.said()) == [
        "dataset web has no held-out part: no dataset of this run has a held-out part",
        "this run saves no checkpoints: checkpoint.enabled is false",
    ]


def test_what_lay_there_before_is_not_done(run):
    run.put("old", {"command": "stop"})
    (run.folder / "control/.half.tmp").write_text("{")
    inbox = run.again()
    inbox.sweep(time.time() + 1)
    inbox.look()
    assert taken(inbox) == [] and run.left() == []
    assert run.said() == [("old", "stop", "refused", "the command is older than this start of the run: repeat it")]


def test_what_is_given_while_the_run_starts_is_done(run):
    began = time.time() - 1
    run.put("new", {"command": "save"})
    inbox = run.again()
    inbox.sweep(began)
    inbox.look()
    assert [name for _, name, _ in taken(inbox)] == ["save"]


def test_what_was_not_done_when_the_run_ends_is_refused(run):
    run.put("a", {"command": "save"})
    run.inbox.look()
    run.put("b", {"command": "save"})
    run.inbox.close()
    assert [line[0::2] for line in run.said()] == [
        ("a", "accepted"),
        ("b", "accepted"),
        ("a", "refused"),
        ("b", "refused"),
    ]


def test_a_command_that_cannot_be_removed_is_done_once(run, monkeypatch):
    from pathlib import Path

    run.put("a", {"command": "save"})
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: (_ for _ in ()).throw(PermissionError()))
    run.inbox.look()
    run.inbox.look()
    assert taken(run.inbox) == [("a", "save", 0)] and len(run.said()) == 1


def test_a_check_that_fails_is_reported_once_and_the_next_one_follows(monkeypatch):
    monkeypatch.setattr("xtrain.runtime.observe.watch.SECONDS", 0.01)
    reports, looks = [], []

    def look():
        looks.append(1)
        raise OSError("stale file handle")

    poller = Poller(report=reports.append, looks={"a stop file": look, "commands": lambda: None})
    poller.begin()
    deadline = time.monotonic() + 10
    while len(looks) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    poller.close()
    assert len(looks) >= 3
    assert reports == ["a stop file could not be checked: OSError: stale file handle"]


# clocks ---------------------------------------------------------------------------------------------------------------


def test_clocks_that_run_out_while_a_run_waits_are_heard_at_the_next_step():
    clocks, answer = Clocks(), [3.0]
    clock, question = clocks.add(0.0), clocks.ask_for(lambda: answer[0])
    both = clocks.ask_for(lambda: 2.0, everywhere=True)
    clocks.answer(clocks.ask(first=True, waiting=True))
    assert not clocks.due(clock) and clocks.value(question) == 3 and clocks.value(both) == 2
    clocks.answer(clocks.ask(first=True))
    assert clocks.due(clock)
    assert clocks.ask(first=False) == [0.0, 0.0, 2.0]


# Slurm ----------------------------------------------------------------------------------------------------------------


def test_why_slurm_was_not_asked_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_slurm("17") == "the command scontrol was not found"
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\necho "$@" > "${0%/*}/asked"\nexit 0\n')
    command.chmod(0o755)
    assert ask_slurm("17") is None and (tmp_path / "asked").read_text() == "requeue 17\n"
    command.write_text("#!/bin/sh\nexit 4\n")
    assert ask_slurm("17") == "`scontrol requeue 17` failed with exit code 4: no output"


# from outside ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def live(run, monkeypatch):
    """A run that answers as long as the test lasts: its lock is held, and its inbox is looked into."""
    monkeypatch.setattr("xtrain.runtime.jobs.runs.LOOK_SECONDS", 0.01)
    (run.folder / "plan.json").write_text("{}")
    lock = (run.folder / asking.WORKER_LOCK).open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    over = threading.Event()

    def answer():
        while not over.wait(0.01):
            run.inbox.look()
            while (order := run.inbox.take()) is not None:
                run.inbox.report("of another process", "save", "done", "")
                run.inbox.report(order.id, order.command.name, "done", "it was")

    thread = threading.Thread(target=answer)
    thread.start()
    yield run
    over.set()
    thread.join()
    lock.close()


def test_a_command_is_given_by_the_newest_live_run_below_a_root(live, capsys):
    (live.folder.parent / "dead").mkdir()
    (live.folder.parent / "dead/plan.json").write_text("{}")
    assert main(["control", str(live.folder.parent), "eval", "web"]) == 0
    out, err = capsys.readouterr()
    assert out == "accepted  eval web  step 7\ndone  eval web  step 7: it was\n" and not err
    assert main(["control", str(live.folder), "eval", "nowhere", "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["detail"] == "dataset nowhere has no held-out part: choose web or code"
    deadline = time.monotonic() + 5
    while live.left() and time.monotonic() < deadline:
        time.sleep(0.01)  # the answer comes before the file goes
    assert live.left() == []


def test_where_nobody_answers_nothing_is_left_behind(run, capsys, monkeypatch):
    monkeypatch.setattr("xtrain.runtime.jobs.runs.LOOK_SECONDS", 0.01)
    assert main(["control", str(run.folder / "nothing"), "save"]) == 3
    assert "nothing or below it" in capsys.readouterr().err
    (run.folder / "plan.json").write_text("{}")
    assert main(["control", str(run.folder), "save"]) == 3
    assert "no rank is running in" in capsys.readouterr().err
    assert main(["control", str(run.folder.parent), "save"]) == 3
    assert "no rank is running in" in capsys.readouterr().err
    (run.folder / "events.jsonl").touch()
    with (run.folder / asking.WORKER_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["control", str(run.folder), "save", "--wait", "0.05"]) == 3
        assert "has not read the command within 0.05 s; the command was withdrawn" in capsys.readouterr().err
    assert run.left() == []


def test_ranks_that_are_about_to_start_are_waited_for(run, monkeypatch):
    monkeypatch.setattr("xtrain.runtime.jobs.runs.LOOK_SECONDS", 0.01)
    (run.folder / "plan.json").write_text("{}")
    with (run.folder / asking.LAUNCHER_LOCK).open("a") as launcher, (run.folder / asking.WORKER_LOCK).open("a") as rank:
        fcntl.flock(launcher, fcntl.LOCK_EX)
        with pytest.raises(asking.NotLive, match="no rank is running in"):
            asking.live_run([run.folder], 0.05)
        start = threading.Timer(0.2, fcntl.flock, (rank, fcntl.LOCK_EX))
        start.start()
        assert asking.live_run([run.folder], 30.0) == run.folder
        start.join()


@pytest.mark.parametrize(
    "arguments, says",
    [(["profile"], "profile takes a number of steps"), (["profile", "many"], "profile takes a number of steps"),
        (["stop", "now"], "stop takes no argument")],
)  # fmt: skip
def test_the_command_line_is_checked_before_anything_is_asked(run, capsys, arguments, says):
    assert main(["control", str(run.folder), *arguments]) == 2
    assert says in capsys.readouterr().err and run.left() == []
    with pytest.raises(SystemExit, match="2"):
        main(["control", str(run.folder), "save", "--wait", "never"])


@pytest.mark.parametrize(("content", "nodes", "stops"), [
    ({"command": "eval", "arg": "web"}, ["event.control.eval.web"], False),
    ({"command": "eval", "arg": "code"}, ["event.control.eval.code"], False),
    ({"command": "save"}, ["event.control.checkpoint"], False),
    ({"command": "stop"}, ["event.control.checkpoint"], True),
    ({"command": "resume"}, [], False),
])  # fmt: skip
def test_every_rank_carries_out_the_command_that_the_first_one_took(run, content, nodes, stops):
    ranks = []
    for first in (True, False):
        called: list[str] = []
        control, clocks = Control(COMMANDS, lambda node, called=called: lambda step: called.append(node)), Clocks()
        control.inbox = run.inbox if first else None
        control.ask_through(clocks)
        ranks.append((control, clocks, called))
    run.inbox._paused = True  # a run that is resumed
    run.put("a", content)
    run.inbox.look()
    said = [clocks.ask(first=control.inbox is not None) for control, clocks, _ in ranks]
    for control, clocks, called in ranks:
        control.paused = True
        clocks.answer([sum(answers) for answers in zip(*said, strict=True)])
        control.hear()
        assert control.busy and control.obey(None) == stops and called == nodes and not control.busy
        assert control.paused == (content["command"] != "resume")
    name = f"{content['command']} {content.get('arg', '')}".strip()
    assert run.said() == [("a", name, "accepted", ""), ("a", name, "done", "")]
