"""How ranks of another launcher leave that cannot begin, or whose run has failed, and the cause that they leave."""

import json
import os
import time
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from xtrain.cli import started
from xtrain.cli.started import First, join, lead
from xtrain.cli.verb import Refused
from xtrain.records.events import FailureEvent
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.json_lines import JsonLinesFile
from xtrain.runtime.base.process import FILE, write_cause
from xtrain.runtime.jobs import rendezvous as meeting
from xtrain.runtime.jobs import restarts as conclusion
from xtrain.runtime.jobs.launch import Ended
from xtrain.runtime.jobs.rendezvous import CannotTakePart, RendezvousHost, RendezvousMember, SentAway


@pytest.fixture
def left(tmp_path, monkeypatch) -> list[int]:
    """With which codes this process would have ended; a rank of three that know no place to meet."""
    codes: list[int] = []
    monkeypatch.setattr(started, "exit_process", codes.append)
    monkeypatch.setattr("xtrain.runtime.observe.stopping.end_at_once", lambda: None)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", FILE: str(tmp_path / "error.json")}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    return codes


def cause(tmp_path) -> str:
    return json.loads((tmp_path / "error.json").read_text())["message"]["message"]


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_rank_that_finds_no_other_says_so(left, tmp_path, monkeypatch, capsys, rank):
    def compiled() -> Any:
        raise AssertionError("there is nobody to run it with")

    monkeypatch.setenv("RANK", rank)
    code = lead(compiled, None, lambda workspace: None, verbose=False) if rank == "0" else join()
    out, err = capsys.readouterr()
    assert (code, left, out) == (3, [3], "")
    assert err.startswith(f"error[X716]: rank {rank} of 3: ") and len(err.splitlines()) == 1
    assert err.strip() == cause(tmp_path)


@pytest.mark.parametrize("who", ["_stop", "_give_up"])
@pytest.mark.parametrize(("fault", "code", "says"), [
    (EnvironmentFault("X706", "events.jsonl cannot be written: No space left on device"), 3, "error[X706]: events"),
    (ZeroDivisionError("a mistake of ours"), 1, "a mistake of ours"),
], ids=["a full disk", "a mistake"])  # fmt: skip
def test_a_run_whose_end_cannot_be_written_ends(left, tmp_path, monkeypatch, capsys, who, fault, code, says):
    """The thread that hears signals, and the one that gives a run up, do not end alone."""

    def conclude(*given: Any) -> Any:
        raise fault

    monkeypatch.setattr(conclusion, "conclude", conclude)
    plan: Any = SimpleNamespace(id="plan")
    workspace: Any = SimpleNamespace(directory=tmp_path)
    getattr(First(workspace, plan, None), who)(15)
    assert left == [15 if who == "_give_up" and code == 3 else code]
    assert says in capsys.readouterr().err


@pytest.fixture
def first(left, monkeypatch) -> Callable[..., Thread]:
    """Starts what the first rank does, in a thread, in a store that is there; this process is rank 1 of two."""
    store = HashStore()
    monkeypatch.setattr(meeting, "_store", lambda: PrefixStore("xtrain", store))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    def start(act: Callable[[], Any]) -> Thread:
        thread = Thread(target=act, daemon=True)
        thread.start()
        return thread

    return start


def test_the_first_rank_is_shown_last_where_it_comes_seconds_after_the_others(tmp_path, monkeypatch):
    """Of several files torchrun shows the earliest last."""
    stamps = []
    # The one that says no more than that the first does comes earlier.
    for name, of_first, now in (("other", True, 1000.2), ("first", False, 1005.1)):
        monkeypatch.setenv(FILE, str(tmp_path / name))
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write_cause("why", of_first=of_first)
        stamps.append(int(json.loads((tmp_path / name).read_text())["message"]["extraInfo"]["timestamp"]))
    assert stamps[1] < stamps[0]


