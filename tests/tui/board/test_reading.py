"""Files that cannot be read: a disk that hangs, and an error that comes back; both are said and neither is hidden."""

import threading

from dashboards import opened, played, rows, until
from made_runs import made_run

from xtrain.tui.board import app as application
from xtrain.tui.board import reading
from xtrain.tui.model.reader import RunReader


def hanging(monkeypatch) -> threading.Event:
    """What a reader of runs waits for before it reads: cleared, its disk hangs."""
    goes_on, poll = threading.Event(), RunReader.poll
    goes_on.set()

    def waits(self, *arguments):
        goes_on.wait(60)
        return poll(self, *arguments)

    monkeypatch.setattr(RunReader, "poll", waits)
    return goes_on


def test_a_disk_that_hangs_is_said_and_nobody_knows_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(application, "UNREAD_SECONDS", 1.0)
    run = made_run(tmp_path / "run", end="running", logged=40, steps=400)
    hangs = hanging(monkeypatch)

    async def play():
        async with opened(run.directory, (160, 40)) as (app, pilot):
            await until(pilot, lambda: "ETA" in rows(app)[0])
            hangs.clear()
            await until(pilot, lambda: "files not read for" in rows(app)[0])
            assert "ETA" not in rows(app)[0] and "step 40/400" in rows(app)[0]
            await pilot.press("2")
            await until(pilot, lambda: app.visited == "plan")  # keys work meanwhile
            hangs.set()
            await until(pilot, lambda: "not read" not in rows(app)[0] and "ETA" in rows(app)[0])

    with run.alive():
        played(play())


def test_a_directory_that_hangs_from_the_start_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(application, "UNREAD_SECONDS", 0.2)
    hangs = hanging(monkeypatch)
    hangs.clear()

    async def play():
        app = application.BoardApp(tmp_path)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: f"{tmp_path.name}  files not read for" in rows(app)[0])
            assert app.board is None
        hangs.set()

    played(play())


def test_an_error_of_reading_is_shown_once_and_tried_again_ever_later(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(application, "UNREAD_SECONDS", 0.5)
    monkeypatch.setattr(reading, "FAULT_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(reading, "MOST_FAULT_PAUSE_SECONDS", 0.08)
    run = made_run(tmp_path / "run", logged=20).directory
    poll, broken = RunReader.poll, [False]

    def breaks(self, *arguments):
        if broken[0]:
            raise ZeroDivisionError("of all things")
        return poll(self, *arguments)

    monkeypatch.setattr(RunReader, "poll", breaks)

    async def play():
        async with opened(run, (120, 40)) as (app, pilot):
            waits = []
            wait = app._reading._closed.wait
            monkeypatch.setattr(app._reading._closed, "wait", lambda seconds: waits.append(seconds) or wait(seconds))
            messages = []  # all of them: a toast is gone after some seconds
            notify = app.notify
            monkeypatch.setattr(app, "notify", lambda text, **how: messages.append(text) or notify(text, **how))
            broken[0] = True
            await until(pilot, lambda: "files cannot be read for" in rows(app)[0] and app._reading.faults >= 5)
            first = waits.index(0.02)
            assert waits[first : first + 4] == [0.02, 0.04, 0.08, 0.08]
            (message,) = [each for each in messages if "reading the run failed" in each]
            assert "dashboard.log" in message and app.fault == tmp_path / "state/xtrain/dashboard.log"
            broken[0] = False
            await until(pilot, lambda: "cannot be read" not in rows(app)[0])

    played(play())
    assert "ZeroDivisionError: of all things" in (tmp_path / "state/xtrain/dashboard.log").read_text()
