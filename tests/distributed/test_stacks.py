"""Execution stacks of an installed package, which ranks find by their entry point, train as one process does."""

import pytest
from forked_ranks import Outcome
from other_packages import OTHER_STACKS, installed
from projects import Project, worst
from trials import Laboratory

from xtrain.planner.load import plan_from_path

COPIES = ("parallel.stack=summing", "parallel.fsdp.replicate=2", "batch.micro=2")


@pytest.mark.parametrize(
    "layout",
    [COPIES, pytest.param((*COPIES, "parallel.tp=2"), marks=pytest.mark.matrix),
        pytest.param(("parallel.stack=sharding", "parallel.fsdp=2", "batch.micro=2"), marks=pytest.mark.matrix)],
    ids=["copies", "copies of tp 2", "shards"],
)  # fmt: skip
def test_an_installed_stack_trains_as_one_process_does(
    layout: tuple[str, ...], lab: Laboratory, project: Project, monkeypatch: pytest.MonkeyPatch
):
    """Two microbatches a step, of which gradients are summed in the second."""
    path = project.folder / project.spec(steps=3, tied=False, more="precision { params = fp64 }")

    def train(name: str, *sets: str) -> Outcome:
        with installed(monkeypatch, OTHER_STACKS):
            compiled = plan_from_path(path, sets)
        assert compiled.plan is not None, compiled.diagnostics.render()
        return lab.ranks.run(compiled.plan, project.folder, name=name, saves=False)

    alone, spread = train("alone"), train("spread", *layout)
    assert len(alone.curve) == 3 and max(worst(spread.curve, alone.curve)) < 1e-10
    assert alone.curve[-1][1] < alone.curve[0][1]
