"""`xtrain replay`: windows of recorded runs again, bit for bit, and as if documents had never been there."""

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from checkpoints import folder, same
from commands import xtrain
from forking import ForkedCommand
from projects import Project, called, curve, events

from xtrain.cli import replay
from xtrain.cli.main import main
from xtrain.cli.run_data import RunData
from xtrain.plan.serialise import dumps
from xtrain.planner.load import plan_from_path
from xtrain.records.law import Coefficients, ScalingLaw
from xtrain.runtime.feed.sightings import Stretch
from xtrain.runtime.jobs.replay import ReplayWindow
from xtrain.runtime.store.history import changed_within

MORE = """
every 4 steps checkpoint
checkpoint { keep = none }
dataset noise { source = synthetic(documents = 40, length = 60, seed = 5) }
mixture { lines = 0.6, noise = 0.4 }
"""


def replays(project: Project) -> list[Path]:
    folder = project.folder / "runs" / "tiny-replays"
    return sorted(filter(Path.is_dir, folder.iterdir()), key=lambda path: path.stat().st_mtime)


def refused(project: Project, arguments: Sequence[str], code: int, words: str) -> None:
    """By the command in this process: nothing is started."""
    done = xtrain(*arguments, cwd=project.folder)
    assert (done.returncode, words in done.stderr) == (code, True), (arguments, done)


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
    document = documents_first_seen(run, 7)[0]
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


