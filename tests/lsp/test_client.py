"""The language server as an editor meets it: started as a process, and asked about forty documents, many broken off."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from editor import Editor
from lsprotocol import types as t

from xtrain.dsl.diagnostics.diagnostic import SourceText
from xtrain.lsp.names import KINDS
from xtrain.lsp.spec_server import Positions
from xtrain.planner.load import check_from_spec

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.xtrain"))
GALLERY = ROOT / "tests" / "dsl" / "gallery"
QUICKSTART = (ROOT / "specs" / "quickstart.xtrain").read_text(encoding="utf-8")
# What a line looks like while it is typed.
HALF = [
    "", "m", "model", "model qwen3 {", "model qwen3 {\n  dim =", "model qwen3 {\n  dim = 2 *", "batch { rows = 5",
    "optimizer adamw { lr = 3e", "optimizer adamw { betas = [0.9,", "dataset web { source = jsonl(", 'include "',
    'dataset web { source = jsonl("data/', "every", "every 10", "every 10 steps eval", "on nan(", "let n = (2 +",
    "phase a { mix = { web:", 'tokenizer "assets/', "collate = to_tensor ->", '"""', "}", ")",
    "parallel { fsdp auto { redu",
    'notify("😀', "# 😀 ünd", "experiment x {\n  budget = 100 st\n}\nmodel",
]  # fmt: skip


