"""A model family of an installed package, which ranks find by its entry point: planned, trained, and cut."""

import pytest
from other_packages import OTHER_PACKAGE
from projects import Project, curve, worst

pytestmark = pytest.mark.distributed

CUT = ("parallel.tp=2", "batch.micro=2")


@pytest.mark.parametrize("layout", [CUT, pytest.param((*CUT, "parallel.fsdp=2"), marks=pytest.mark.matrix)])
def test_a_layout_trains_an_installed_family_as_one_process_does(
    layout: tuple[str, ...], project: Project, monkeypatch: pytest.MonkeyPatch
):
    """Biases cut by heads, a layer of its own, and both layers of a block beside each other."""
    monkeypatch.setenv("PYTHONPATH", str(OTHER_PACKAGE))
    path = project.folder / project.spec(steps=3, tied=False, more="precision { params = fp64 }")
    text = path.read_text().replace("model qwen3", "model side_by_side")
    assert text != path.read_text()
    path.write_text(text)
    curves = []
    for root, *sets in (("alone",), ("cut", *layout)):
        arguments = [word for text in (f"workspace.root={root}", *sets) for word in ("--set", text)]
        process = project.start("tiny.xtrain", *arguments, "--ui", "plain", fresh=True)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, f"{out}\n{err}"
        curves.append(curve(project.directory(root)))
    assert len(curves[0]) == 3 and max(worst(*curves)) < 1e-10
    assert curves[0][-1][1] < curves[0][0][1]