def test_a_rank_that_is_sent_away_leaves_as_the_first_one_does(first, left, tmp_path, capsys):
    first(lambda: RendezvousHost.open().send_away(4)).join(0.2)
    assert join() == 4 and left == [4]
    assert cause(tmp_path) == "see the message of the first rank" and capsys.readouterr() == ("", "")


def test_a_first_rank_that_is_refused_sends_the_others_away(first, left, tmp_path, monkeypatch, capsys):
    def compiled() -> Any:
        raise Refused(2, "error[X203]: no such setting")

    heard: list[int] = []

    def other() -> None:
        with pytest.raises(SentAway) as away:
            RendezvousMember.arrive()
        heard.append(away.value.code)

    thread = first(other)
    assert lead(compiled, None, lambda workspace: None, verbose=False) == 2 and left == [2]
    thread.join(20)
    assert heard == [2] and cause(tmp_path) == "error[X203]: no such setting"
    assert capsys.readouterr().err == "error[X203]: no such setting\n"


def test_a_rank_whose_machine_is_not_the_planned_one_ends_the_start(first, left, tmp_path, monkeypatch, capsys):
    heard: list[str] = []

    def admit() -> None:
        with pytest.raises(CannotTakePart) as fault:
            RendezvousHost.open().admit(directory=str(tmp_path), plan="plan", environment={})
        heard.append(f"{fault.value.code} {fault.value}")

    def check(plan: Any) -> None:
        raise EnvironmentFault("X703", "3 ranks on this machine")

    monkeypatch.setattr("xtrain.runtime.observe.provenance.planned", lambda directory, id: id)
    monkeypatch.setattr("xtrain.runtime.loop.worker.run_rank", lambda *given, **named: "done")
    monkeypatch.setattr(started, "_check_place", check)
    thread = first(admit)
    assert join() == 3 and left == [3] and capsys.readouterr() == ("", "")
    thread.join(20)
    assert heard == ["X703 rank 1: 3 ranks on this machine"] and cause(tmp_path) == "see the message of the first rank"


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("stopped", 75), ("done", 0)])
def test_a_rank_that_fails_leaves_the_cause_to_the_first_one(first, left, tmp_path, monkeypatch, status, code):
    monkeypatch.setenv("XTRAIN_RESTART", "0")
    monkeypatch.setattr("xtrain.runtime.observe.provenance.planned", lambda directory, id: id)
    monkeypatch.setattr("xtrain.runtime.loop.worker.run_rank", lambda *given, **named: status)
    monkeypatch.setattr(started, "_check_place", lambda plan: None)
    first(
        lambda: RendezvousHost.open().admit(directory=str(tmp_path), plan="plan", environment={"XTRAIN_RESTART": "1"})
    )
    assert join() == code and left == [code] and os.environ["XTRAIN_RESTART"] == "1"
    assert (cause(tmp_path) if code else "see the message of the first rank") == "see the message of the first rank"
    assert (tmp_path / "error.json").exists() == bool(code)


@pytest.mark.parametrize(("fields", "says"), [
    ({"rank": 1, "code": "X507"}, "error[X507]: rank 1: it is broken"),
    ({"rank": 0, "code": "X507"}, "error[X507]: it is broken"),
    ({"rank": 1, "code": "X705", "agreed": True}, "error[X705]: it is broken"),
    ({"rank": None}, "error: it is broken"),
])  # fmt: skip
def test_what_a_run_failed_of_is_left_where_the_launcher_looks(left, tmp_path, fields, says):
    plan: Any = SimpleNamespace(id="plan")
    workspace: Any = SimpleNamespace(directory=tmp_path, attempt="start-1")
    one = First(workspace, plan, None)
    lines = JsonLinesFile(tmp_path / "events.jsonl")
    lines.write(FailureEvent(step=0, error="it is broken", traceback="", exit_code=1, **fields))
    one._end_and_leave(Ended())
    assert left == [1] and cause(tmp_path) == says
