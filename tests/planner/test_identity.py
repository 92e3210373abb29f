"""What changes the id of a plan, what changes the experiment, and what changes neither."""

from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.plan.canonical import DIGEST_BYTES, PLAN, digest, fingerprint, whole_numbers
from xtrain.planner.compile import compile_plan
from xtrain.planner.load import plan_from_spec

BASE = {"batch": "batch { sequence = 256, rows = 8 }", "parallel": "parallel { fsdp auto }"}


@pytest.fixture
def base(make_plan):
    return make_plan(**BASE)


def same_experiment(base, other):
    return other.id != base.id and other.config_id == base.config_id


def test_ids_are_short_hex(base):
    assert len(base.id) == len(base.config_id) == 16
    assert set(base.id + base.config_id) <= set("0123456789abcdef")


def test_the_same_spec_gives_the_same_plan(make_plan, base):
    assert make_plan(**BASE) == base


def test_comments_layout_and_constants_change_nothing(make_plan, base):
    other = make_plan(
        **BASE,
        comment="# a comment\n\n\n",
        model="let width = 2 * 32\nmodel llama {\n  layers = 4\n  dim = width, heads = 8 # eight\n  kv_heads = 4\n}",
    )
    assert (other.id, other.config_id) == (base.id, base.config_id)


def test_defaults_written_out_change_nothing(make_plan, base):
    other = make_plan(
        **BASE,
        model="model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, ffn = 192, vocab = 258 }",
        scheduler="scheduler constant { warmup = 0 steps }",
        precision="precision { params = fp32, compute = fp32 }",
        every="every 1 step log\nevery 25 steps checkpoint",
    )
    assert (other.id, other.config_id) == (base.id, base.config_id)


@pytest.mark.parametrize("blocks", [
    {"experiment": "experiment tiny { seed = 1, budget = 500 steps }"},
    {"experiment": "experiment tiny { seed = 1, budget = 1M tokens }"},
    {"every": "every 7 steps eval code then log"},
    {"workspace": 'workspace { root = "elsewhere", lineage = "family" }'},
    {"checkpoint": "checkpoint { keep = 1, resume = false }"},
    {"parallel": "parallel { fsdp 4 }"},
    {"parallel": "parallel { tp 2, fsdp 2 { replicate = 2 } }"},
    {"batch": "batch { sequence = 256, micro = 2, accumulate = 4 }"},
    {"launch": "launch { device = cpu, threads = 2 }"},
    {"loss": "loss cross_entropy { chunk = 1 MiB }"},
    {"activation": "activation full"},
    {"compile": "compile"},
    {"parallel": "parallel { cp 2 { ulysses = 2 }, fsdp 2 }"},
    {"parallel": "parallel { pp 2 { schedule = zbv }, tp 2 }"},
    {"parallel": "parallel { stack = ddp, fsdp auto { replicate = 2 } }"},
    {"cluster": "cluster other { memory = 64 GiB, price = 2.5 }"},
    {"experiment": "experiment tiny { seed = 1, budget = 200 steps }", "every": "every 3 steps checkpoint",
        "workspace": 'workspace { root = "there", run = "mine" }'},
], ids=lambda blocks: next(iter(blocks)))  # fmt: skip
def test_the_same_experiment_in_another_way(make_plan, base, blocks):
    assert same_experiment(base, make_plan(**(BASE | blocks)))


@pytest.mark.parametrize("blocks", [
    {"experiment": "experiment tiny { seed = 2, budget = 100 steps }"},
    {"experiment": "experiment other { seed = 1, budget = 100 steps }"},
    {"optimizer": "optimizer adamw { lr = 2e-3 }"},
    {"model": "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 8 }"},
    {"batch": "batch { sequence = 256, rows = 16 }"},
    {"batch": "batch { sequence = 128, rows = 16 }"},
    {"dataset": "dataset code { source = python_stdlib(), holdout = 2% }"},
    {"precision": "precision { compute = bf16 }"},
    {"scheduler": "scheduler cosine { warmup = 10 steps }"},
], ids=lambda blocks: next(iter(blocks)))  # fmt: skip
def test_another_experiment(make_plan, base, blocks):
    other = make_plan(**(BASE | blocks))
    assert other.id != base.id and other.config_id != base.config_id


