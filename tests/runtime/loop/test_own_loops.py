"""Loops of the user around the built-in steps: the same training, ended where they return."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from projects import Project, curve, records

from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop.own_loops import LoopDriver

PARTS = """
from xtrain import epoch, hook, train

@train
def whole(context, most: int = 99):
    while context.run_epoch():
        said("after", context.run.step)
        if context.run.step >= most:
            return

@train
def steps(context):
    while context.step():
        said("step", context.epoch, context.run.step)

@epoch
def each(context):
    said("epoch", context.epoch)
    while context.step():
        said(context.run.step)

@epoch
def hides(context):
    try:
        while context.step():
            context.missing
    except BaseException:
        pass

@train
def fails(context):
    context.missing

@hook("after_backward")
def breaks(context):
    raise ValueError("of a step")

def said(*words):
    with open("said", "a") as file:
        print(*words, file=file)
"""
SPEC = """
use "parts.py"
experiment tiny { seed = 3, budget = 3 epochs }
model llama { dim = 16, layers = 1, heads = 2, ffn = 16 }
tokenizer bytes
dataset made { source = synthetic(documents = 12, length = 30, spread = 0) }
batch { sequence = 32, rows = 4 }
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
optimizer adamw { lr = 1e-2 }
every 1 step log
"""


def project_of(folder, more: str) -> Project:
    folder.mkdir()
    project = Project(folder)
    (project.folder / "parts.py").write_text(PARTS)
    (project.folder / "own.xtrain").write_text(SPEC + more)
    return project


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return curve(project_of(tmp_path_factory.mktemp("plain") / "run", "").run("own.xtrain"))


@pytest.mark.parametrize(("more", "said"), [
    ("train whole\nepoch each", "epoch 1|1|2|3|after 3|epoch 2|4|5|6|after 6|epoch 3|7|8|9|after 9"),
    pytest.param(
        "train steps", "step 1 1|step 1 2|step 2 3|step 2 4|step 2 5|step 3 6|step 3 7|step 3 8|step 4 9",
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_own_loops_train_as_the_built_in_ones(tmp_path, plain, more, said):
    project = project_of(tmp_path / "run", more)
    assert curve(project.run("own.xtrain")) == plain
    assert (project.folder / "said").read_text().splitlines() == said.split("|")


@pytest.mark.slow
def test_a_loop_that_returns_saves_and_the_run_resumes_in_its_epoch(tmp_path, plain):
    project = project_of(tmp_path / "run", "train whole { most = 3 }\nepoch each")
    directory = project.run("own.xtrain", expect=75)
    assert [step for step, *_ in curve(directory)] == [1, 2, 3]
    stop = next(event for event in records(directory, "events") if event["event"] == "stop")
    assert "train `whole` returned after step 3 of 9" in stop["reason"]
    (project.folder / "own.xtrain").write_text(SPEC + "train whole\nepoch each")
    assert curve(project.run("own.xtrain")) == plain


@pytest.mark.slow
@pytest.mark.parametrize(("more", "code", "message"), [
    ("epoch hides\nhook breaks", 1, r"\[X512\] parts.py:\d+: hook `breaks`: ValueError: of a step"),
    ("epoch hides", 75, "epoch `hides` returned after step 1 of 9"),
    ("train fails", 1, r"\[X512\] parts.py:\d+: train `fails`: AttributeError: .*no attribute 'missing'"),
])  # fmt: skip
def test_errors_of_steps_and_of_loops_are_told_apart(tmp_path, more, code, message):
    project = project_of(tmp_path / "run", more)
    command = project.start("own.xtrain", "--ui", "plain")
    said = "".join(command.communicate(timeout=120))
    assert command.returncode == code and re.search(message, said), said


@pytest.mark.parametrize(("course", "epochs"), [
    ([1, 2, 3, 3, 4, 5, 6], [3, 6]),  # the first step of an epoch is repeated
    ([1, 2, 3, 2, 3, 4, 5, 6], [3, 6]),  # a rollback went back into the epoch before
    ([1, 6], [6]),
])  # fmt: skip
def test_an_epoch_is_over_when_its_data_is(course, epochs):
    progress = Progress()

    def steps():
        yield
        for progress.step in course:
            yield
        return "done"

    batch = SimpleNamespace(epochs_before=lambda step: step / 3)
    nodes: Any = SimpleNamespace(plan=SimpleNamespace(nodes=[]))
    feed: Any = SimpleNamespace(batch=batch, steps=6, begins_epoch=lambda step: step % 3 == 0)
    driver = LoopDriver(course=steps(), nodes=nodes, progress=progress, feed=feed, last=lambda: 6, stop=str)
    driver._advance()
    found = []
    while driver.run_epoch():
        found.append(progress.step)
    assert found == epochs
