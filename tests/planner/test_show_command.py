"""What `xtrain plan` prints and how it ends: views, formats, mistakes on the command line."""

import json
from pathlib import Path

import pytest

from xtrain.cli.main import main
from xtrain.plan.estimates import Memory
from xtrain.plan.plan import Traced
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.page import render
from xtrain.text.page import LONGEST

ROOT = Path(__file__).parents[2]
SMALL = "specs/two_ranks_cpu.xtrain"
LARGE = "specs/moe_16k.xtrain"


@pytest.fixture
def plan(capsys, monkeypatch):
    """`plan(spec, *arguments)`: (exit status, stdout, stderr) of `xtrain plan` in the repository."""
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        try:
            status = main(["plan", *map(str, arguments)])
        except SystemExit as left:
            status = left.code
        done = capsys.readouterr()
        assert "Traceback" not in done.err
        return status, done.out, done.err

    return run


def test_the_page_says_a_warning_once(plan):
    """What stands among its checks is not said on stderr, too; what belongs to no check is."""
    status, out, err = plan(LARGE)
    compiled = plan_from_path(ROOT / LARGE, [])
    assert status == 0 and compiled.plan is not None
    assert len(render(compiled.plan).splitlines()) <= LONGEST  # on a terminal; no line is cut in a pipe
    assert "W505" in out and "W505" not in err
    for view in (("--part", "mesh"), ("--rank", "0"), ("--json",), ("--format", "dot"), ("--show", "mesh")):
        status, out, err = plan(LARGE, *view)
        assert status == 0 and "warning[W505]" in err, view
    for view in (("--full",), ("--part", "mesh,checks")):
        assert "warning[W505]" not in plan(LARGE, *view)[2]


def test_what_no_check_mentions_is_said(plan, tmp_path):
    spec = tmp_path / "idle.xtrain"
    spec.write_text((ROOT / SMALL).read_text() + "\nlet forgotten = 3\n")
    status, out, err = plan(spec)
    assert status == 0 and "warning[W201]" in err and "W201" not in out


def test_formats(plan):
    status, out, _ = plan(SMALL, "--format", "json")
    assert status == 0 and json.loads(out) == json.loads(plan(SMALL, "--json")[1])
    assert json.loads(out)["made"] is not None  # what is printed can be saved and run
    assert plan(SMALL, "--format", "mermaid")[1].startswith("flowchart TD\n")
    assert plan(SMALL, "--format", "dot")[1].startswith("digraph plan {\n")
    assert plan(SMALL, "--format", "text")[1] == plan(SMALL)[1]


def test_views(plan):
    assert plan(LARGE, "--rank", "137")[1].startswith("rank 137 of 16,384: node 17, its device 1\n")
    assert plan(SMALL, "--rank", "0")[1].startswith("rank 0 of 2")
    assert plan(LARGE, "--show", "setup.parallel.*")[1].count("setup.parallel.") >= 6
    assert plan(SMALL, "--why", "optimizer.lr")[1].startswith("optimizer.lr = 0.003\n")
    assert "RULES" in plan(LARGE, "--why", "parallel.tp")[1]
    parts = plan(LARGE, "--part", "memory,mesh", "--part", "step")[1]
    assert [word for word in ("MESH", "STEP", "MEMORY", "TRAINING", "ORDER") if f"\n{word}" in parts] == [
        "MESH", "STEP", "MEMORY",
    ]  # fmt: skip
    full = plan(LARGE, "--full")[1]
    assert len(full.splitlines()) > 300 and "layers.93.mlp.experts.down_proj" in full


@pytest.mark.parametrize(("arguments", "message"), [
    (("--rank", "16384"), "error: there is no rank 16,384: the plan has 16,384 ranks, 0 to 16,383"),
    (("--rank", "-1"), "error: there is no rank -1: the plan has 16,384 ranks"),
    (("--rank", "two"), "invalid int value"),
    (("--show", "setup.parallel.tpp"), "error: the plan has no node `setup.parallel.tpp`; did you mean"),
    (("--why", "paralel.tp"), "error: the plan has no value `paralel.tp`; did you mean `parallel.tp`?"),
    (("--part", "memry"), "error: the page has no part `memry`; did you mean `memory`?"),
    (("--part", "memory,"), "error: the page has no part ``; existing parts:"),
    (("--part", "zzz"), "existing parts: model, values, mesh, stages"),
    (("--rank", "0", "--json"), "error: --rank prints text; leave out --format json"),
    (("--full", "--format", "dot"), "error: --full prints text; leave out --format dot"),
    (("--rank", "0", "--show", "mesh"), "not allowed with argument"),
    (("--json", "--format", "dot"), "not allowed with argument"),
    (("--format", "svg"), "invalid choice: 'svg'"),
])  # fmt: skip
def test_mistakes(plan, arguments, message):
    status, out, err = plan(LARGE, *arguments)
    assert status == 2 and out == "" and message in err


def test_views_of_a_saved_plan(plan, tmp_path):
    """A plan carries its spec as text: what depends on a value can be found out without the file."""
    saved = tmp_path / "plan.json"
    assert plan(SMALL, "--set", "optimizer.lr=1e-2", "--out", saved)[0] == 0
    assert plan(saved, "--rank", "1")[1] == plan(SMALL, "--set", "optimizer.lr=1e-2", "--rank", "1")[1]
    assert plan(saved, "--full")[1] == plan(SMALL, "--set", "optimizer.lr=1e-2", "--full")[1]
    why = plan(saved, "--why", "optimizer.lr")[1]
    assert "optimizer.lr = 0.01\n" in why and "with optimizer.lr = 0.02" in why
    world = tmp_path / "world.json"
    assert plan("specs/quickstart.xtrain", "--world", "2", "--out", world)[0] == 0
    assert "with --world 1" in plan(world, "--why", "world_size")[1]


def test_a_trace_is_part_of_the_plan(plan, monkeypatch, tmp_path):
    trace = pytest.importorskip("xtrain.runtime.inspect.trace")
    seen = Traced(rank=0, pp=0, memory=Memory(parameters=1, gradients=2, optimizer=3), traffic=(), seconds=0.5)
    monkeypatch.setattr(trace, "trace_plan", lambda plan, ranks, tell: (seen,))
    status, out, _ = plan(SMALL, "--trace", "--out", tmp_path / "plan.json")
    assert status == 0 and "  traced" in out and "trace.memory.parameters" in out
    assert json.loads((tmp_path / "plan.json").read_text())["traced"][0]["memory"]["optimizer"] == 3
    assert plan(tmp_path / "plan.json")[1].splitlines()[:20] == out.splitlines()[:20]


@pytest.mark.parametrize("old_torch", [False, True])
def test_a_plan_that_cannot_be_traced(plan, monkeypatch, old_torch):
    trace = pytest.importorskip("xtrain.runtime.inspect.trace")
    from xtrain.runtime.base.errors import EnvironmentFault
    from xtrain.runtime.base.ops import PlanMismatch

    def refuse(plan, ranks, tell):
        message = "it is made for another version"
        raise EnvironmentFault("X715", message) if old_torch else PlanMismatch(message)

    monkeypatch.setattr(trace, "trace_plan", refuse)
    status, out, err = plan(SMALL, "--trace")
    assert status == 3 and out == "" and err == "error: the plan cannot be traced: it is made for another version\n"


def test_nothing_is_saved_when_nothing_can_be_shown(plan, tmp_path):
    assert plan(SMALL, "--rank", "9", "--out", tmp_path / "plan.json")[0] == 2
    assert not (tmp_path / "plan.json").exists()
