"""`xtrain bisect`: the step, node and tensor in which two runs part, from digests of records or of replays."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from attrs import evolve
from commands import xtrain
from forking import ForkedCommand
from projects import Project, called, events
from torch import Tensor

from xtrain.cli import bisect
from xtrain.components.actions import digests_torch
from xtrain.components.actions.digests_torch import PRIME, hashes
from xtrain.runtime.jobs.bisect import Parting, Trace

HOOK = '''
from xtrain import RunContext, hook

@hook("before_optimizer", changes="gradients")
def weaken(context: RunContext, at: int):
    """One gradient, in one step."""
    if context.step == at:
        for name, parameter in context.model.named_parameters():
            if name == "layers.0.mlp.up_proj.weight":
                parameter.grad.mul_(0.5)
'''
MORE = """
use "hooks.py"
hook weaken { at = 99 }
every 4 steps log
every 4 steps checkpoint
checkpoint { keep = none }
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    found = Project(tmp_path)
    (tmp_path / "hooks.py").write_text(HOOK)
    return found


def train(project: Project, name: str, more: str, *sets: str) -> Path:
    spec = project.spec(steps=12, more=more)
    path = project.folder / spec
    path.write_text(path.read_text().replace("every 1 step log\n", ""))
    words = [word for each in (f'workspace.run="{name}"', *sets) for word in ("--set", each)]
    process = project.start(spec, *words, "--ui", "none")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return project.folder / "runs" / "tiny" / name


@pytest.mark.parametrize("parallel", ["", pytest.param("parallel { fsdp 2 }", marks=pytest.mark.slow)])
def test_replays_show_the_gradient_that_was_changed(project: Project, parallel: str):
    train(project, "one", MORE + parallel)
    train(project, "two", MORE + parallel)
    train(project, "three", MORE + parallel, "hook.weaken.at=7")
    code, out, err = called(project, "bisect", "one", "two", "--json")
    assert (code, json.loads(out)["compared"]) == (0, 3), err
    code, out, err = called(project, "bisect", "one", "three", "--recorded")
    assert code == 1 and "equal up to step 4\n  step 8: loss, node step.forward_backward" in out, err
    for _ in range(2):  # the second call replays nothing
        code, out, err = called(project, "bisect", "one", "three", "--json")
        found = json.loads(out)
        assert (code, found["step"], found["quantity"], found["traced"]) == (1, 7, "gradients", True), err
        assert (found["tensors"], found["rows"], found["notes"]) == (["layers.0.mlp.up_proj.weight"], "equal", [])
    starts = [len(events(path, "run_start")) for path in (project.folder / "runs" / "tiny-replays").iterdir()]
    assert starts == [1, 1]
    if parallel:  # without the setting in which the runs differ
        code, out, err = called(project, "bisect", "one", "three", "--set", "hook.weaken.at=99", "--json")
        found = json.loads(out)
        assert (code, found["step"]) == (1, 8) and "the difference does not appear again" in found["notes"][-1], err
    for arguments, status, words in (
        (("bisect", "one", "one"), 2, "both arguments are the same run"),
        (("bisect", "one", "none"), 3, "there is no run at none"),
        (("bisect", "one", "three", "--world", "0"), 2, "`0` is not a number of ranks"),
    ):
        done = xtrain(*arguments, cwd=project.folder)
        assert (done.returncode, words in done.stderr) == (status, True), (arguments, done)


PARTED = Parting(step=1200, quantity="lr", values=(1e-4, None), tensors=(), before=None, traced=False)