def chain(align):
    return f"collate = to_tensor -> flatten -> shift_tokens -> pack(align = {align})"


def test_rows_depend_on_the_alignment_of_documents(make_plan, base):
    """A ring needs aligned documents, and so packs other rows; on one rank the same can be asked for."""
    ring = make_plan(**BASE | {"parallel": "parallel { cp 2 { ring = 2 } }"})
    assert ring.config_id != base.config_id
    assert make_plan(**BASE, collate=chain(4)).config_id == ring.config_id
    written = BASE | {"parallel": "parallel { cp 2 { ring = 2 } }", "collate": f"{chain(4)} -> shard"}
    assert make_plan(**written).id == ring.id
    assert make_plan(**BASE, collate=chain(8)).config_id != ring.config_id
    assert make_plan(**BASE, collate=chain(1)).id == base.id


def test_rows_depend_on_the_packing_of_documents(make_plan, base):
    """`auto` is the group it stands for, and packing in order, which has none, is what it was without groups."""

    def packed(arguments):
        return make_plan(**BASE, collate=f"collate = to_tensor -> flatten -> shift_tokens -> pack({arguments})")

    methods = [packed(method) for method in ("sequential", "multipack", "best_fit", "multipack, group = 5k")]
    assert len({plan.config_id for plan in methods}) == 4
    assert methods[0].id == base.id
    assert packed("multipack, group = 100k").id == methods[1].id


def test_the_world_is_part_of_the_plan_only(make_plan, base):
    assert same_experiment(base, make_plan(4, **BASE))
    assert make_plan(1, **BASE).id == base.id


def test_paths_may_be_spelled_differently(make_plan):
    def plan_with(pattern, root):
        dataset = f'dataset web {{ source = text("{pattern}") }}'
        return make_plan(dataset=dataset, workspace=f'workspace {{ root = "{root}" }}')

    one, other = plan_with("data/*.txt", "runs"), plan_with("./data//*.txt", "./runs/")
    assert (one.id, one.config_id) == (other.id, other.config_id)
    assert one.id != plan_with("data/*.md", "runs").id


def test_ids_do_not_depend_on_the_working_folder(tmp_path, load, monkeypatch):
    load(**BASE)
    path = tmp_path / "spec.xtrain"
    here = plan_from_spec(path).plan
    monkeypatch.chdir(tmp_path)
    there = plan_from_spec("spec.xtrain").plan
    assert here is not None and there is not None
    assert (here.id, here.config_id) == (there.id, there.config_id)
    assert here.spec == str(path) and there.spec == "spec.xtrain"


def test_files_that_are_not_there_yet_do_not_change_the_plan(tmp_path, make_plan, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = {"dataset": 'dataset web { source = text("data/*.txt") }'}
    before = make_plan(**blocks)
    Path("data").mkdir()
    Path("data/a.txt").write_text("text")
    assert make_plan(**blocks).id == before.id


def test_the_resolved_text_is_the_same_plan(tmp_path, make_plan, load):
    plan = make_plan(**BASE, every="every 20 steps eval code { batches = 3 } then log", scheduler="scheduler cosine")
    path = tmp_path / "resolved.xtrain"
    spec = load(**BASE, every="every 20 steps eval code { batches = 3 } then log", scheduler="scheduler cosine")
    loaded = load_spec(tmp_path / "spec.xtrain")
    assert loaded.spec == spec
    path.write_text(loaded.resolved_text())
    again = load_spec(path)
    assert again.spec is not None, again.diagnostics.render()
    resolved = compile_plan(again.spec).plan
    assert resolved is not None
    assert (resolved.id, resolved.config_id) == (plan.id, plan.config_id)


def test_a_fingerprint_is_that_of_the_canonical_form():
    """Of keys in any order, tuples and whole numbers written with a point; ids that lie on disk were taken so."""
    content = {"b": (1.0, 2.5, None, True, "é"), "a": {"10": [], "9": {"y": 3.0, "x": "z"}}}
    assert fingerprint(content) == digest(whole_numbers(content), PLAN, size=DIGEST_BYTES)
    same = {"a": {"9": {"x": "z", "y": 3}, "10": ()}, "b": [1, 2.5, None, True, "é"]}
    assert fingerprint(content) == fingerprint(same)
    assert fingerprint(content) != fingerprint(content | {"b": (1, 2.5, None, False, "é")})
