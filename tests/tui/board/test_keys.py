"""Every key of the application, pressed."""

import re
from pathlib import Path

import pytest
from dashboards import opened, played, rows, shown, until
from made_runs import made_run
from textual.widgets import Input

from xtrain.tui.board import app as application
from xtrain.tui.board.actions import Answer, Question
from xtrain.tui.board.app import BoardApp, first_theme
from xtrain.tui.board.help import HelpScreen


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "ended", "datasets", logged=40).directory


@pytest.fixture
def live(tmp_path):
    """A run that could be training: this process holds its locks."""
    run = made_run(tmp_path / "live", "datasets", end="running", logged=40, steps=400)
    with run.alive():
        yield run


@pytest.fixture
def asked(monkeypatch) -> list[list[str]]:
    """What would have been asked of the run, which answers to everything."""
    given: list[list[str]] = []

    def answers(arguments):
        given.append(arguments[arguments.index("control") + 2 : -1])
        yield Answer("accepted", "")
        yield Answer("done", "as it was asked", 41)

    monkeypatch.setattr(application, "answers", answers)
    return given


def test_numbers_and_tab_lead_to_the_screens(ended):
    async def play():
        async with opened(ended) as (app, pilot):
            names = [name for _, name, _ in app._screens()]
            for number, name, cls in app._screens():
                await pilot.press(str(number))
                await until(pilot, lambda name=name: app.visited == name)
                await pilot.pause()
                assert f"[{number} {cls.title}]" in rows(app)[1] or f"[{number} {cls.short}]" in rows(app)[1]
            await pilot.press("1")
            for name in [*names[1:], names[0]]:
                await pilot.press("tab")
                await until(pilot, lambda name=name: app.visited == name)
            await pilot.press("shift+tab")
            await until(pilot, lambda: app.visited == names[-1])

    played(play())


def test_a_screen_that_the_run_does_not_have_is_refused_in_words(ended):
    async def play():
        async with opened(ended) as (app, pilot):
            assert "Experts" not in rows(app)[1]
            await pilot.press("4")
            await until(pilot, lambda: bool(app._notifications))
            assert app.visited == "overview"
            assert "no data for experts" in next(each.message for each in app._notifications)

    played(play())


def test_the_first_screen_may_be_another(ended):
    async def play():
        async with opened(ended, first="events") as (app, pilot):
            await until(pilot, lambda: app.visited == "events")

    played(play())


def test_help_shows_every_key_with_why_it_does_nothing_now(ended):
    async def play():
        async with opened(ended, (120, 60)) as (app, pilot):
            await pilot.press("question_mark")
            await until(pilot, lambda: isinstance(app.screen, HelpScreen) and "all keys" in shown(app))
            text = shown(app)
            for binding in BoardApp.BINDINGS:
                assert binding.tooltip in text, binding
            assert "not now: the run has ended (done)" in text
            for key in ("escape", "q", "question_mark"):
                await pilot.press(key)
                await until(pilot, lambda: not isinstance(app.screen, HelpScreen))
                await pilot.press("question_mark")
                await until(pilot, lambda: isinstance(app.screen, HelpScreen))

    played(play())


def test_a_frozen_view_stands_still_while_the_run_goes_on(live):
    async def play():
        async with opened(live.directory) as (app, pilot):
            await pilot.press("space")
            await until(pilot, lambda: "view frozen" in rows(app)[0])
            live.log(41, 50)
            live.beat()
            await until(pilot, lambda: app.live.run.step == 50)
            assert app.board.run.step == 40
            await until(pilot, lambda: "step 50/400" in rows(app)[0])
            await pilot.press("space")
            await until(pilot, lambda: app.board.run.step == 50 and "frozen" not in rows(app)[0])

    played(play())