@pytest.mark.parametrize(("found", "lines"), [
    (None, ["2 common steps: equal bit for bit"]),
    (PARTED, [
        "no common step is equal", "step 1,200: learning rate, node n", "0.0001 and not finite",
        "rows of the step: equal", "digests do not show the steps between: the runs may part there already",
    ]),
    (evolve(PARTED, values=None, tensors=tuple("abcdefghijkl"), before=1100, traced=True), [
        "equal up to step 1,100", "step 1,200: learning rate, node n", *"abcdefgh",
        "… 4 more tensors; --json has them all", "rows of the step: equal",
    ]),
])  # fmt: skip
def test_a_difference_in_words(monkeypatch, capsys, found: Parting | None, lines: list[str]):
    monkeypatch.setattr(bisect, "_node", lambda directory, found: "n")
    bisect._show([Path("runs/one"), Path("runs/two")], [3, 4], found, "equal", ["a note"])
    assert capsys.readouterr().out.split("\n") == [
        "one and two", *(f"{'    ' if len(line) == 1 or line[0] in '0…' else '  '}{line}" for line in lines),
        "  note: a note", "",
    ]  # fmt: skip


LAYOUTS = [
    (layout, tied, "")
    for layout in ("fsdp 2", "tp 2, fsdp 2", "pp 2", "fsdp 1 { replicate = 2 }, tp 2")
    for tied in (True, False)
]
# Blocks of down_proj cross its rows.
STORED = "adapter lora { rank = 4 }\nprecision { base nf4 { block = 32 } }\n"


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tied", "base"), [*LAYOUTS, ("fsdp 2", False, STORED)])
def test_digests_do_not_depend_on_the_layout(project: Project, layout: str, tied: bool, base: str):
    """Of the parameters that the run begins with; later ones differ by rounding."""
    found = []
    for name, parallel in (("alone", ""), ("other", f"parallel {{ {layout} }}")):
        spec = project.spec(steps=1, tied=tied, more=f"on start digests\n{base}{parallel}")
        text = (project.folder / spec).read_text().replace("layers = 1", "layers = 2")
        (project.folder / spec).write_text(text)
        found += events(project.run(spec, root=name), "digests")[:1]
    assert found[0]["parameters"] == found[1]["parameters"] and len(found[0]["parameters"]) > 15
    assert len({*found[0]["parameters"].values()}) > 10


def total(tensor: Tensor) -> list[int]:
    parts = hashes(tensor, tensor.shape, [torch.arange(size) for size in tensor.shape])
    return [int(each) % PRIME for each in sum(parts, torch.zeros(2, dtype=torch.int64))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_bit_and_every_place_changes_a_digest(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    tensor = torch.arange(60).view(3, 4, 5).to(dtype)
    whole = total(tensor)
    monkeypatch.setattr(digests_torch, "AT_ONCE", 7)
    assert total(tensor) == whole
    for place in range(60):
        other = tensor.clone()
        other.view(-1)[place] += 1
        assert all(one != two for one, two in zip(total(other), whole, strict=True)), place
    assert total(tensor.transpose(0, 1).contiguous()) != whole
    assert total(tensor.flip(0)) != whole


@pytest.mark.slow
@pytest.mark.parametrize("moments", [(0.7, 2.5), (0.2, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 8)])
def test_a_killed_search_is_resumed_by_the_same_call(project: Project, moments: tuple[float, ...]):
    train(project, "one", MORE)
    train(project, "three", MORE, "hook.weaken.at=5")
    for seconds in moments:
        process = ForkedCommand(["bisect", "one", "three", "--json"], project.folder, project.environment)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
    code, out, _ = called(project, "bisect", "one", "three", "--json")
    found = json.loads(out)  # in the first step after the checkpoint
    assert (code, found["step"], found["quantity"], found["before"], found["traced"]) == (1, 5, "gradients", 4, True)
    assert len([*(project.folder / "runs" / "tiny-replays").iterdir()]) == 2


def test_a_start_does_not_hide_the_gradients_of_its_step(tmp_path: Path):
    """A replay that was killed after a step starts again after this step."""
    lines = [{"event": "digests", "time": 1.0, "step": 5, "parameters": {"w": "1"}, "gradients": {"w": "2"}}]
    lines.append({**lines[0], "gradients": {}})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert Trace.of(tmp_path).digests[5].gradients == {"w": "2"}