def documents() -> dict[str, tuple[Path, str]]:
    """Name → (path, text): specs that are right, those of the gallery, and a spec with half a line in its middle."""
    found = {path.stem: (path, path.read_text(encoding="utf-8")) for path in SPECS}
    found |= {
        f"gallery_{path.stem}": (path, path.read_text(encoding="utf-8"))
        for path in sorted(GALLERY.glob("*.xtrain"))[:: len(list(GALLERY.glob("*.xtrain"))) // 6]
    }
    begin, end = QUICKSTART[: len(QUICKSTART) // 2], QUICKSTART[len(QUICKSTART) // 2 :]
    middle = begin.rindex("\n\n")
    head, tail = begin[:middle], begin[middle:] + end
    for number, line in enumerate(HALF):
        found[f"half_{number}"] = (ROOT / "specs" / f"half_{number}.xtrain", f"{head}\n{line}{tail}")
    return found


DOCUMENTS = documents()


@pytest.fixture(scope="module")
def editor():
    session = Editor(ROOT)
    yield session
    session.stop()


def test_there_are_forty_documents_and_some_are_broken():
    assert len(DOCUMENTS) >= 40
    assert sum(check_from_spec(path, (), {str(path): text}).has_errors for path, text in DOCUMENTS.values()) >= 20


def corners(extent: t.Range) -> tuple[int, int, int, int]:
    return extent.start.line, extent.start.character, extent.end.line, extent.end.character


def brief(found: list[t.Diagnostic]) -> list[tuple[str, int, int, int, int]]:
    return [(str(d.code), *corners(d.range)) for d in found]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if place % 3 else ()) for place, name in enumerate(DOCUMENTS)]
)
def test_a_document_has_the_diagnostics_of_check_and_every_question_an_answer(editor: Editor, name: str):
    path, text = DOCUMENTS[name]
    uri = editor.open(path, text)
    found = editor.diagnostics(uri)
    expected = check_from_spec(str(path), (), {str(path): text})
    positions, wanted = Positions("utf-16"), []
    for each in expected:
        if each.span is None:
            wanted.append((each.code, 0, 0, 0, 0))
        elif each.span.source.path == str(path):
            wanted.append((each.code, *corners(positions.extent(each.span))))
    assert brief(found) == wanted
    for each in found:
        assert each.source == "xtrain" and each.code_description and each.message
        page = Path(each.code_description.href.removeprefix("file://"))
        assert str(each.code) in page.read_text(encoding="utf-8")

    source = SourceText(str(path), text)
    words = [match.start() for match in re.finditer(r"\w+", text)]
    for offset in (words[len(words) // 2], len(text)):
        found = positions.position(source, offset)
        place = found.line, found.character
        completions = editor.ask("completion", uri, place)
        assert all(item.text_edit.range.start.line == place[0] for item in completions.items)
        for what in ("hover", "prepare_rename"):
            editor.ask(what, uri, place)
        editor.ask("definition", uri, place)
    if (named := re.search(r"^dataset (\w+)", text, re.MULTILINE)) and not expected.has_errors:
        found = positions.position(source, named.start(1))
        assert found in [each.range.start for each in editor.ask("definition", uri, (found.line, found.character))]
    editor.ask("document_symbol", uri)
    colours(text, editor.ask("semantic_tokens_full", uri).data)
    changed = editor.ask("formatting", uri, options=t.FormattingOptions(2, True))
    here = [d.code for d in expected.errors if d.span is not None and d.span.source.path == str(path)]
    assert not (changed and any(code.startswith("X1") for code in here))
    editor.close(uri)


def colours(text: str, data: list[int]) -> list[tuple[str, str]]:
    """(word, kind) of each token, whose place must lie in the text."""
    lines, line, character, found = text.split("\n"), 0, 0, []
    for down, ahead, width, kind, _ in zip(*[iter(data)] * 5, strict=True):
        line, character = line + down, ahead + (0 if down else character)
        word = lines[line].encode("utf-16-le")[2 * character : 2 * (character + width)].decode("utf-16-le")
        assert word and len(word.encode("utf-16-le")) == 2 * width
        found.append((word, KINDS[kind]))
    return found


def test_diagnostics_follow_every_keystroke(editor: Editor):
    path = ROOT / "specs" / "typed.xtrain"
    uri = editor.open(path, QUICKSTART)
    assert editor.diagnostics(uri) == []
    line = QUICKSTART[: QUICKSTART.index("steps")].count("\n")
    text, typed = QUICKSTART.split("\n"), ""
    for letter in "lrr = 2":
        text[line + 1 : line + 1] = []
        at = t.Position(len(text) - 1, len(typed))
        editor.change(uri, letter, t.Range(at, at))
        typed += letter
        expected = check_from_spec(str(path), (), {str(path): QUICKSTART + typed})
        assert [d.code for d in editor.diagnostics(uri)] == [d.code for d in expected], typed
    editor.change(uri, QUICKSTART)
    assert editor.diagnostics(uri) == []
    editor.close(uri)


def test_lines_end_where_those_of_the_protocol_end(editor: Editor):
    """A form feed and U+2028 end no line, an emoji has two units, and `\\r\\n` and `\\r` are line ends."""
    path = ROOT / "specs" / "odd name%.xtrain"
    text = "# a\u2028b\x0cc😀\r\nlet n = 3\rlet m = n # ü\n" + QUICKSTART.replace("300 steps", "n * m * 1 step")
    uri = editor.open(path, text)
    assert "%20" in uri and {d.code for d in editor.diagnostics(uri)} == {"W601"}
    editor.change(uri, "\x0b!", t.Range(t.Position(0, 6), t.Position(0, 8)))  # the emoji, behind a form feed
    editor.change(uri, "7", t.Range(t.Position(1, 8), t.Position(1, 9)))
    editor.change(uri, "m", t.Range(t.Position(2, 8), t.Position(2, 999)))
    text = text.replace("😀", "\x0b!").replace("n = 3", "n = 7").replace("n # ü", "m")  # defined by itself: an error
    expected = check_from_spec(str(path), (), {str(path): text})
    extents = [(d.code, Positions().extent(d.span)) for d in expected if d.span]
    assert brief(editor.diagnostics(uri)) == [(code, *corners(each)) for code, each in extents]
    assert expected.has_errors
    editor.close(uri)


def test_a_text_that_is_not_open_can_be_changed_and_closed(editor: Editor):
    uri = (ROOT / "specs" / "never_opened.xtrain").as_uri()
    editor.versions[uri] = 1
    editor.change(uri, "model {")
    editor.close(uri)
    assert editor.ask("document_symbol", uri) == [] and not editor.client.messages


def test_an_included_file_is_read_as_part_of_its_spec(editor: Editor, tmp_path: Path):
    base, spec = tmp_path / "base.xtrain", tmp_path / "main.xtrain"
    base.write_text("let width = 64\nmodel qwen3 { dim = width, layers = 1, heads = 1 }\ntokenizer bytes\n")
    spec.write_text(
        'include "base.xtrain"\nexperiment e { budget = 5 steps }\ndataset web { source = synthetic() }\n'
        "batch { sequence = 64 }\noptimizer adamw { lr = 1e-3 }\n"
    )
    uri = editor.open(base, base.read_text())
    assert editor.diagnostics(uri) == []  # on its own it would lack four blocks
    editor.change(uri, base.read_text().replace("dim", "dmi"))
    assert [d.code for d in editor.diagnostics(uri)] == ["X203"]
    above = editor.open(spec, spec.read_text())
    assert editor.diagnostics(above) == []  # what is wrong stands in the other file
    (there,) = editor.ask("definition", above, (0, 12))
    assert there.uri == uri and there.range.start == t.Position(0, 0)
    editor.change(uri, base.read_text())
    assert editor.diagnostics(uri) == []
    for each in (uri, above):
        editor.close(each)


def test_a_session_ends_without_a_word():
    """Told to exit as the protocol says, or left alone."""
    initialize = {"processId": None, "rootUri": None, "capabilities": {}}
    told = [{"id": 1, "method": "initialize", "params": initialize}, {"method": "initialized", "params": {}}]
    goodbye = [{"id": 2, "method": "shutdown"}, {"method": "exit"}]
    for messages in ([*told, *goodbye], told):
        texts = [json.dumps({"jsonrpc": "2.0", **each}) for each in messages]
        sent = "".join(f"Content-Length: {len(each)}\r\n\r\n{each}" for each in texts)
        command = [sys.executable, "-m", "xtrain", "lsp"]
        done = subprocess.run(command, input=sent, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert '"serverInfo": {"name": "xtrain", "version": "' in done.stdout


def test_hover_and_hints_come_from_the_plan(editor: Editor):
    path = ROOT / "specs" / "llama_8b_64gpu.xtrain"
    text = path.read_text(encoding="utf-8")
    uri = editor.open(path, text)
    line = text[: text.index("rows = 512")].count("\n")
    shown = editor.ask("hover", uri, (line, 3)).contents.value
    assert "**batch.rows: 512** → 4.19M tokens a step · " in shown and "GiB a rank" in shown
    hints = editor.ask("inlay_hint", uri, range=t.Range(t.Position(0, 0), t.Position(200, 0)))
    assert " = 64" in [hint.label for hint in hints]  # behind `fsdp auto`
    editor.close(uri)


def test_an_answer_to_every_request_that_changes_a_text(editor: Editor):
    path = ROOT / "specs" / "changed.xtrain"
    text = "let n = 3\n" + QUICKSTART.replace("dataset stdlib", "dataset  stdlib").replace("budget = ", "budgt = ")
    uri = editor.open(path, text)
    (wrong, *_) = [d for d in editor.diagnostics(uri) if d.code == "X203"]
    context = t.CodeActionContext(diagnostics=[wrong])
    actions = editor.ask("code_action", uri, range=wrong.range, context=context)
    assert {action.kind for action in actions} >= {t.CodeActionKind.QuickFix, t.CodeActionKind.SourceFixAll}
    (edit,) = actions[0].edit.changes[uri]
    assert edit.new_text == "budget" and edit.range == wrong.range
    line = text[: text.index("stdlib {")].count("\n")
    assert editor.ask("prepare_rename", uri, (line, 10)) is not None
    changed = editor.ask("rename", uri, (line, 10), new_name="files").changes[uri]
    assert len(changed) == len(editor.ask("references", uri, (line, 10), context=t.ReferenceContext(True))) > 1
    (whole,) = editor.ask("formatting", uri, options=t.FormattingOptions(2, True))
    assert "dataset stdlib {" in whole.new_text
    assert editor.ask("rename", uri, (line, 10), new_name="a/b") is None
    editor.close(uri)
