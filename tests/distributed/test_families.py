"""A model family of an installed package, which ranks find by its entry point: planned, trained, and cut."""

import pytest
from forked_ranks import Outcome
from other_packages import installed
from projects import Project, worst
from trials import Laboratory

from xtrain.planner.load import plan_from_path

CUT = ("parallel.tp=2", "batch.micro=2")


@pytest.mark.matrix  # by default a family of a user is trained: test_own_families.py
@pytest.mark.parametrize("layout", [CUT, (*CUT, "parallel.fsdp=2")])
def test_a_layout_trains_an_installed_family_as_one_process_does(
    layout: tuple[str, ...], lab: Laboratory, project: Project, monkeypatch: pytest.MonkeyPatch
):
    """Biases cut by heads, a layer of its own, and both layers of a block beside each other."""
    path = project.folder / project.spec(steps=3, tied=False, more="precision { params = fp64 }")
    text = path.read_text().replace("model qwen3", "model side_by_side")
    assert text != path.read_text()
    path.write_text(text)

    def train(name: str, *sets: str) -> Outcome:
        with installed(monkeypatch):
            compiled = plan_from_path(path, sets)
        assert compiled.plan is not None, compiled.diagnostics.render()
        return lab.ranks.run(compiled.plan, project.folder, name=name, saves=False)

    alone, cut = train("alone"), train("cut", *layout)
    assert len(alone.curve) == 3 and max(worst(cut.curve, alone.curve)) < 1e-10
    assert alone.curve[-1][1] < alone.curve[0][1]
