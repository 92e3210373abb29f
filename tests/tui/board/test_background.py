"""The question for the terminal's background color: all forms of answers, silence, and what is left on the terminal."""

import os
import select
import termios
import threading
import time
from contextlib import contextmanager

import pytest

from xtrain.tui.board.app import first_theme
from xtrain.tui.board.terminal import Terminal

DEVICE = b"\x1b[?62;22c"


@contextmanager
def terminal(*answers):
    """A terminal that takes the question and sends pieces of an answer; yields it, its keyboard and what it got."""
    keyboard, screen = os.openpty()
    got = []

    def answer():
        if select.select([keyboard], [], [], 5)[0]:
            got.append(os.read(keyboard, 1024))
        for piece in answers:
            os.write(keyboard, piece)
            time.sleep(0.02)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield Terminal(screen), keyboard, got
    finally:
        thread.join()
        os.close(screen)
        os.close(keyboard)


@pytest.fixture(autouse=True)
def term(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(("answers", "light"), [
    ([b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\", DEVICE], True),
    ([b"\x1b]11;rgb:1e1e/1e1e/2e2e\x07" + DEVICE], False),
    ([b"\x1b]11;rgb:fd/f6/e3\x07" + DEVICE], True),
    ([b"\x1b]11;rgba:0000/2b2b/3636/ffff\x1b\\" + DEVICE], False),
    ([b"\x1b]11;rgb:ff", b"ff/ffff/ff", b"ff\x1b", b"\\\x1b[?6", b"2c"], True),  # in pieces
    ([b"x\x1b]11;rgb:0/f/0\x07" + DEVICE], True),  # after a key, with one digit
    ([DEVICE], None),  # it knows no colors
    ([b"\x1b]11;rgb:zz/zz/zz\x07" + DEVICE], None),
])  # fmt: skip
def test_answers(answers, light):
    with terminal(*answers) as (asked, keyboard, got):
        before = termios.tcgetattr(keyboard)
        began = time.monotonic()
        assert asked.is_light(seconds=20) is light
        assert time.monotonic() - began < 10  # the second answer ends the wait
        assert termios.tcgetattr(keyboard) == before
        assert got == [b"\x1b]11;?\x1b\\\x1b[c"]
        assert not select.select([keyboard], [], [], 0.05)[0]  # nothing of the answer is echoed


def test_silence():
    with terminal() as (asked, keyboard, _):
        before, began = termios.tcgetattr(keyboard), time.monotonic()
        assert asked.is_light(seconds=0.1) is None
        assert 0.1 <= time.monotonic() - began < 5
        assert termios.tcgetattr(keyboard) == before


@pytest.mark.parametrize("name", ["dumb", "linux", "vt100", None])
def test_a_terminal_that_would_print_the_question_is_not_asked(monkeypatch, name):
    monkeypatch.setenv("TERM", name) if name else monkeypatch.delenv("TERM")
    keyboard, screen = os.openpty()
    assert Terminal(screen).is_light() is None
    assert not select.select([keyboard], [], [], 0)[0]
    os.close(keyboard)
    assert Terminal(screen).is_light() is None  # it is gone
    os.close(screen)


def test_a_terminal_that_takes_nothing():
    keyboard, screen = os.openpty()
    os.set_blocking(screen, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(screen, b"x" * 4096)
    began = time.monotonic()
    assert Terminal(screen).is_light(seconds=0.1) is None
    assert time.monotonic() - began < 5
    os.close(screen)
    os.close(keyboard)


@pytest.mark.parametrize(("light", "ground", "theme"), [
    (True, "15;0", "light"), (False, "0;15", "dark"), (None, "0;15", "light"),
])  # fmt: skip
def test_the_answer_counts_more_than_the_environment(tmp_path, monkeypatch, light, ground, theme):
    monkeypatch.setenv("COLORFGBG", ground)
    assert first_theme(tmp_path / "theme", light) == theme
    (tmp_path / "theme").write_text("contrast")
    assert first_theme(tmp_path / "theme", light) == "contrast"
