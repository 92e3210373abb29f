"""Ranks of another launcher that cannot begin, or cannot write down how a run has ended: they say so and leave."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from xtrain.cli.started import First, join, lead
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.gangs import conclusion
from xtrain.runtime.gangs.cause import FILE


@pytest.fixture
def left(tmp_path, monkeypatch) -> list[int]:
    """With which codes this process would have ended; a rank of three that know no place to meet."""
    codes: list[int] = []
    monkeypatch.setattr("xtrain.runtime.worker.leave", codes.append)
    monkeypatch.setattr("xtrain.runtime.control.signals.end_at_once", lambda: None)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", FILE: str(tmp_path / "error.json")}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    return codes


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_rank_that_finds_no_other_says_so(left, tmp_path, monkeypatch, capsys, rank):
    def compiled() -> Any:
        raise AssertionError("there is nobody to run it with")

    monkeypatch.setenv("RANK", rank)
    code = lead(compiled, None, lambda workspace: None) if rank == "0" else join()
    out, err = capsys.readouterr()
    assert (code, left, out) == (3, [3], "")
    assert err.startswith(f"error[X716]: rank {rank} of 3: ") and len(err.splitlines()) == 1
    assert err.strip() in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


@pytest.mark.parametrize("who", ["_stop", "_give_up"])
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (EnvironmentFault("X706", "events.jsonl cannot be written: No space left on device"), 3, "error[X706]: events"),
        (ZeroDivisionError("a mistake of ours"), 1, "a mistake of ours"),
    ],
    ids=["a full disk", "a mistake"],
)
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
