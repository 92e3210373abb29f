"""`--compare` and `--fit`: alternatives keep ranks and rows, wrong ones say why, the search finds what fits."""

import json

import pytest

from xtrain.cli.main import main
from xtrain.dsl.load import load_spec
from xtrain.planner.compile import compile_plan
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.alternatives import Unsearchable, compare, render_alternatives, render_fit, search, split

from .conftest import spec_text

BIG = {
    "model": "model llama { dim = 4Ki, layers = 32, heads = 32, kv_heads = 8, ffn = 14336, vocab = 128256 }",
    "batch": "batch { sequence = 8Ki, rows = 64 }",
    "precision": "precision { compute = bf16 }",
    "launch": "launch { nodes = 2, ranks_per_node = 8 }",
    "cluster": "cluster h100",
}

SMALL = BIG | {"launch": "launch { ranks_per_node = 4 }"}


@pytest.fixture
def write(tmp_path):
    def build(**blocks):
        path = tmp_path / "spec.xtrain"
        path.write_text(spec_text(**blocks))
        return path

    return build


@pytest.mark.parametrize(("text", "parts"), [
    ("tp=2", ["tp=2"]),
    ("tp=2, pp=4", ["tp=2", "pp=4"]),
    ("parallel.pp.layers=[1, 3],tp=2", ["parallel.pp.layers=[1, 3]", "tp=2"]),
    ('workspace.root="a,b",tp=2', ['workspace.root="a,b"', "tp=2"]),
    (",tp=2,", ["tp=2"]),
])  # fmt: skip
def test_texts_are_split_outside_of_brackets_and_strings(text, parts):
    assert split(text) == parts


def test_alternatives_keep_ranks_and_rows(write):
    path = write(parallel="parallel { fsdp 4 }", batch="batch { sequence = 256, accumulate = 2 }")
    found = compare(path, ["tp=2", "tp=2,pp=2,schedule=gpipe", "micro=2", "accumulate=4", "fsdp=8"])
    assert [each.name for each in found] == ["as declared", "tp=2", "tp=2,pp=2,schedule=gpipe", "micro=2",
                                             "accumulate=4", "fsdp=8"]  # fmt: skip
    plans = [each.plan for each in found]
    assert all(plan is not None for plan in plans), [each.diagnostics.render() for each in found]
    assert [plan.mesh.world_size for plan in plans] == [4, 4, 4, 4, 4, 8]
    assert [plan.node("setup.loader").args["rows"] for plan in plans] == [8, 8, 8, 8, 16, 8]
    assert plans[1].mesh.size("tp") == 2 and plans[1].mesh.size("fsdp") == 2
    assert len({plan.config_id for plan in (*plans[:4], plans[5])}) == 1 and plans[4].config_id != plans[0].config_id


def test_an_alternative_that_cannot_be_says_why_beside_the_others(write):
    path = write(parallel="parallel { fsdp 4 }")
    found = compare(path, ["tp=3", "tpp=2", "tp=2", "tp"])
    assert [each.plan is None for each in found] == [False, True, True, False, True]
    text = render_alternatives(found)
    assert "tp=3  X" in text and "tpp=2  X" in text and "other experiment" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_spec_that_has_no_plan_is_compared_with_what_has_one(write):
    found = compare(write(parallel="parallel { tp 3 }"), ["tp=2"])
    assert found[0].plan is None and found[1].plan is not None
    assert "as declared  X" in render_alternatives(found)


def test_each_compare_of_a_command_line_counts(write, capsys):
    path = write(parallel="parallel { fsdp 4 }")
    assert main(["plan", str(path), "--compare", "tp=2", "--compare", "micro=2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["alternatives"]
    assert [each["name"] for each in found] == ["as declared", "tp=2", "micro=2"]


def test_another_experiment_is_called_so(write):
    text = render_alternatives(compare(write(), ["optimizer.lr=2e-3", "micro=2"]))
    (line,) = [line for line in text.splitlines() if "other experiment" in line]
    assert "optimizer.lr=2e-3" in line


@pytest.mark.parametrize(
    ("blocks", "ranks"), [(SMALL, 4), pytest.param(BIG, 16, marks=pytest.mark.slow)], ids=["one node", "two nodes"]
)
def test_the_best_layouts_fit_and_can_be_asked_for(write, blocks, ranks):
    path = write(**blocks)
    spec = load_spec(path).require()
    plan = compile_plan(spec).plan
    found = search(spec, plan)
    assert len(found.best) == 5 and found.world == ranks
    seconds = [each.seconds for each in found.best]
    assert seconds == sorted(seconds)
    names = [each.name for each in (*found.best, *found.rejected)]
    assert len(names) == len(set(names))
    for each in found.best:
        assert each.memory < plan.cluster.memory_bytes
        again = plan_from_spec(path, each.sets).plan
        assert again is not None and again.estimates == each.estimates
        assert again.node("setup.loader").args["rows"] == 64
    assert all(each.rejected for each in found.rejected)
    slower = [each for each in found.rejected if each.code == "slower"]
    assert min(each.seconds for each in slower) >= seconds[-1]
    text = render_fit(found, "spec.xtrain")
    assert "fit and are slower" in text and max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
def test_the_search_starts_from_what_the_spec_says(write):
    """What the first one is asked for by differs from the spec, and from nothing else."""
    path = write(**SMALL | {"parallel": "parallel { tp 4, fsdp auto }"})
    spec = load_spec(path).require()
    found = search(spec, compile_plan(spec).plan)
    plain = next(each for each in (*found.best, *found.rejected) if each.name == "tp=4")
    assert plain.sets == ()


@pytest.mark.slow
def test_what_is_too_large_is_rejected_for_memory(write):
    path = write(**SMALL | {"cluster": "cluster h100 { memory = 6 GiB }"})
    spec = load_spec(path).require()
    found = search(spec, compile_plan(spec).plan)
    rejected = [each for each in found.rejected if each.code == "memory"]
    assert rejected and all(each.memory > 0.9 * 6 * 2**30 for each in rejected)
    assert "do not fit in memory" in render_fit(found, "spec.xtrain")


def test_without_a_cluster_nothing_can_be_judged(write):
    spec = load_spec(write()).require()
    with pytest.raises(Unsearchable, match="cluster h100"):
        search(spec, compile_plan(spec).plan)