@pytest.mark.slow
def test_a_replay_has_the_initial_weights_of_its_run_as_reference(project: Project):
    pairs = [{"chosen": "yes " * (1 + i % 7), "rejected": f"no {i} " * (1 + i % 4)} for i in range(60)]
    (project.folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    more = "loss dpo { beta = 0.5, reference = initial }\nevery 2 steps checkpoint\ncheckpoint { keep = none }"
    spec = project.spec(steps=6, more=more)
    path = project.folder / spec
    answers = 'jsonl("data.jsonl"), chosen = "chosen", rejected = "rejected"'
    path.write_text(path.read_text().replace('jsonl("data.jsonl")', answers))
    run = project.run(spec)
    code, out, err = called(project, "replay", "tiny", "--from", "5")
    assert code == 0 and "2 recorded steps: equal bit for bit" in out, err
    changed = ("--set", "experiment.seed=4", "--set", f'checkpoint.from="{run}"')
    refused = project.start(spec, *changed, "--ui", "none").communicate(timeout=240)[1]
    assert "X444" in refused


OUTSIDE = """
launch { certificate = required }
on start notify("echo start >> mails.txt")
every 2 steps notify("echo tick >> mails.txt") then checkpoint
on finish notify("echo finish >> mails.txt") then export { to = "model" }
"""


def test_a_replay_notifies_nobody_and_writes_only_its_own_directory(project: Project):
    project.run(project.spec(steps=4, more=OUTSIDE), "--set", "launch.certificate=none")
    mails, export = project.folder / "mails.txt", project.folder / "model"
    assert mails.read_text().split() == ["start", "tick", "tick", "finish"]
    export.rename(project.folder / "moved")
    code, out, err = called(project, "replay", "tiny", "--from", "3")
    assert (code, "2 recorded steps: equal bit for bit" in out) == (0, True), err
    (again,) = replays(project)
    assert folder(again).path(4).is_dir()  # the other actions of a tick are kept
    assert len(mails.read_text().split()) == 4 and not export.exists()


WRONG = [
    (("replay", "tiny", "--from", "99"), 2, "step 99 is after the last one of"),
    (("replay", "tiny", "--from", "0"), 2, "`0` is not a number of steps"),
    (("replay", "nothing", "--from", "1"), 3, "there is no run at nothing"),
    (("replay", "tiny", "--from", "2", "--without", "words:3"), 3, "no dataset of this run has a record at `words:3`"),
    (("replay", "tiny", "--from", "2", "--without", "words#3"), 2, "no dataset `words`; it trains on lines, noise"),
    (("replay", "tiny", "--from", "2", "--without", "lines:4000"), 2, "dataset lines has documents 0 to 399"),
    (("replay", "tiny", "--from", "2", "--without", "lines#9999"), 2, "dataset lines has training rows 0 to"),
    (("replay", "tiny", "--from", "2", "--without", "data.jsonl:999"), 3, "no dataset of this run has a record at"),
    (("replay", "tiny", "--from", "2", "--set", "optimizer.lr=x"), 2, "error["),
    (("replay", "tiny", "--from", "2", "--set", "no.setting=1"), 2, "there is no block `no`"),
    (("replay", "tiny", "--from", "2", "--without", ""), 3, "has a record at ``"),
    (("replay", "tiny.xtrain", "--from", "2"), 3, "there is no run at tiny.xtrain"),
    (("seen", "tiny", "--between", "3", "2"), 2, "A is after B"),
    (("seen", "tiny", "--between", "1", "99"), 2, "the model was trained for"),
    (("seen", "tiny", "--ngram", "4"), 2, "--ngram and --field belong to --matching"),
    (("seen", "tiny", "--text", ""), 2, "--text is empty"),
    (("seen", "nothing"), 3, "there is no run at nothing"),
    (("seen", "tiny", "--matching", "tiny.xtrain"), 3, "tiny.xtrain: it is not a file of JSON lines"),
    (("seen", "tiny", "--matching", "none.jsonl"), 3, "none.jsonl: cannot be read: No such file"),
    (("seen", "tiny", "--matching", "empty.jsonl"), 3, "empty.jsonl: it has no records"),
    (("seen", "tiny", "--matching", "data.jsonl", "--ngram", "0"), 2, "`0` is not a number of words"),
    (("seen", "tiny", "--document", "lines:-1"), 3, "has a record at `lines:-1`"),
    (("seen", "tiny", "--matching", "data.jsonl", "--field", "no"), 3, "the record has no field `no`"),
    (("seen", "."), 3, "neither a run nor a folder that `xtrain export` wrote"),
]


def test_seen_says_when_and_what_is_wrong(project: Project, monkeypatch: pytest.MonkeyPatch):
    spec = project.spec(steps=4, more=MORE)
    run = project.run(spec)
    (project.folder / "empty.jsonl").touch()
    for arguments, code, words in WRONG:
        if arguments[1] == ".":
            (project.folder / "README.md").write_text("# another\n")
            arguments = ("seen", str(project.folder))
        refused(project, arguments, code, words)

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
    code, out, err = called(project, "seen", "tiny", "--text", f"line {line['document']} ", "--json")
    assert (code, json.loads(out)) == (0, line), err
    words = ({"q": f"so line {line['document']}"}, {"q": "line of nothing"}, {"q": "alone"})
    (project.folder / "bench.jsonl").write_text("".join(json.dumps(each) + "\n" for each in words))
    code, out, err = called(project, "seen", "tiny", "--matching", "bench.jsonl", "--ngram", "2", "--json")
    shared = {"dataset": "lines", "document": line["document"], "ngrams": 1}
    assert (code, json.loads(out)) == (0, {"record": 1, "ngrams": 2, "documents": [shared]}), err
    code, out, err = called(project, "seen", "tiny", "--matching", "bench.jsonl", "--ngram", "2")
    assert code == 0 and "1 of 3 records share 2 words with a document that was trained on" in out, (out, err)
    assert (
        "1 record with fewer than 2 words" in out
        and f"bench.jsonl:1  50% of its n-grams  in lines:{line['document']}" in out
    )
    code, out, err = called(project, "seen", "tiny", "--matching", "bench.jsonl", "--ngram", "3")
    assert code == 1 and "0 of 3 records share 3 words" in out, (out, err)
    # Other data is noticed.
    with (project.folder / "data.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    code, out, err = called(project, "seen", "tiny", "--text", "line 3 ")
    assert code == 3 and "the data differs from the checkpoint's" in err, (out, err)


DAMAGED = [b'{"spec": "tiny', bytes(range(256)), b"[]", b"{}", None]


@pytest.mark.parametrize("content", DAMAGED, ids=["cut", "binary", "a list", "empty", "absent"])
def test_a_damaged_plan_of_a_run_is_named(project: Project, content: bytes | None):
    for name in ("one", "two"):
        run = project.folder / "runs" / "tiny" / name
        run.mkdir(parents=True)
        lines = [{"step": step, "time": 1.0, "loss": 3.0 + 0.1 * (step % 2)} for step in range(1, 9)]
        lines[-1]["loss"] = 9.0 if name == "one" else 8.0
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if content is not None:
            (run / "plan.json").write_bytes(content)
    words = "there is no run at one" if content is None else "error[X704]"
    for arguments in (
        ("replay", "one", "--from", "8"), ("blame", "one", "--step", "8"), ("bisect", "one", "two"), ("seen", "one"),
        ("forget", "one", "lines:3"),
    ):  # fmt: skip
        refused(project, arguments, 3, words)


def documents_first_seen(run: Path, step: int) -> list[int]:
    """Documents of `lines` that the run trains on first in a step. In its working folder."""
    (trained,) = RunData(run).runs
    (stretch,) = trained.stretches
    parts = [*stretch.sightings("lines", stretch.prepared["lines"].train_documents)]
    first: dict[int, int] = {}
    for at, document in sorted((s, d) for part in parts for s, d in zip(part.steps, part.documents, strict=True)):
        first.setdefault(int(document), int(at))
    return [document for document, at in first.items() if at == step]


@pytest.mark.parametrize("moments", [(), pytest.param([n / 2 for n in range(1, 11)], marks=pytest.mark.slow)])
def test_what_is_forgotten_was_never_seen(project: Project, monkeypatch: pytest.MonkeyPatch, moments: list[float]):
    spec = project.spec(steps=10, more=MORE)
    run = project.run(spec)
    monkeypatch.chdir(project.folder)
    one, other = documents_first_seen(run, 7)[:2]
    given = (f"data.jsonl:{one + 1}", f"lines:{other}")
    for seconds in moments:
        killed(project, seconds, "forget", "tiny", *given)
    code, out, err = called(project, "forget", "tiny", *given, "--json")
    assert code == 0, err
    said, (less,) = json.loads(out), replays(project)
    assert said == json.loads((less / "forgotten.json").read_text())
    assert (said["first_step"], said["from_checkpoint"]["name"]) == (7, folder(run).path(4).name)
    assert said["documents"] == {"lines": {str(each): f"data.jsonl:{each + 1}" for each in (one, other)}}
    never = project.run(spec, "--set", f"dataset.lines.without=[{one}, {other}]", root="never")
    assert curve(less) == curve(never)[4:] != curve(run)[4:]
    assert same(folder(never).path(10), folder(less).path(10))
    code, out, err = called(project, "seen", str(less), "--document", given[0])
    assert code == 1, out
    code, out, err = called(project, "forget", str(less), *given)
    assert (code, "there is nothing to forget" in out) == (1, True), err


UNFORGOTTEN = [
    (("forget", "one", "lines:4000"), 2, "dataset lines has documents 0 to 399"),
    (("forget", "one", "none.jsonl:1"), 3, "no dataset of this run has a record at `none.jsonl:1`"),
    (("forget", "one"), 2, "the following arguments are required: DOCUMENT"),
    (("forget", "none", "lines:1"), 3, "there is no run at none"),
    (("forget", "one", "DOCUMENT"), 3, "the run was resumed with another plan, or rolled back, at step 4"),
    (("forget", "two", "DOCUMENT"), 3, "which saw them in step 2; forget them there"),
]


def test_what_cannot_be_forgotten_exactly_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch, capsys):
    spec = project.spec(steps=8, more="every 4 steps checkpoint\ncheckpoint { keep = none }")
    for name, *sets in (
        ("one", "launch.stop_at=4 steps"),
        ("one", "batch.rows=4"),
        ("two", 'checkpoint.pretrained="runs/tiny/one"', "experiment.budget=2 steps"),
    ):
        words = [word for text in (f'workspace.run="{name}"', *sets) for word in ("--set", text)]
        project.start(spec, *words, "--ui", "none").communicate(timeout=240)
    monkeypatch.chdir(project.folder)
    (trained,) = RunData(project.folder / "runs" / "tiny" / "one").runs
    parts = [*trained.stretches[0].sightings("lines", trained.stretches[0].prepared["lines"].train_documents)]
    steps = {int(d): int(s) for part in parts for s, d in zip(part.steps[::-1], part.documents[::-1], strict=True)}
    document = next(each for each, step in steps.items() if step == 2)
    for arguments, code, words in UNFORGOTTEN:
        refused(project, [each.replace("DOCUMENT", f"lines:{document}") for each in arguments], code, words)
    parts = trained.stretches[1].sightings("lines", trained.stretches[1].prepared["lines"].train_documents)
    late = min({document for part in parts for document in part.documents.tolist()} - steps.keys())
    monkeypatch.setattr(ReplayWindow, "unchanged", lambda self: False)
    assert main(["forget", "one", f"lines:{late}"]) == 3
    assert "makes another plan of the recorded spec" in capsys.readouterr().err


@pytest.mark.parametrize(("last", "shown"), [
    (2, []),
    (3, ["lines:3: "]),
    (7, ["lines:3, lines:4, lines:5, lines:6, lines:7: "]),
    (9, ["lines:3, lines:4, lines:5, lines:6, lines:7 and 2 more: "]),
])  # fmt: skip
def test_documents_trained_on_before_the_window_are_named(last: int, shown: list[str]):
    """Documents 3 to `last` of `lines`, twice, and none of `sums`, which that run did not have."""
    seen = SimpleNamespace(documents=np.arange(3, last + 1))
    stretch = SimpleNamespace(prepared={"lines": None}, sightings=lambda name, documents: [seen, seen])
    runs: Any = [SimpleNamespace(stretches=[stretch]), SimpleNamespace(stretches=[])]
    removed = {"lines": np.arange(10), "sums": np.arange(2)}
    found = replay._seen_before(runs, removed, cast("Any", SimpleNamespace(begin=1200)))
    assert [text.partition("trained")[0] for text in found] == shown
    assert all("before the checkpoint of step 1,200, which the replay begins with" in text for text in found)


# Documents that cause a spike ----------------------------------------------------------------------------------------

SPIKY = """
experiment tiny { seed = 25, budget = 28 steps }
model qwen3 { dim = 32, layers = 1, heads = 4, kv_heads = 2, ffn = 48, tie_embeddings = true, init_std = 0.1 }
tokenizer bytes
dataset lines { source = jsonl("data.jsonl"), holdout = 10% }
dataset sums { source = jsonl("sums.jsonl") }
mixture { lines = 0.5, sums = 0.5 }
batch { sequence = 64, micro = 2, rows = 8 }
optimizer adamw { lr = 1e-2 }
scheduler cosine { warmup = 10%, floor = 10% }
every 1 step log
every 12 steps checkpoint
checkpoint { keep = none }
"""
POISON = (40, 131, 222)
"""Documents of random characters; the last two are in different rows of step 26."""


@pytest.fixture(params=["", pytest.param("parallel { fsdp 2 }", marks=pytest.mark.slow)], ids=["one rank", "fsdp 2"])
def spiky(project: Project, request: pytest.FixtureRequest) -> tuple[Project, Path]:
    sums = [{"text": f"{i} + {i + 7} = {2 * i + 7}; " * (1 + i % 4)} for i in range(300)]
    drawn = random.Random(1)
    for document in POISON:
        sums[document] = {"text": "".join(chr(drawn.randrange(0x4E00, 0x9FFF)) for _ in range(21))}
    (project.folder / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sums))
    (project.folder / "tiny.xtrain").write_text(SPIKY + request.param)
    return project, project.run("tiny.xtrain")


