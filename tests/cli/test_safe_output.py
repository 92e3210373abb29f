"""Text of others on its way out of a command."""

import json
import sys

import pytest

from xtrain.cli.main import main
from xtrain.text.printing import SafeOutput, drawn_on, harmless, safe_output


@pytest.mark.parametrize(("text", "shown"), [
    ("plain text\n\twith ends", "plain text\n\twith ends"),
    ("ä 中文\u3000\u00a0 👩\u200d🔬", "ä 中文\u3000\u00a0 👩\u200d🔬"),
    ("\x1b[2Jgone", "\\u001b[2Jgone"),
    ("\x1b]0;title\x07", "\\u001b]0;title\\u0007"),
    ("a\rb\x08c\x7f", "a\\u000db\\u0008c\\u007f"),
    ("\x9b2J\x90", "\\u009b2J\\u0090"),
    ("exe\u202etxt\u2066\u200f", "exe\\u202etxt\\u2066\\u200f"),
    ("\x1b[1;31merror\x1b[0m", "\x1b[1;31merror\x1b[0m"),  # a color of our own
    ("\x1b[8mhidden\x1b[38;5;0m", "\\u001b[8mhidden\\u001b[38;5;0m"),
    ("\x1b[1A\x1b[2K", "\\u001b[1A\\u001b[2K"),
    ("", ""),
])  # fmt: skip
def test_what_a_terminal_would_obey_is_shown(text, shown):
    assert harmless(text) == shown


def test_json_stays_what_it_is():
    value = {"name": "\x9b2J\u202e \x1b[2J"}
    assert json.loads(harmless(json.dumps(value, ensure_ascii=False))) == value


def test_streams_are_safe_for_the_time_of_a_command(capsys):
    with safe_output():
        print("\x1b[2J", "out")
        print("\x1b[2J", file=sys.stderr)
        drawn_on(sys.stdout).write("\r\x1b[K")
        assert isinstance(sys.stdout, SafeOutput) and drawn_on(sys.stdout, "plain") is sys.stdout
    found = capsys.readouterr()
    assert found.out == "\\u001b[2J out\n\r\x1b[K" and found.err == "\\u001b[2J\n"
    assert not isinstance(sys.stdout, SafeOutput)


def test_the_formatter_keeps_what_a_file_says(capsys, monkeypatch, tmp_path):
    (tmp_path / "a.xtrain").write_text("# \x1b[2J\n", encoding="utf-8")
    with (tmp_path / "a.xtrain").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["fmt", "-"]) == 0
    assert capsys.readouterr().out == "# \x1b[2J\n"


def test_names_of_files_in_errors(capsys):
    assert main(["check", "no\x1b[2J.xtrain"]) == 2
    assert "\x1b" not in capsys.readouterr().err
