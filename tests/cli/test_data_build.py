"""`xtrain data build`: what it shows, what it leaves when it is interrupted, and what it finds damaged."""

import io
import json
import os
import signal
from pathlib import Path

import pytest

from xtrain.cli.main import main
from xtrain.runtime.feed.tokenizing import tokenize as tokenise
from xtrain.runtime.feed.tokenizing import workers as tokenise_pool

SPEC = """
experiment built { budget = 4 steps, seed = 3 }
model llama { dim = 32, layers = 1, heads = 2 }
tokenizer bytes
dataset words { source = jsonl("*.jsonl"), bad_records = 3 }
dataset others { source = text("*.txt"), holdout = 100% }
batch { sequence = 16, rows = 2 }
optimizer adamw { lr = 1e-3 }
every 2 steps eval others
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        lines = [json.dumps({"text": f"file {number} line {line}"}) for line in range(3)]
        Path(f"{number}.jsonl").write_text("\n".join([*(["{"] if number == 2 else []), *lines, ""]))
    Path("a.txt").write_text("words")
    Path("built.xtrain").write_text(SPEC)
    return "built.xtrain"


def objects(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_all_that_a_run_reads_is_built_once(spec: str, capsys, monkeypatch: pytest.MonkeyPatch):
    assert main(["data", "build", spec, "--json"]) == 0
    words, others = objects(capsys)
    assert (words["dataset"], words["state"], words["files"], words["documents"], words["bad_records"]) == (
        "words", "built", 4, 12, 1
    )  # fmt: skip
    assert others["rows"] == {"training": 0, "hold-out": 1} and words["rows"]["training"] == 12
    assert json.loads(Path(words["bad_records_file"]).read_text())["origin"].endswith("2.jsonl:1")
    assert words["covers"]["source"] == "jsonl" and Path(words["folder"]).name == words["key"]
    monkeypatch.setattr("xtrain.runtime.feed.prepared.pack_rows", None)
    assert main(["data", "stats", spec]) == 0  # nobody packs them anew
    capsys.readouterr()
    assert main(["data", "build", spec, "--json", "--dataset", "words", "--jobs", "1"]) == 0
    (again,) = objects(capsys)
    assert again["state"] == "there" and again["key"] == words["key"]


def test_a_page_for_people(spec: str, capsys):
    assert main(["data", "build", spec]) == 0
    page = capsys.readouterr().out
    assert "\x1b" not in page
    for shown in ("words  jsonl, 4 files", "format 2", '["text"]', "12 of ", "1 bad record, listed in ", "training 12"):
        assert shown in page
    assert main(["data", "build", spec]) == 0
    assert "was there already" in capsys.readouterr().out


def test_damage_is_found_on_request_and_repaired(spec: str, capsys):
    assert main(["data", "build", spec, "--json", "--dataset", "words"]) == 0
    (words,) = objects(capsys)
    tokens = Path(words["folder"]) / "tokens.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(b"\1" + whole[1:])
    assert main(["data", "build", spec, "--json", "--dataset", "words"]) == 0
    assert objects(capsys)[0]["state"] == "there"
    assert main(["data", "build", spec, "--json", "--dataset", "words", "--verify"]) == 0
    captured = capsys.readouterr()
    assert "tokens.bin: damaged; it is rebuilt" in captured.err
    assert json.loads(captured.out)["state"] == "built" and tokens.read_bytes() == whole
    assert main(["data", "build", spec, "--json", "--dataset", "words", "--verify"]) == 0
    assert objects(capsys)[0]["state"] == "there"


@pytest.mark.parametrize(
    "number, status, word",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 75, "stopped"), (signal.SIGHUP, 75, "stopped")],
)
def test_a_build_that_is_stopped_is_gone_on_with(number, status, word, spec: str, capsys, monkeypatch, request):
    monkeypatch.setattr(tokenise, "COMMIT_SECONDS", 1e9)  # nothing but the stop has it kept
    real, units = tokenise_pool.encode_unit, []

    def stopping(source, encoder, unit, dtype):
        units.append(unit.path.name)
        if len(units) == 3:
            os.kill(os.getpid(), number)
        return real(source, encoder, unit, dtype)

    monkeypatch.setattr(tokenise_pool, "encode_unit", stopping)
    # Tests that are started in the background ignore Ctrl-C, and so would the command.
    of_tests = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, of_tests))
    before = [signal.getsignal(other) for other in (signal.SIGTERM, signal.SIGHUP)]
    assert main(["data", "build", spec, "--dataset", "words"]) == status
    assert f"{word}; the finished part is kept" in capsys.readouterr().err
    assert [signal.getsignal(other) for other in (signal.SIGTERM, signal.SIGHUP)] == before
    assert main(["data", "build", spec, "--dataset", "words", "--json"]) == 0
    assert objects(capsys)[0]["state"] == "resumed"
    assert units == ["0.jsonl", "1.jsonl", "2.jsonl", "2.jsonl", "3.jsonl"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("color", [True, False])
def test_a_terminal_gets_a_bar(color: bool, spec: str, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert main(["data", "build", spec, "--dataset", "words"]) == 0
    shown = terminal.getvalue()
    assert "words" in shown and "tokenizing: " in shown and "tokens/s" in shown
    assert ("\x1b[38" in shown or "\x1b[3" in shown) == color


def test_records_that_are_left_out_are_shown(spec: str, capsys):
    for _ in range(2):  # also by a store that is there already
        assert main(["data", "build", spec, "--dataset", "words"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "1 bad record, listed in bad_records.jsonl" in printed and ".jsonl:" in printed


def test_what_cannot_be_built_is_said(spec: str, capsys):
    assert main(["data", "build", spec, "--dataset", "wrds"]) == 2
    assert "no dataset `wrds`; this plan reads words, others" in capsys.readouterr().err
    assert main(["data", "build", spec, "--set", "dataset.words.bad_records=0"]) == 3
    assert "error[X507]: 1 bad record, but the limit is 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "build", spec, "--jobs", "0"])


QUIET = """{%- for m in messages -%}
{%- if m.role != 'developer' -%}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize("lost", ["warn", "error", "allow"])
def test_what_a_template_leaves_out_is_counted(spec: str, lost: str, capsys):
    asked, answered = {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No.", "thinking": "Hm"}
    talks = [[asked, answered], [asked, answered], [asked, {**answered, "thinking": None}]]
    talks += [[{"role": "developer", "content": "Be kind"}, *talks[2]]]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    Path("quiet.jinja").write_text(QUIET)
    dataset = 'source = jsonl("talks.jsonl"), messages = "messages", template = "quiet.jinja", bad_records = 3'
    text = SPEC.replace('source = jsonl("*.jsonl"), bad_records = 3', f"{dataset}, lost = {lost}")
    Path("talks.xtrain").write_text(text.replace("sequence = 16", "sequence = 64"))
    thoughts = {"assistant reasoning_content": 2}
    expected = {"warn": (3, thoughts), "error": (1, {}), "allow": (4, thoughts | {"developer message": 1})}[lost]
    assert main(["data", "build", "talks.xtrain", "--json", "--dataset", "words"]) == 0
    (built,) = objects(capsys)
    assert (built["documents"], built["lost"]) == expected
    reasons = [reason.partition(": message ")[2] for reason in built["first_bad_records"]]
    developer = "1: the template does not write the developer message"
    thought = "2: the template does not write the assistant reasoning_content"
    assert reasons == {"warn": [developer], "error": [thought, thought, developer], "allow": []}[lost]
    assert main(["data", "build", "talks.xtrain", "--dataset", "words"]) == 0
    assert ("assistant reasoning_content in 2 records" in capsys.readouterr().out) == bool(expected[1])
    assert main(["data", "stats", "talks.xtrain", "--json", "--dataset", "words"]) == 0
    assert objects(capsys)[0].get("lost", {}) == expected[1]
    assert main(["data", "stats", "talks.xtrain", "--dataset", "words"]) == 0
    assert ("not written by the template  2  assistant reasoning_content" in capsys.readouterr().out) == bool(
        expected[1]
    )