@pytest.mark.parametrize(("content", "ground", "theme"), [
    (None, "", "dark"), (None, "15;0", "dark"), (None, "0;15", "light"), (None, "0;default;7", "light"),
    ("light", "15;0", "light"), ("contrast\n", "", "contrast"), ("nonsense", "0;15", "light"), ("x" * 99, "", "dark"),
])  # fmt: skip
def test_the_first_theme_is_the_remembered_one_or_follows_the_terminal(tmp_path, monkeypatch, content, ground, theme):
    monkeypatch.setenv("COLORFGBG", ground)
    if content is not None:
        (tmp_path / "theme").write_text(content)
    assert first_theme(tmp_path / "theme") == theme


def test_a_theme_is_remembered(ended, tmp_path):
    async def play():
        async with opened(ended, theme_file=tmp_path / "state" / "theme") as (app, pilot):
            assert app.theme == "dark"
            await pilot.press("t")
        async with opened(ended, theme_file=tmp_path / "state" / "theme") as (app, _):
            assert app.theme == "light"

    played(play())


def test_themes_follow_one_another(ended):
    async def play():
        async with opened(ended) as (app, pilot):
            seen = [app.theme]
            for _ in range(3):
                await pilot.press("t")
                seen.append(app.theme)
            assert seen == ["dark", "light", "contrast", "dark"]

    played(play())


def test_q_and_ctrl_c_leave_at_once_where_nobody_waits(live):
    async def play(key):
        async with opened(live.directory) as (app, pilot):
            await pilot.press(key)
            await until(pilot, lambda: app.return_value == 0)

    for key in ("q", "ctrl+c"):
        played(play(key))


def titles(app) -> dict[str, str]:
    """The notes on the screen: title → message."""
    return {note.title: note.message for note in app._notifications}


async def question(app, pilot, key: str) -> str:
    """Press a key of an action; what is asked then, in one line."""
    await until(pilot, lambda: len(app.screen_stack) == 1)
    await pilot.press(key)
    await until(pilot, lambda: isinstance(app.screen, Question) and app.focused is not None and "(n)" in shown(app))
    return re.sub(r"[\s│]+", " ", shown(app))


def test_an_action_says_what_it_does_and_is_asked_for_after_a_yes_only(live, asked):
    says = {"S": ("Saves", "save"), "W": ("keeps its devices", "pause"), "X": ("exit with code 75", "stop")}

    async def play():
        async with opened(live.directory) as (app, pilot):
            for key, (what, word) in says.items():
                text = await question(app, pilot, key)
                assert what in text
                assert "curriculum" in text.split("╭")[1]  # which run
                await pilot.press("enter")  # which means no
                await question(app, pilot, key)
                await pilot.press("escape")
                await question(app, pilot, key)
                assert asked == []
                await pilot.press("y")
                title = f"{word}: done"
                await until(pilot, lambda title=title: title in titles(app))
                assert asked.pop() == [word]
                assert titles(app)[f"{word}: accepted"] == ""
                assert titles(app)[title] == "step 41: as it was asked"
            await question(app, pilot, "S")
            await pilot.press("right", "enter")  # arrows lead to yes as well
            await until(pilot, lambda: asked == [["save"]])

    played(play())


def test_a_stop_tells_the_size_of_what_is_saved_and_what_is_left(live, asked):
    async def play():
        async with opened(live.directory) as (app, pilot):
            text = await question(app, pilot, "X")
            assert "143.1 MiB" in text  # of the checkpoint that was saved last
            assert "360 steps are left" in text

    played(play())


def test_an_evaluation_asks_for_the_dataset_and_tells_its_rows(live, asked):
    async def play():
        async with opened(live.directory) as (app, pilot):
            text = await question(app, pilot, "E")
            assert "1: code, 64 rows" in text and "2: drills, 32 rows" in text
            await pilot.press("2")
            await until(pilot, lambda: "first 32 held-out rows of drills" in shown(app))
            assert "held-out rows of code" not in shown(app)
            await pilot.press("y")
            await until(pilot, lambda: bool(asked))
            assert asked == [["eval", "drills"]]

    played(play())


