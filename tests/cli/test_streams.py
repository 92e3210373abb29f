"""What a command does where its output, or its working folder, is gone."""

import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from xtrain.cli.main import main

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_a_disk_that_is_full():
    """One line, and no trace when the process ends either."""
    command = [sys.executable, "-m", "xtrain", "docs", "launcher"]
    with FULL.open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr == "xtrain docs: the output cannot be written: No space left on device\n"


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(("words", "code"), [("docs launcher", 3), ("plan no.xtrain", 3)])
def test_a_disk_that_takes_no_complaint_either(words: str, code: int):
    """The exit code says it: a sweep stops by that of its trials."""
    command = [sys.executable, "-m", "xtrain", *words.split()]
    with FULL.open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, timeout=60)
    assert done.returncode == code


def test_streams_that_are_closed(monkeypatch):
    """Python has None in their place."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert main(["docs", "launcher"]) == 0
    assert main(["check", "no.xtrain"]) == 2


@pytest.mark.parametrize(
    "words", ["--help", "plan {spec}", "check {spec}", "docs collate", "explain X704", "plan {spec} --json"]
)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_that_lacks_characters(monkeypatch, tmp_path, words, encoding):
    """What it lacks is written as JSON escapes it."""
    spec = tmp_path / "größe → 😀.xtrain"
    spec.write_text(
        (Path(__file__).parents[2] / "specs/quickstart.xtrain").read_text(encoding="utf-8"), encoding="utf-8"
    )

    def said_in(encoding: str) -> str:
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        with suppress(SystemExit):  # of --help
            assert main([word.format(spec=spec) for word in words.split()]) == 0
        out.flush()
        return out.buffer.getvalue().decode(encoding)

    said, whole = said_in(encoding), said_in("utf-8")
    lacking = {letter for letter in whole if (not letter.isascii() and encoding == "ascii") or ord(letter) > 0xFF}
    assert said and [letter for letter in lacking if json.dumps(letter)[1:-1] not in said] == []
    assert ("→" in lacking) == ("{spec}" in words)
    if "--json" in words:
        json.loads(said)


def test_a_working_folder_that_is_gone(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["runs"]) == 3
    assert capsys.readouterr().err == (
        "xtrain: the working folder no longer exists (No such file or directory); change to another\n"
    )
    os.chdir(tmp_path)


@pytest.mark.parametrize(("arguments", "hint"), [
    (["rnu"], "invalid choice: 'rnu'; did you mean `run`?"),
    (["train", "x"], "invalid choice: 'train'; use `run`"),
    (["evaluate", "x"], "invalid choice: 'evaluate'; use `control`"),
    (["checkpoint", "shwo", "x"], "invalid choice: 'shwo'; did you mean `show`?"),
    (["plan", "x", "--wrld=2"], "unrecognized arguments: --wrld=2; did you mean `--world`?"),
    (["plan", "x", "--format", "svg"], "invalid choice: 'svg'; choose from text, json, mermaid, dot"),
])  # fmt: skip
def test_a_word_that_is_wrong_is_answered_with_the_closest(arguments, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.rstrip().endswith(hint)
