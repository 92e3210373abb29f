"""The starters of `xtrain init`: valid, planned, formatted, and explained."""

import re
from pathlib import Path

import pytest

from xtrain.components.sources.python_stdlib import PythonStdlib
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
from xtrain.dsl.load import load_spec
from xtrain.dsl.starter import name_problem, near_starter, starters
from xtrain.dsl.syntax.format import comments, format_source
from xtrain.dsl.syntax.lexer import tokenize
from xtrain.planner.load import check_from_spec, plan_from_spec

STARTERS = starters()
FOLDER = Path(__file__).parents[2] / "dsl" / "starters"
LATER = {"W501", "W505"}  # files and a tokenizer that their user has to bring


@pytest.fixture(params=STARTERS.values(), ids=lambda starter: starter.name)
def starter(request, tmp_path, monkeypatch):
    """A starter as `xtrain init tryout` would write it, in a folder with nothing else."""
    monkeypatch.chdir(tmp_path)
    Path("tryout.xtrain").write_text(request.param.named("tryout", "tryout.xtrain"), encoding="utf-8")
    return request.param


def test_all_files_are_listed():
    assert set(STARTERS) == {path.stem for path in FOLDER.glob("*.*")}
    assert next(iter(STARTERS)) == "quickstart" and len(STARTERS) >= 5


def test_it_is_checked_and_planned_without_errors(starter):
    assert {d.code for d in check_from_spec("tryout.xtrain")} <= LATER
    compiled = plan_from_spec("tryout.xtrain")
    assert compiled.plan is not None and {d.code for d in compiled.diagnostics} <= LATER
    assert starter.name in ("fsdp", "moe", "cluster") or not compiled.diagnostics.warnings
    memory = [check for check in compiled.plan.checks if "memory" in check.id]
    assert all(check.status != "fail" for check in memory)


def test_it_is_formatted(starter):
    text = Path("tryout.xtrain").read_text(encoding="utf-8")
    assert format_source(SourceText("s", text)) == text
    assert max(map(len, text.splitlines())) <= 120


def test_it_has_the_name_it_was_given(starter):
    text = Path("tryout.xtrain").read_text(encoding="utf-8")
    spec = load_spec("tryout.xtrain").require()
    assert spec.experiment.name == "tryout"
    assert {"xtrain plan tryout.xtrain", "xtrain run tryout.xtrain"} <= set(re.findall(r"xtrain \w+ \w+\.xtrain", text))
    assert f"{starter.name}.xtrain" not in text and f"experiment {starter.name}" not in text


def test_it_explains_its_choices(starter):
    """Every block that says more than a word or two has a comment at its head or beside one of its settings."""
    source = SourceText("s", starter.text)
    assert len(comments(source)) >= 12
    lines = starter.text.splitlines()
    unexplained = []
    for paragraph in starter.text.split("\n\n"):
        solid = [line for line in paragraph.splitlines() if not line.lstrip().startswith("#")]
        if solid and "#" not in paragraph and len(solid) > 4:
            unexplained.append(solid[0])
    assert not unexplained
    assert lines[0].startswith("# ") and starter.about and "#" not in starter.about
    assert not [t for t in tokenize(source, Diagnostics()) if t.type == "ERROR"]


def test_the_quickstart_needs_nothing_but_a_cpu():
    spec = load_spec(FOLDER / "quickstart.xtrain").require()
    assert spec.tokenizer.source == "bytes" and {type(d.source) for d in spec.datasets.values()} == {PythonStdlib}
    assert plan_from_spec(FOLDER / "quickstart.xtrain").plan.mesh.world_size == 1


def test_the_cluster_is_cut_along_four_axes():
    axes = plan_from_spec(FOLDER / "cluster.xtrain").plan.mesh
    assert axes.world_size == 512
    assert sum(size > 1 for size in (8, 2, 8, 4)) == 4
    spec = load_spec(FOLDER / "cluster.xtrain").require().parallel
    assert (spec.tp.size, spec.cp.size, spec.pp.size) == (8, 2, 4)


def test_the_name_may_be_anything_without_touching_the_rest():
    text = STARTERS["moe"].named("x1", r"a\1 b/x1.xtrain")
    assert r"xtrain plan a\1 b/x1.xtrain" in text and "experiment x1 {" in text and "model qwen3_moe {" in text


@pytest.mark.parametrize(
    ("name", "problem"),
    [("run1", None), ("_a", None), ("Run_2", None), ("4x", "write `run_4x`"), ("a-b", "write `a_b`"),
     ("a b", "write `a_b`"), ("", "a name consists of"), ("-", "a name consists of"), ("é", "a name consists of"),
     ("none", "write `none_run`"), ("auto", "write `auto_run`")],
)  # fmt: skip
def test_names(name, problem):
    found = name_problem(name)
    assert found is None if problem is None else problem in found


def test_near():
    assert near_starter("clustre") == "cluster" and near_starter("Moe") == "moe" and near_starter("zzz") is None
