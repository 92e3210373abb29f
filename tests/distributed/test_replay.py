"""`xtrain replay`: windows of recorded runs again, bit for bit, and as if documents had never been there."""

import json
from pathlib import Path

import pytest
from checkpoints import folder, same
from forking import ForkedCommand
from projects import Project, curve, events

from xtrain.cli.run_data import RunData

MORE = """
every 4 steps checkpoint
checkpoint { keep = none }
dataset noise { source = synthetic(documents = 40, length = 60, seed = 5) }
mixture { lines = 0.6, noise = 0.4 }
"""


def called(project: Project, *arguments: str) -> tuple[int, str, str]:
    process = ForkedCommand([*arguments], project.folder, project.environment)
    out, err = process.communicate(timeout=240)
    assert process.returncode is not None
    return process.returncode, out, err


def replays(project: Project) -> list[Path]:
    return sorted((project.folder / "runs" / "tiny-replays").iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_window_is_repeated_bit_for_bit_and_without_documents(project: Project, monkeypatch: pytest.MonkeyPatch):
    spec = project.spec(steps=10, more=MORE)
    run = project.run(spec)
    code, out, err = called(project, "replay", "tiny", "--from", "6", "--steps", "3", "--json")
    assert code == 0, err
    assert [json.loads(line)["step"] for line in out.splitlines()] == [6, 7, 8]
    (again,) = replays(project)
    assert curve(again) == curve(run)[4:8]
    assert same(folder(run).path(8), folder(again).path(8))

    # The same call only compares.
    starts = len(events(again, "run_start"))
    code, out, err = called(project, "replay", "tiny", "--from", "6", "--steps", "3")
    assert (code, len(events(again, "run_start"))) == (0, starts), err
    assert "3 recorded steps: equal bit for bit" in out

    # A document that is first trained on in the window.
    monkeypatch.chdir(project.folder)
    (trained,) = RunData(run).runs
    (stretch,) = trained.stretches
    parts = [*stretch.sightings("lines", stretch.prepared["lines"].train_documents)]
    first: dict[int, int] = {}
    for step, document in sorted((s, d) for part in parts for s, d in zip(part.steps, part.documents, strict=True)):
        first.setdefault(int(document), int(step))
    document = next(document for document, step in first.items() if step == 7)
    code, out, err = called(
        project, "replay", "tiny", "--from", "6", "--without", f"data.jsonl:{document + 1}", "--json"
    )
    assert code == 1 and "trained on before" not in err
    less = replays(project)[-1]
    # The run that never had it, from its beginning.
    never = project.run(spec, "--set", f"dataset.lines.without=[{document}]", root="never")
    assert curve(never)[:6] == curve(run)[:6]
    assert curve(less) == curve(never)[4:] != curve(run)[4:]
    assert same(folder(never).path(10), folder(less).path(10))
    assert not same(folder(run).path(10), folder(less).path(10))


WRONG = [
    (("replay", "tiny", "--from", "99"), 2, "step 99 is after the last one of"),
    (("replay", "tiny", "--from", "0"), 2, "`0` is not a number of steps"),
    (("replay", "nothing", "--from", "1"), 3, "there is no run at nothing"),
    (("replay", "tiny", "--from", "2", "--without", "words:3"), 3, "no dataset of this run has a record at words:3"),
    (("replay", "tiny", "--from", "2", "--without", "words#3"), 2, "no dataset `words`; it trains on lines, noise"),
    (("replay", "tiny", "--from", "2", "--without", "lines:4000"), 2, "dataset lines has documents 0 to 399"),
    (("replay", "tiny", "--from", "2", "--without", "lines#9999"), 2, "dataset lines has training rows 0 to"),
    (("replay", "tiny", "--from", "2", "--without", "data.jsonl:999"), 3, "no dataset of this run has a record at"),
    (("replay", "tiny", "--from", "2", "--set", "optimizer.lr=x"), 2, "error["),
    (("seen", "tiny", "--between", "3", "2"), 2, "A is after B"),
    (("seen", "tiny", "--between", "1", "99"), 2, "the model was trained for"),
    (("seen", "tiny", "--ngram", "4"), 2, "--ngram and --field belong to --matching"),
    (("seen", "tiny", "--text", ""), 2, "--text is empty"),
    (("seen", "nothing"), 3, "there is no run at nothing"),
    (("seen", "tiny", "--matching", "tiny.xtrain"), 3, "is not a file of JSON lines"),
    (("seen", "tiny", "--matching", "data.jsonl", "--field", "no"), 3, "the record has no field `no`"),
    (("seen", "."), 3, "neither a run nor a folder that `xtrain export` wrote"),
]


def test_seen_says_when_and_what_is_wrong(project: Project, monkeypatch: pytest.MonkeyPatch):
    spec = project.spec(steps=4, more=MORE)
    run = project.run(spec)
    for arguments, code, words in WRONG:
        if arguments[1] == ".":
            (project.folder / "README.md").write_text("# another\n")
            arguments = ("seen", str(project.folder))
        status, out, err = called(project, *arguments)
        assert (status, words in err) == (code, True), (arguments, status, out, err)

    code, out, err = called(project, "seen", "tiny", "--between", "1", "4", "--json")
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert {one["dataset"] for one in found} == {"lines", "noise"}
    losses = {step: loss for step, loss, _ in curve(run)}
    for one in found:
        assert one["seen"] and all(sight["loss"] == losses[sight["step"]] for sight in one["seen"])
    line = next(one for one in found if one["dataset"] == "lines")
    assert line["origin"] == f"data.jsonl:{line['document'] + 1}"
    code, out, err = called(project, "seen", "tiny", "--document", line["origin"], "--json")
    assert (code, json.loads(out)) == (0, line), err
    # Other data is noticed.
    with (project.folder / "data.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    code, out, err = called(project, "seen", "tiny", "--text", "line 3 ")
    assert code == 3 and "the data differs from the checkpoint's" in err, (out, err)
