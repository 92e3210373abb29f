"""Marks, the line that tells of them, and the thread that writes it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from beats import reading
from one_rank import one_rank

from xtrain.records.names import heartbeat_path
from xtrain.records.status import WIDTH, read_heartbeat
from xtrain.runtime.observe import watch as watching
from xtrain.runtime.observe.heartbeat import BeatFile, HeartbeatWriter, born, process_state
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stacks import end, here, save_of, whereabouts
from xtrain.runtime.observe.watch import Watchdog

ALONE = one_rank(coordinates={})


def watch(directory: Path, *, stuck: float | None = 10.0, world: int = 1, left: list[int] | None = None) -> Watchdog:
    """The watch of rank 0; its thread is not begun."""
    (directory / "ranks").mkdir(exist_ok=True)
    records = Records.open(directory, 0)
    file = BeatFile(heartbeat_path(directory, 0), 0, 1)
    exit_process = (lambda code: None) if left is None else left.append
    return Watchdog(
        beat=HeartbeatWriter(), file=file, records=records, rank=0, world=world, stuck=stuck, exit_process=exit_process
    )


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, watch: Watchdog) -> None:
        self.now = watch._last
        self._watch = watch
        monkeypatch.setattr(watching.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watching, "JOIN_SECONDS", 0.0)

    def go(self, seconds: float, *, at_once: bool = False) -> None:
        for _ in range(1 if at_once else round(seconds)):
            self.now += seconds if at_once else 1.0
            self._watch.tick()


def events(directory: Path) -> list[dict]:
    path = directory / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_line_says_all_that_the_documentation_names(tmp_path):
    beat, file = HeartbeatWriter(), BeatFile(tmp_path / "00003.beat", 3, 2)
    beat.begin(5)
    beat.at("step.fetch")
    beat.mark()
    file.write(beat, 1.25, "torch/x.py:3 wait", False)
    found = read_heartbeat(file.path)
    assert found is not None and found.progress == (5, 2)
    assert (found.rank, found.attempt, found.alive, found.node, found.marks) == (3, 2, 1, "step.fetch", 2)
    assert found.pid == os.getpid() and found.born == born(os.getpid()) and found.place == "torch/x.py:3 wait"
    text = Path(__file__).parents[3].joinpath("docs/health.md").read_text()
    for name in json.loads(file.path.read_text()):
        assert f"| `{name}` |" in text, name


def test_a_line_is_written_over_itself_whatever_its_length(tmp_path):
    beat, file = HeartbeatWriter(), BeatFile(tmp_path / "00000.beat", 0, 1)
    for node in ("n" * 500, "short"):
        beat.at(node)
        file.write(beat, 0.0, "p" * 500, False)
        assert file.path.stat().st_size == WIDTH and file.path.read_text().endswith("\n")
        found = read_heartbeat(file.path)
        assert found is not None and found.node == node[:120]
    file.path.write_text('{"rank":0')
    assert read_heartbeat(file.path) is None and read_heartbeat(tmp_path / "none.beat") is None


def test_a_mark_costs_next_to_nothing():
    beat = HeartbeatWriter()
    at, count = beat.at, 200_000

    def seconds() -> float:
        begin = time.process_time()
        for _ in range(count):
            at("step.forward_backward", False)
        return (time.process_time() - begin) / count

    assert min(seconds() for _ in range(5)) < 0.5e-6


def test_a_folder_that_is_gone_or_cannot_be_written_is_no_matter_of_the_training(tmp_path, monkeypatch):
    each = watch(tmp_path)
    each.begin()
    (tmp_path / "ranks").rename(tmp_path / "away")
    each.tick()
    (tmp_path / "ranks").write_text("in the way")
    each.tick()
    (tmp_path / "ranks").unlink()
    (tmp_path / "away").rename(tmp_path / "ranks")
    each.tick()
    found = read_heartbeat(each.file.path)
    assert found is not None and found.alive == 4

    def full(*_: object) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    each.tick()
    each.close()
    assert not events(tmp_path)


def test_the_last_line_says_where_the_rank_was(tmp_path):
    each, others = watch(tmp_path), {*threading.enumerate()}
    each.begin()
    each.beat.begin(9)
    each.beat.at("shutdown.leave", lasting=True)
    each.close()
    found = read_heartbeat(each.file.path)
    assert found is not None and (found.step, found.node) == (9, "shutdown.leave")
    assert {*threading.enumerate()} <= others


def test_a_rank_that_is_alone_and_stuck_says_so_and_leaves(tmp_path, monkeypatch):
    left: list[int] = []
    each = watch(tmp_path, left=left)
    clock = Clock(monkeypatch, each)
    each.beat.begin(4)
    each.beat.at("step.fetch")
    clock.go(9)
    assert not left and not events(tmp_path)
    clock.go(4)
    stuck, failure = events(tmp_path)[:2]
    assert (stuck["ranks"], stuck["step"], stuck["node"], stuck["state"]) == ([0], 4, "step.fetch", "stuck")
    assert failure["rank"] == 0 and "step 4, step.fetch" in failure["error"] and failure["exit_code"] == 1
    assert left[0] == 1
    assert "test_heartbeat.py" in (tmp_path / "logs" / "stuck-1" / "00000.txt").read_text()


def test_progress_of_any_kind_puts_it_off(tmp_path, monkeypatch):
    left: list[int] = []
    each = watch(tmp_path, left=left)
    clock = Clock(monkeypatch, each)
    each.beat.at("tick.eval.web")
    for _ in range(10):
        clock.go(8)
        each.beat.mark()
    each.beat.at("tick.checkpoint", lasting=True)
    clock.go(100)
    assert not left


def test_a_machine_that_was_asleep_is_nobodys_fault(tmp_path, monkeypatch):
    left: list[int] = []
    each = watch(tmp_path, left=left)
    clock = Clock(monkeypatch, each)
    each.beat.at("step.agree")
    clock.go(3)
    clock.go(7200, at_once=True)
    clock.go(2)
    assert not left
    clock.go(6)
    assert left


def test_without_a_limit_nobody_is_named_but_in_a_probe(tmp_path, monkeypatch):
    left: list[int] = []
    each = watch(tmp_path, stuck=None, left=left)
    clock = Clock(monkeypatch, each)
    each.beat.at("step.agree")
    clock.go(1000)
    assert not left
    each.beat.at("tick.health")
    each.beat.limit = 5.0
    clock.go(7)
    assert left


def test_what_another_rank_has_found_holds_for_all_and_is_reported_once(tmp_path, monkeypatch):
    left: list[int] = []
    each = watch(tmp_path, left=left)
    clock = Clock(monkeypatch, each)
    folder = tmp_path / "logs" / "stuck-1"
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_text(json.dumps({"ranks": [1], "state": "frozen"}))
    clock.go(1)
    assert left == [1] and (folder / "00000.txt").exists() and not events(tmp_path)


def test_a_verdict_that_a_start_before_has_left_is_forgotten(tmp_path):
    folder = tmp_path / "logs" / "stuck-0"
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_text(json.dumps({"ranks": [1], "state": "frozen"}))
    left: list[int] = []
    each = watching.watch(ALONE, Records.open(tmp_path, 0), HeartbeatWriter(), left.append, None)
    each.tick()
    each.close()
    assert not left


@contextmanager
def process_of(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_known_by_more_than_its_number():
    with process_of("import time; time.sleep(60)") as process:
        assert process_state(process.pid) in "RSD" and born(process.pid)
        process.send_signal(signal.SIGSTOP)
        while process_state(process.pid) != "T":
            time.sleep(0.01)
        mine = reading(pid=process.pid, born=born(process.pid))
        assert here(mine, "a") and not here(mine, "b")
        other = reading(pid=process.pid, born=born(process.pid) - 1)
        assert not here(other, "a")
        end(other)
        assert process_state(process.pid) == "T", "another process has its number now"
        end(mine)
        assert process.wait(timeout=10) == -signal.SIGKILL
        assert here(mine, "a")


ASLEEP = """
import ctypes, time
from pathlib import Path
from xtrain.runtime.observe.stacks import answer_when_asked
answer_when_asked()
print("ready", flush=True)
for _ in range(60): ctypes.PyDLL(None).sleep(1)  # a signal ends the one under way
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_whose_python_does_not_run_still_gives_its_stack(tmp_path):
    with process_of(ASLEEP) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        save_of(tmp_path, reading(pid=process.pid, born=born(process.pid)))
    text = (tmp_path / "00001.txt").read_text()
    assert 'File "<string>", line 7 in <module>' in text, text


def test_the_place_of_the_main_thread_is_its_file_line_and_function():
    found: list[tuple[str, bool]] = []
    other = threading.Thread(target=lambda: found.append(whereabouts()))
    other.start()
    other.join()
    place, debugger = found[0]
    assert place.startswith("/") and place.endswith(" wait") and not debugger


WATCHED = """
import gc, threading, time
from xtrain.runtime.observe.stacks import whereabouts
def look():
    for _ in range(40):
        whereabouts()
watching = threading.Thread(target=look)
def collecting(phase, info):  # other threads run in the midst of a collection
    if threading.current_thread() is watching:
        time.sleep(0.001)
gc.callbacks.append(collecting)
gc.set_threshold(1)
watching.start()
while watching.is_alive():
    threading.Thread(target=int).start()
"""


def test_looking_for_the_place_of_the_main_thread_waits_for_no_collection():
    """A deadlock otherwise, in some versions of CPython: the look holds a lock that threads take when they begin."""
    subprocess.run([sys.executable, "-c", WATCHED], check=True, timeout=60)