def test_a_profile_asks_how_many_steps(live, asked):
    typed = {"3": [], "7": ["7"], "12": ["1", "2"], "8": ["5", "backspace", "8"]}

    async def play():
        async with opened(live.directory) as (app, pilot):
            for steps, keys in typed.items():
                await question(app, pilot, "P")
                await pilot.press(*keys, "y")
                await until(pilot, lambda: bool(asked))
                assert asked.pop() == ["profile", steps]
            await question(app, pilot, "P")
            await pilot.press("1", "0", "1", "y")
            await until(pilot, lambda: "not a valid number" in shown(app))
            await pilot.press("backspace", "y")
            await until(pilot, lambda: bool(asked))
            assert asked == [["profile", "10"]]

    played(play())


def test_the_same_key_lets_a_paused_run_go_on(live, asked):
    live.event("control", id="1", command="pause", state="accepted", detail="")
    live.event("control", id="1", command="pause", state="done", detail="")

    async def play():
        async with opened(live.directory) as (app, pilot):
            await until(pilot, lambda: app.live.life.state == "paused")
            assert "Resume" in await question(app, pilot, "W")
            await pilot.press("y")
            await until(pilot, lambda: bool(asked))
            assert asked == [["resume"]]

    played(play())


def test_nothing_is_asked_of_a_run_that_is_over(ended, asked):
    async def play():
        async with opened(ended) as (app, pilot):
            for key in ("S", "E", "P", "W", "X"):
                await pilot.press(key)
                await until(pilot, lambda: len(app._notifications) == 1)
                assert [each.message for each in app._notifications] == ["the run has ended (done)"]
                assert len(app.screen_stack) == 1 and asked == []
                app.clear_notifications()

    played(play())


def test_what_was_started_from_here_is_not_left_by_accident(live, asked):
    async def play():
        async with opened(live.directory, launcher=1) as (app, pilot):
            for key in ("q", "ctrl+c"):
                text = await question(app, pilot, key)
                assert "Leave the dashboard?" in text and "saves a checkpoint" in text
                await pilot.press("enter")  # stays
                await until(pilot, lambda: len(app.screen_stack) == 1)
                assert app.return_value is None
            await question(app, pilot, "ctrl+c")
            await pilot.press("s")
            await until(pilot, lambda: bool(asked))
            assert asked == [["stop"]] and app.return_value is None
            await question(app, pilot, "q")
            await pilot.press("ctrl+c")  # once more: out of here, and nothing is stopped
            await until(pilot, lambda: app.return_value == 0)
            assert asked == [["stop"]]

    played(play())


def test_before_its_first_step_a_run_is_stopped_by_a_signal(tmp_path, monkeypatch, asked):
    sent = []
    monkeypatch.setattr(application.os, "kill", lambda *given: sent.append(given))
    run = made_run(tmp_path / "run", end="starting")

    async def play():
        async with opened(run.directory, launcher=77) as (app, pilot):
            await until(pilot, lambda: app.live.life.state == "starting")
            assert "the run has not started to train, and ends" in await question(app, pilot, "q")
            await pilot.press("s")
            await until(pilot, lambda: bool(sent))
            assert sent == [(77, application.signal.SIGTERM)] and asked == []

    with run.alive():
        played(play())


def test_a_run_that_is_over_is_left_without_a_question(ended):
    async def play():
        async with opened(ended, launcher=1) as (app, pilot):
            await pilot.press("q")
            await until(pilot, lambda: app.return_value == 0)

    played(play())


def test_slash_leads_to_the_events_and_its_filter(ended):
    async def play():
        async with opened(ended) as (app, pilot):
            await pilot.press("slash")
            await until(pilot, lambda: app.visited == "events" and isinstance(app.focused, Input))
            await pilot.press("e", "v", "a", "l")  # which go into the field, not to the application
            await pilot.pause()
            assert app.visited == "events" and len(app.screen_stack) == 1

    played(play())


def test_a_dashboard_somebody_waits_for_cannot_be_put_to_sleep(live):
    app = BoardApp(live.directory, launcher=1)
    assert app.check_action("suspend_process", ()) is False
    assert BoardApp(live.directory).check_action("suspend_process", ()) is True
