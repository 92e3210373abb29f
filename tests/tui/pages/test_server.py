"""The Server screen: rows of every size, who waits for what, and a server that has gone."""

from pathlib import Path

import msgspec
import pytest
from attrs import evolve
from rich.cells import cell_len

from xtrain.records.status import SERVER_FILE, ServedModel, ServerStatus
from xtrain.tui.board.head import head
from xtrain.tui.model.reader import RunReader
from xtrain.tui.pages.server_page import in_words, is_old, page
from xtrain.tui.pages.sheet import ListPage, ListView, moved, plain

NOW = 1000.0
SESSION = "43f48699a7e148ec923b3f16d9c33c91"
STATUS = ServerStatus(
    time=NOW - 0.5, state="serving", began=NOW - 125, url="http://127.0.0.1:8123", clients=2, slots=8, requests=1234,
    errors=3, waiting=64, queue=256, requests_per_second=12.34, trained_per_second=5600.0, sampled_per_second=78.0,
    latency={"p50": 0.012, "p95": 0.5, "p99": 2.0}, kinds={"optim_step": 600},
    models=[
        ServedModel(id=f"{SESSION}:train:0", client="sql tuning", connected=True, in_memory=True, rank=16, steps=40,
                    tokens=12_300, loss=1.25, loss_name="cross_entropy", last_time=NOW - 0.4),
        ServedModel(id=f"{SESSION}:train:1", connected=True, rank=8, waiting=3, next_seq=7, last_time=NOW - 61,
                    waits_for="request 7, which has not arrived", waited_seconds=12.0),
        ServedModel(id="b0:train:0", rank=None, damaged="its snapshot cannot be read"),
    ],
)  # fmt: skip


def shown(found: ListPage) -> list[str]:
    return [plain(row).rstrip() for row in found.rows]


def test_what_a_server_does() -> None:
    lines = shown(page(STATUS, ListView(), 110, 24, NOW))
    assert "Server ─" in lines[0] and lines[0].endswith("http://127.0.0.1:8123 · 2m04s up")
    assert lines[1:4] == [
        "  clients   2 connected · 1 of 8 slots in use",
        "  requests  1,234 requests done · 12.3/s · 3 errors",
        "  speed     trained 5.6k tok/s · sampled 78 tok/s · p50 12 ms · p95 500 ms · p99 2.00 s",
    ]
    assert lines[4].startswith("  queue     ███") and lines[4].endswith("64 of 256")
    first, second, third = (next(line for line in lines if line.startswith(name)) for name in
                            ("43f48699:train:0", "43f48699:train:1", "b0:train:0"))  # fmt: skip
    assert first.split() == [
        "43f48699:train:0", "in", "memory", "40", "1.2500", "12.3k", "–", "16", "now", "sql", "tuning",
    ]  # fmt: skip
    assert second.split()[1:3] == ["on", "disk"] and "3" in second.split() and second.endswith("1m01s")
    assert "damaged" in third and "full" in third
    healthy = msgspec.structs.replace(STATUS, errors=0)
    assert shown(page(healthy, ListView(), 110, 24, NOW))[2].endswith(" · 12.3/s · no errors")


def test_who_waits_and_what_is_wrong() -> None:
    words = [text for text, _ in in_words(STATUS, NOW)]
    assert words == [
        "b0:train:0: its snapshot cannot be read",
        "43f48699:train:1 has waited 12s for request 7, which has not arrived",
    ]
    failed = msgspec.structs.replace(STATUS, state="failed", reason="the journal cannot be written", models=[])
    assert [text for text, _ in in_words(failed, NOW)] == [
        "The server has failed: the journal cannot be written", "No client has made a model yet.",
    ]  # fmt: skip


def test_a_server_that_writes_no_more() -> None:
    assert not is_old(STATUS, NOW) and is_old(STATUS, NOW + 60)
    assert not is_old(msgspec.structs.replace(STATUS, state="stopped"), NOW + 60)
    assert in_words(STATUS, NOW + 60)[0] == ("The server has written nothing for 1m00s.", "bad")


@pytest.mark.parametrize("width", [40, 63, 80, 200])
@pytest.mark.parametrize("height", [8, 12, 40])
def test_every_size(width: int, height: int) -> None:
    many = msgspec.structs.replace(STATUS, models=STATUS.models * 20)
    view = ListView()
    for _ in range(70):
        found = page(many, view, width, height, NOW)
        assert len(found.rows) == height and all(cell_len(plain(row)) == width for row in found.rows)
        assert 0 <= found.view.place - found.view.top < found.height
        view = moved(found, 1)
    assert view.place == 59


def test_it_is_read_from_the_run(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    assert reader.poll().server is None
    path = tmp_path / SERVER_FILE
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(STATUS))
    board = reader.poll()
    assert board.server == STATUS
    path.write_bytes(b'{"time": "no"')
    assert reader.poll().server == STATUS
    text = str(head(evolve(board, now=NOW), 110))
    assert "serving" in text and "2 clients" in text and "3 models" in text and "64 waiting" in text
    assert "LOST" in str(head(evolve(board, now=NOW + 60), 110))