NO_SPIKE = [
    (("blame", "tiny"), 2, "give the step of the spike"),
    (("blame", "tiny", "--step", "26", "--alert", "1"), 2, "give the step of the spike"),
    (("blame", "tiny", "--step", "20"), 2, "step 20 is no spike: its loss is"),
    (("blame", "tiny", "--step", "2"), 3, "the usual loss is unknown"),
    (("blame", "tiny", "--step", "99"), 2, "step 99 is after the last one of"),
    (("blame", "tiny", "--step", "26", "--from", "27"), 2, "--from 27 is after the spike"),
    (("blame", "tiny", "--alert", "7"), 2, "has raised"),
]


def test_planted_documents_are_named_and_the_rest_is_the_run_that_never_had_them(spiky: tuple[Project, Path]):
    project, run = spiky
    for arguments, code, words in NO_SPIKE:
        refused(project, arguments, code, words)
    code, out, err = called(project, "blame", "tiny", "--step", "26", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [(one["dataset"], one["document"], one["origin"]) for one in found["documents"]] == [
        ("sums", 131, "sums.jsonl:132"), ("sums", 222, "sums.jsonl:223"),
    ]  # fmt: skip
    assert found["without"] <= found["limit"] < found["value"]
    # The losses of rows add up to those of steps.
    rows = [each for each in replays(project) if events(each, "row_losses")]
    sums = {one["step"]: sum(one["losses"]) / sum(one["tokens"]) for one in events(rows[0], "row_losses")}
    assert len(rows) == 1 and sums == pytest.approx({step: loss for step, loss, _ in curve(run) if step in sums})
    # The run that never had them, from its first step.
    never = project.run("tiny.xtrain", "--set", "dataset.sums.without=[131, 222]", root="never")
    assert curve(never)[:25] == curve(run)[:25]
    assert [each["without"] for each in found["curve"]] == [loss for _, loss, _ in curve(never)[24:26]]
    code, _, err = called(
        project, "replay", "tiny", "--from", "26", "--without", "sums:131", "--without", "sums:222", "--json"
    )
    assert code == 1, err
    less = replays(project)[-1]
    assert curve(less) == curve(never)[24:] != curve(run)[24:]
    assert same(folder(never).path(28), folder(less).path(28))


# Killed commands ------------------------------------------------------------------------------------------------------


def killed(project: Project, seconds: float, *arguments: str) -> bool:
    """Kill a command after a time; False if it had ended."""
    process = ForkedCommand([*arguments], project.folder, project.environment)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        return True
    return False


@pytest.mark.parametrize(
    "moments", [(1.5,), pytest.param((0.2, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 8), marks=pytest.mark.slow)]
)
def test_a_killed_replay_is_resumed_by_the_same_call(project: Project, moments: tuple[float, ...]):
    run = project.run(project.spec(steps=12, more="every 2 steps checkpoint\ncheckpoint { keep = none }"))
    arguments = ("replay", "tiny", "--from", "4", "--json", "--set", "optimizer.lr=1e-3")
    for seconds in moments:
        killed(project, seconds, *arguments)
    code, out, err = called(project, *arguments)
    assert code == 1 and [json.loads(line)["step"] for line in out.splitlines()] == [*range(4, 13)], err
    (again,) = replays(project)
    assert [step for step, *_ in curve(again)] == [*range(3, 13)]
    whole = project.run("tiny.xtrain", *_from(run, 2), root="whole")
    assert curve(whole) == curve(again)


def _from(run: Path, step: int) -> list[str]:
    return ["--set", "optimizer.lr=1e-3", "--set", f'checkpoint.from="{folder(run).path(step)}"']


@pytest.mark.slow
def test_a_killed_search_goes_on_where_it_was(spiky: tuple[Project, Path]):
    project, _ = spiky
    drawn = random.Random(2)
    for _ in range(10):
        killed(project, drawn.uniform(0.2, 8), "blame", "tiny", "--step", "26", "--json")
    code, out, err = called(project, "blame", "tiny", "--step", "26", "--json")
    assert code == 0, err
    assert [one["document"] for one in json.loads(out)["documents"]] == [131, 222]


PROVE, SEEN = ("prove", "tiny.xtrain", "--json"), ("seen", "tiny", "--between", "1", "4", "--json")
CALIBRATE = ("calibrate", "root0", "root1", "root2", "root3", "--out", "calibration.json", "--json")

APPROVE = ("approve", "tiny.xtrain", "--by", "ann", "--key", "key")
SOLVE = ("solve", "tiny.xtrain", "--budget", "1", "--law", "law.json", "--json", "--size", "model.dim=32", "--size",
         "model.dim=64")  # fmt: skip
LAW = Coefficients(E=1.5, A=20.0, B=300.0, alpha=0.3, beta=0.3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arguments", [PROVE, SEEN, CALIBRATE, APPROVE, SOLVE], ids=lambda arguments: arguments[0])
def test_other_killed_commands_leave_nothing(project: Project, arguments: tuple[str, ...]):
    """They have no parts to resume: the same call does all of it, and finds nothing of a killed one in its way."""
    machines = "nodes = 1, devices = 2, price = 3, flops = 0.1T, link = 1 GiB, network = 1 GiB, memory = 8 GiB"
    spec = project.spec(steps=4, more=f"{MORE}\ncluster cpu {{ {machines} }}")
    if arguments[0] == "calibrate":
        for number in range(4):
            project.run(spec, "--set", f"batch.sequence={16 * 2**number}", root=f"root{number}")
    elif arguments[0] == "seen":
        project.run(spec)
    elif arguments[0] == "solve":
        ScalingLaw(metric="eval.lines.loss", runs=9, fitted=LAW, samples=(LAW, LAW), parameters=(1e4, 1e6),
                   tokens=(1e5, 1e7), error=0.01).write(project.folder / "law.json")  # fmt: skip
    elif arguments[0] == "approve":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", project.folder / "key"], check=True)
    drawn = random.Random(arguments[0])
    longest = 2 if arguments in (APPROVE, SOLVE) else 6
    whole = [killed(project, drawn.uniform(0.2, longest), *arguments) for _ in range(10)]
    assert any(whole)
    code, out, err = called(project, *arguments)
    assert code == 0, err
    again = called(project, *arguments)[1]
    timeless = [re.sub(r'"(seconds|digest)": [^,]*', "", text) for text in (out, again)]
    assert timeless[0] == timeless[1]
    left = [path.name for path in project.folder.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    assert left == []


# Runs of several starts -----------------------------------------------------------------------------------------------


def rows_seen(project: Project, model: str) -> list[tuple[str, int]]:
    """(run, rows trained on) as `seen` says."""
    code, out, err = called(project, "seen", model, "--json")
    assert code == 0, err
    return [(Path(one["run"]).name, one["rows"]) for one in map(json.loads, out.splitlines())]


def test_resumes_and_runs_that_a_model_began_with_are_followed(project: Project):
    spec = project.spec(steps=8, more="every 4 steps checkpoint\ncheckpoint { keep = none }")

    def train(name: str, *sets: str) -> None:
        arguments = (spec, *(word for text in (f'workspace.run="{name}"', *sets) for word in ("--set", text)))
        project.start(*arguments, "--ui", "none").communicate(timeout=240)

    train("one", "launch.stop_at=4 steps")
    train("one", "batch.rows=4")
    train("two", 'checkpoint.from="runs/tiny/one"', "experiment.budget=10 steps")
    train("three", 'checkpoint.pretrained="runs/tiny/one"', "experiment.budget=2 steps")
    assert rows_seen(project, "one") == [("one", 4 * 8 + 4 * 4)]
    assert rows_seen(project, "two") == [("two", 4 * 8 + 4 * 4 + 2 * 8)]
    assert rows_seen(project, "three") == [("one", 4 * 8 + 4 * 4), ("three", 2 * 8)]


WRITES_ROWS = """
import json
from xtrain import RunContext, hook

@hook("before_step")
def written(context: RunContext):
    with open(f"rows.{context.rank.rank}.jsonl", "a") as file:
        for batch in context.rows:
            for ids_S, real_S in zip(batch.input_ids_BS, batch.real_BS):
                print(json.dumps([context.step, ids_S[real_S].tolist()]), file=file)
"""
OF_SEVERAL = """
use "hooks.py"
hook written
dataset noise { source = synthetic(documents = 40, length = 60, seed = 5) }
mixture { lines = 0.6, noise = 0.4 }
phase drill { from = 5 steps, mix = { noise: 2 } }
"""
FEEDS = {
    "ramp": ("batch { ramp_from = 4, ramp = 6 steps }", "mixture.lines=0.3", ()),
    "workers": (
        "batch { workers = 2 }\nparallel { fsdp 2 }\ncollate = to_tensor -> flatten -> shift_tokens -> pack(best_fit)",
        "batch.rows=4",
        pytest.mark.slow,
    ),
}


@pytest.mark.parametrize(
    ("more", "changed"), [pytest.param(*given, marks=mark, id=name) for name, (*given, mark) in FEEDS.items()]
)
def test_rows_are_those_that_the_steps_took(project: Project, monkeypatch: pytest.MonkeyPatch, more: str, changed: str):
    (project.folder / "hooks.py").write_text(WRITES_ROWS)
    spec = project.spec(steps=10, more=OF_SEVERAL + more)
    for sets in (["launch.stop_at=4 steps"], [changed]):
        texts = ('workspace.run="one"', *sets)
        project.start(spec, *(word for text in texts for word in ("--set", text)), "--ui", "none").communicate(
            timeout=240
        )
    taken = [tuple(json.loads(line)) for path in project.folder.glob("rows.*") for line in path.open()]
    monkeypatch.chdir(project.folder)
    (trained,) = RunData(project.folder / "runs" / "tiny" / "one").runs
    assert [(each.first, each.end) for each in trained.stretches] == [(0, 4), (4, 10)]
    expected = []
    for stretch in trained.stretches:
        for step in range(stretch.first, stretch.end):
            for number, cursor in zip(*(each.tolist() for each in stretch.curriculum.rows(step)), strict=True):
                dataset = stretch.datasets[number]
                row = dataset.reader.row(dataset.order.row(cursor)[1])
                expected.append((step + 1, [token for part in row.segments for token in part[:-1].tolist()]))
    assert sorted(taken) == sorted(expected)


def test_rows_skipped_by_a_rollback_are_seen_before_it_only(project: Project, monkeypatch: pytest.MonkeyPatch):
    """The steps after a rollback from step 6 to step 4 take the rows of steps 7 and later."""
    monkeypatch.chdir(project.folder)
    plan = plan_from_path(project.spec(steps=12)).plan
    assert plan is not None
    run = project.folder / "runs" / "tiny" / "made"
    run.mkdir(parents=True)
    (run / "plan.json").write_text(dumps(plan))
    said = [
        {"event": "run_start", "step": 0, "plan_id": plan.id, "resumed_step": None},
        {"event": "rollback", "step": 4, "from_step": 6},
        {"event": "run_start", "step": 0, "plan_id": plan.id, "resumed_step": 4},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, **each}) + "\n" for each in said))
    (run / "metrics.jsonl").write_text('{"step": 9, "time": 1.0, "loss": 1.0}\n')
    assert changed_within(run, 2, 9) == [4] and not changed_within(run, 4, 9)
    (trained,) = RunData(run).runs
    whole = Stretch.begin(plan, trained.stretches[0].prepared)
    every = whole.prepared["lines"].train_documents

    def taken(*stretches: Stretch) -> set[tuple[int, int]]:
        parts = [part for stretch in stretches for part in stretch.sightings("lines", every)]
        return {pair for part in parts for pair in zip(part.steps.tolist(), part.rows.tolist(), strict=True)}

    expected = {(step if step <= 4 else step - 2, row) for step, row in taken(whole) if step <= 4 or 7 <= step <= 11}
    assert taken(*trained.stretches) == expected
