"""Execution stacks of an installed package, which ranks find by their entry point, train as one process does."""

from pathlib import Path

import pytest
from projects import Project, curve, worst

pytestmark = pytest.mark.distributed

PACKAGE = Path(__file__).parents[1] / "support" / "package_with_stacks"
COPIES = ("parallel.stack=summing", "parallel.fsdp.replicate=2", "batch.micro=2")


@pytest.mark.parametrize(
    "layout",
    [
        COPIES,
        pytest.param((*COPIES, "parallel.tp=2"), marks=pytest.mark.matrix),
        pytest.param(("parallel.stack=sharding", "parallel.fsdp=2", "batch.micro=2"), marks=pytest.mark.matrix),
    ],
    ids=["copies", "copies of tp 2", "shards"],
)
def test_an_installed_stack_trains_as_one_process_does(
    layout: tuple[str, ...], project: Project, monkeypatch: pytest.MonkeyPatch
):
    """Two microbatches a step, of which gradients are summed in the second."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    project.spec(steps=3, tied=False, more="precision { params = fp64 }")
    curves = []
    for root, *sets in (("alone",), ("spread", *layout)):
        arguments = [word for text in (f"workspace.root={root}", *sets) for word in ("--set", text)]
        process = project.start("tiny.xtrain", *arguments, "--ui", "plain", fresh=True)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, f"{out}\n{err}"
        curves.append(curve(project.directory(root)))
    assert len(curves[0]) == 3 and max(worst(*curves)) < 1e-10
    assert curves[0][-1][1] < curves[0][0][1]
