"""The notebooks run from the first cell to the last, and show specs, plans and runs as HTML."""

import nbformat
import pytest
from nbclient import NotebookClient
from rooms import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHOWN = {"first_run": 3, "read_a_run": 1}  # objects with a page of their own


def test_all_notebooks_are_here_without_outputs():
    assert {path.stem for path in NOTEBOOKS} == SHOWN.keys()
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        nbformat.validate(nbformat.read(path, as_version=4))
        assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pages = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", ())
    ]
    assert len(pages) == SHOWN[path.stem] and all("<" in page for page in pages)
