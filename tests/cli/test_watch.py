"""`xtrain watch`, and `xtrain run --ui tui`: what is refused, and in which words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import made_run

from xtrain.cli.control import COMMANDS
from xtrain.cli.main import main
from xtrain.records.names import ControlWord
from xtrain.tui.board import opening, terminal
from xtrain.tui.board.actions import Answer, answers, command_line
from xtrain.tui.board.app import BoardApp
from xtrain.tui.board.help import _ACTIONS, sign
from xtrain.tui.board.terminal import SCREENS, pane_classes

ROOT = Path(__file__).parents[2]


def test_a_run_that_does_not_exist_is_said(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "nowhere")]) == 3
    said = capsys.readouterr().err
    assert said.startswith("xtrain watch: ") and "nowhere" in said and "`xtrain run SPEC` starts one" in said
    run = made_run(tmp_path / "run", logged=10).directory
    assert main(["watch", str(run), "--compare", str(tmp_path / "elsewhere")]) == 3
    assert "elsewhere" in capsys.readouterr().err


def test_without_a_terminal_lines_are_advised(tmp_path, capsys):
    run = made_run(tmp_path / "run", logged=10).directory
    assert main(["watch", str(run)]) == 2
    assert "--ui plain and --ui json write lines instead" in capsys.readouterr().err


def test_lines_of_a_run_that_has_ended(tmp_path, capsys):
    run = made_run(tmp_path / "run", logged=10).directory
    assert main(["watch", str(run), "--ui", "json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[-1]["event"] == "run_end" and sum("loss" in each and "event" not in each for each in records) == 10
    assert main(["watch", str(run), "--ui", "plain"]) == 0
    assert "done" in capsys.readouterr().out


def test_lines_of_a_run_that_is_gone_without_a_word(tmp_path, capsys):
    """It was killed: nobody is there who would write the end that is waited for."""
    run = made_run(tmp_path / "run", end="killed", logged=10, steps=100).directory
    assert main(["watch", str(run), "--ui", "json"]) == 4
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[-1] == {"kind": "lost", "step": 10, "why": "its processes are gone"}
    assert sum(each["kind"] == "metrics" and "loss" in each for each in records) == 10
    assert main(["watch", str(run), "--ui", "plain"]) == 4
    said = capsys.readouterr().out
    assert "end  lost  step 10/100  its processes are gone" in said and "next  run the same command again" in said


def test_lines_of_a_run_that_is_killed_while_it_is_followed(tmp_path):
    run = made_run(tmp_path / "run", end="running", logged=10)
    command = [sys.executable, "-m", "xtrain", "watch", str(run.directory), "--ui", "plain"]
    with run.alive():
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        while not watching.stdout.readline().startswith("step 10"):
            pass
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(1.5)  # several looks at its locks
    said, _ = watching.communicate(timeout=60)
    assert watching.returncode == 4 and "end  lost  step 10" in said


@pytest.fixture
def openings(monkeypatch):
    """What would have been opened, on a terminal."""
    found = []
    monkeypatch.setattr(terminal, "why_not", lambda: "")
    monkeypatch.setattr(opening, "open_board", lambda directory, **options: found.append((directory, options)) or 0)
    return found


def test_the_newest_run_is_the_one_that_is_meant(tmp_path, monkeypatch, openings):
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        made_run(Path("runs/a") / name, logged=10)
    assert main(["watch"]) == 0
    assert [(path.name, options["first"]) for path, options in openings] == [("new", "")]
    assert main(["watch", "runs/a/old", "--screen", "ranks"]) == 0
    assert main(["watch", "runs/a/old", "--compare", "runs/a/new"]) == 0
    more = ["--compare", "runs/a/new"]
    assert main(["watch", "runs/a/old", "--screen", "events", *more, *more]) == 0
    said = [(path.name, [other.name for other in options["compared"]], options["first"]) for path, options in openings]
    assert said[1:] == [("old", [], "ranks"), ("old", ["new"], "compare"), ("old", ["new", "new"], "events")]


def test_screens_are_those_of_the_dashboard(capsys):
    assert list(SCREENS) == list(pane_classes())
    with pytest.raises(SystemExit) as left:
        main(["watch", "--screen", "weather"])
    assert left.value.code == 2 and "overview" in capsys.readouterr().err


def test_a_run_without_a_terminal_opens_no_dashboard(capsys, monkeypatch):
    assert main(["run", "specs/two_ranks_cpu.xtrain", "--ui", "tui"]) == 2
    said = capsys.readouterr().err
    assert "not a terminal" in said and "--ui plain" in said and "`xtrain watch`" in said
    # The first of ranks that another launcher has started; the others say nothing. With one there is none to send away.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("xtrain.cli.started.exit_process", lambda code: None)
    assert main(["run", "specs/two_ranks_cpu.xtrain", "--ui", "tui"]) == 2
    assert "one rank of several" in capsys.readouterr().err


def test_every_action_is_a_command_of_a_live_run():
    assert {*_ACTIONS, ControlWord.RESUME} == set(COMMANDS)


def test_what_a_run_answers_is_passed_on_as_it_comes():
    said = {"event": "control", "step": 7}
    accepted, done = ({**said, "state": state, "detail": "so\x1b[31m"} for state in ("accepted", "done"))
    script = f"import json; print(json.dumps({accepted!r})); print('noise'); print(json.dumps({done!r}))"
    assert list(answers([sys.executable, "-c", script])) == [
        Answer("accepted", "so\ufffd[31m", 7),
        Answer("done", "so\ufffd[31m", 7),
    ]


def test_nobody_who_answers_is_said_as_well(tmp_path):
    run = made_run(tmp_path / "run", logged=10).directory
    assert [answer.state for answer in answers(command_line(run, "save"))] == ["unheard"]
    (answer,) = answers(command_line(run, "save"))
    assert answer.detail.startswith("no rank is running in ")
    (answer,) = answers([str(tmp_path / "nothing")])
    assert "could not be started" in answer.detail


def test_the_guide_has_every_key_and_every_screen():
    guide = (ROOT / "docs/dashboard.md").read_text()
    for binding in BoardApp.BINDINGS:
        key = sign(binding.key)
        assert f"`{key}`" in guide or key.isdecimal(), key
    for name, cls in pane_classes().items():
        assert cls.title in guide, name


def test_help_has_an_example():
    done = subprocess.run([sys.executable, "-m", "xtrain", "watch", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "xtrain watch runs/quickstart --screen ranks" in done.stdout
