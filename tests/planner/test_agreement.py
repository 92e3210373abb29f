"""The closed form against the trace: what a plan says a rank holds and sends is what the program of that rank does.

Every layout of the table of topologies, and the specs of the two acceptance models at full width with fewer layers.
"""

import json
from pathlib import Path

import pytest
from agreement import calls, hold_against_the_trace
from attrs import evolve
from packed_rows import CHAIN, PARTS
from teachers import make_sparse_teacher, make_teacher
from topologies import BY_NAME, TOPOLOGIES, Topology

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.inspect.trace import trace_plan

SPECS = Path(__file__).parents[2] / "specs"

# Of every feature one layout; the others with `-m matrix`.
FEW = (
    "fsdp 2, three microbatches (dense)",
    "pp 2 · tp 2, tied, uneven vocabulary (dense)",
    "fsdp 2 · ep 2, full recomputation (moe)",
)

# Options that layouts of the table do not have, and kernels of devices that it does not name.
IN_TWO = ("activation.tile_mlp=2",)
WIDE = {
    "8b": ("llama_8b_64gpu.xtrain", "batch.rows=64", "model.layers=3"),
    "8b, whole gradients": ("llama_8b_64gpu.xtrain", "batch.rows=256", "model.layers=3", "parallel.fsdp.sync=step"),
    "8b, tp 8": ("llama_8b_64gpu.xtrain", "batch.rows=8", "model.layers=3", "parallel.tp=8"),
    "8b, full": ("llama_8b_64gpu.xtrain", "batch.rows=64", "model.layers=3", "activation.mode=full"),
    "8b, tiled": ("llama_8b_64gpu.xtrain", "batch.rows=64", "model.layers=3", "activation=full", *IN_TWO),
    "8b, offloaded": ("llama_8b_64gpu.xtrain", "batch.rows=64", "model.layers=3", "parallel.fsdp.offload=true"),
    "8b, pipeline": ("llama_8b_64gpu.xtrain", "batch.rows=128", "model.layers=4", "parallel.pp=2"),
    "30b": ("qwen3_moe_plan.xtrain", "batch.rows=128", "model.layers=3"),
    "30b, one by one": ("qwen3_moe_plan.xtrain", "batch.rows=128", "model.layers=2", "cluster.preset=a100"),
    "30b, pp 2": ("qwen3_moe_plan.xtrain", "batch.rows=128", "model.layers=4", "parallel.pp=2"),
}


@pytest.mark.parametrize("name", FEW)
def test_a_layout_costs_what_its_plan_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(BY_NAME[name], tmp_path))


@pytest.mark.matrix
def test_pieces_of_a_wide_head_cost_what_the_plan_says():
    """The last piece is shorter than the one that is still there; where parameters stay, the first microbatch alone
    gathers them; and the gradient that was sent last is there too."""
    sets = ("model.vocab=20000", "model.dim=32", "loss.chunk=32 MiB", "activation=full")
    plan = plan_from_spec(SPECS / "pipeline_cpu.xtrain", sets).plan
    assert plan is not None
    for closed, traced in zip(plan.estimates.classes, trace_plan(plan), strict=True):
        assert closed.memory.total_bytes == pytest.approx(traced.memory.total_bytes, rel=0.01)


# What plans choose on a CPU: of what else the table has, they are for cuda where nothing says otherwise.
KERNELS = {
    "blocks of queries": ("model.attention=blocks", "batch.sequence=160"),
    "fused": ("launch.device=cpu",),
}


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        pytest.param("blocks of queries", "tp 2, without sequence (dense)", marks=pytest.mark.matrix),
        ("fused", "fsdp 2, no clipping (qwen3)"),
        *(
            pytest.param(kernels, name, marks=pytest.mark.matrix)
            for kernels, more in (
                ("blocks of queries", ("fsdp 2 · tp 2 (dense)", "fsdp 2, no clipping (qwen3)")),
                ("fused", ("ring 2 (dense)", "tp 2, z loss (dense)", "tp 2, tiled, without sequence (dense)")),
            )
            for name in (
                "fsdp 2, three microbatches (dense)",
                "fsdp 2, selective recomputation (dense)",
                "fsdp 2 · ep 2, full recomputation (moe)",
                "ulysses 2, fewer key/value heads than ranks (dense)",
                "pp 2, zbv (dense)",
                *more,
            )
        ),
    ],
)
def test_kernels_cost_what_the_plan_says(kernels, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    topology = BY_NAME[name]
    hold_against_the_trace(plan_of(evolve(topology, shared=(*topology.shared, *KERNELS[kernels])), tmp_path))


SPARSE = ("model.layers=2", "model.dim=64", "model.expert_ffn=96", "batch.rows=8")
ALONE = ("parallel.tp=1", "parallel.ep=1")


@pytest.mark.parametrize(("world", "sets"), [
    pytest.param(4, ("activation.mode=selective",), marks=pytest.mark.matrix),
    pytest.param(1, ("activation.mode=selective", *ALONE), marks=pytest.mark.matrix),
    pytest.param(4, ("parallel.tp=1",), marks=pytest.mark.matrix),
    pytest.param(4, ("activation.mode=full",), marks=pytest.mark.matrix),
    pytest.param(2, ("activation.mode=selective", "model.shared_experts=0"), marks=pytest.mark.matrix),
    pytest.param(4, ("activation.mode=selective", "parallel.tp=1", "parallel.ep=4"), marks=pytest.mark.matrix),
    pytest.param(
        4, ("activation.mode=selective", "parallel.tp=1", "precision.compute=bf16", "model.experts_per_token=4"),
        marks=pytest.mark.matrix,
    ),
])  # fmt: skip
def test_experts_need_the_memory_that_the_plan_says(world, sets):
    """Also beside what the forward leaves: the second run of a block, and the buffers of its units."""
    plan = plan_from_spec(SPECS / "moe_cpu.xtrain", (*SPARSE, *sets), world=world).plan
    assert plan is not None
    (closed,), (traced,) = plan.estimates.classes, trace_plan(plan)
    assert closed.memory.working == pytest.approx(traced.memory.working, rel=0.015)


MIXED = """
dataset others { source = jsonl("data.jsonl") }
mixture { lines = 1, others = 2 }
"""


@pytest.mark.parametrize(
    "name",
    [pytest.param("one rank, four microbatches (moe)", marks=pytest.mark.matrix), "tp 2, without loss (dense)",
        pytest.param("pp 2, zbv (dense)", marks=pytest.mark.matrix)],
)  # fmt: skip
def test_losses_of_several_datasets_cost_what_the_plan_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(BY_NAME[name], tmp_path, more=MIXED))


SMOOTHED = "loss cross_entropy { label_smoothing = 0.1, chunk = 8 KiB }"


@pytest.mark.matrix  # by default another loss that reads as much does
@pytest.mark.parametrize("name", ["tp 2, without loss (dense)", "tp 2, z loss (dense)"])
def test_smoothed_labels_cost_what_the_plan_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(BY_NAME[name], tmp_path, more=SMOOTHED))


ENTROPY = 'use "losses.py"\nloss own'
OWN = "from xtrain import loss\n@loss\ndef own(x, mean_logprob_T, entropy_T): return mean_logprob_T * entropy_T - x\n"


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    ["tp 2, z loss (dense)", "tp 2, without loss (dense)",
        "fsdp 2, three microbatches (dense)"],
)  # fmt: skip
def test_a_loss_that_reads_entropies_costs_what_the_plan_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(OWN)
    hold_against_the_trace(plan_of(BY_NAME[name], tmp_path, more=ENTROPY))


LOSSES = {
    "dpo": "loss dpo { reference = precomputed, chunk = 8 KiB }",
    "gspo": "loss gspo { kl = k3, kl_weight = 0.1, reference = precomputed, chunk = 8 KiB }",
    "grpo": "loss grpo { kl = k3, kl_weight = 0.1, reference = precomputed, chunk = 8 KiB }",
    "weighted": "loss cross_entropy { weighted = true, focal = 2.0, chunk = 8 KiB }",
    "bradley_terry": "loss bradley_terry { margin = true }",
}


@pytest.mark.parametrize(("loss", "name"), [
    ("dpo", "tp 2, z loss (dense)"),
    pytest.param("gspo", "ring 2 (dense)", marks=pytest.mark.matrix),
    pytest.param("bradley_terry", "tp 2, without loss (dense)", marks=pytest.mark.matrix),
    pytest.param("dpo", "pp 2 · ring 2 (dense)", marks=pytest.mark.matrix),
    pytest.param("gspo", "tp 2, without loss (dense)", marks=pytest.mark.matrix),
    pytest.param("grpo", "fsdp 2, three microbatches (dense)", marks=pytest.mark.matrix),
    pytest.param("weighted", "tp 2, z loss (dense)", marks=pytest.mark.matrix),
    pytest.param("bradley_terry", "pp 2 · fsdp 2 · tp 2 (dense)", marks=pytest.mark.matrix),
    pytest.param("bradley_terry", "ring 2 · tp 2 · ep 2 (moe)", marks=pytest.mark.matrix),
    pytest.param("bradley_terry", "pp 2, zbv (dense)", marks=pytest.mark.matrix),
    pytest.param("bradley_terry", "fsdp 2, three microbatches (dense)", marks=pytest.mark.matrix),
    pytest.param("dpo", "fsdp 2, three microbatches (dense)", marks=pytest.mark.matrix),
    pytest.param("dpo", "pp 2, zbv (dense)", marks=pytest.mark.matrix),
    pytest.param("gspo", "ring 2 · tp 2 · ep 2 (moe)", marks=pytest.mark.matrix),
])  # fmt: skip
def test_losses_of_sequences_and_tokens_cost_what_the_plan_says(loss, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    topology = evolve(BY_NAME[name], shared=tuple(s for s in BY_NAME[name].shared if not s.startswith("loss")))
    (tmp_path / "numbered.py").write_text(PARTS)
    chain = CHAIN.format(kind="pairs" if loss in ("dpo", "bradley_terry") else "sequences")
    hold_against_the_trace(plan_of(topology, tmp_path, more=chain + LOSSES[loss]))


ESTIMATED = """
dataset talks { source = jsonl("talks.jsonl"), prompt = "q", response = "a", template = "plain", label = "good" }
mixture { talks = 1 }
loss kto { reference_point = estimated, chunk = 8 KiB }
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    ["fsdp 2, three microbatches (dense)", "tp 2, z loss (dense)",
        "pp 2, zbv (dense)"],
)  # fmt: skip
def test_a_trace_leaves_out_the_forward_that_estimates_a_point(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    topology = evolve(BY_NAME[name], shared=tuple(s for s in BY_NAME[name].shared if not s.startswith("loss")))
    hold_against_the_trace(plan_of(topology, tmp_path, more=ESTIMATED))


SAMPLED = """
dataset asked { source = jsonl("asked.jsonl"), prompt = "q", response = "a", template = "plain", oversized = skip }
mixture { asked = 1 }
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
loss grpo { kl = k3, kl_weight = 0.1, chunk = 8 KiB }
rollout { group = 2, max_tokens = 8, steps = 2, updates = 2 }
reward exact_answer { }
"""


@pytest.mark.matrix
def test_a_trace_leaves_out_what_a_step_samples(tmp_path, monkeypatch):
    """The plan's memory has it, so that only what ranks send can be compared."""
    monkeypatch.chdir(tmp_path)
    plan = plan_of(BY_NAME["fsdp 2, three microbatches (dense)"], tmp_path, more=SAMPLED)
    (traced,) = trace_plan(plan)
    assert calls(plan, traced) == calls(plan, plan.estimates.classes[0])


DISTILLED = 'loss distill {{ teacher = "teacher", chunk = 8 KiB, {} }}'


@pytest.mark.matrix
@pytest.mark.parametrize(("settings", "name"), [
    ("form = jsd, temperature = 2, mix = 0.3, top = 20", "tp 2, z loss (dense)"),
    ("form = reverse_kl, top = 4", "tp 2, without loss (dense)"),
    ("top = 16", "pp 2, zbv (dense)"),
    ("top = 16, mix = 0.1", "fsdp 2, three microbatches (dense)"),
    ("top = 16", "ring 2 · tp 2 · ep 2 (moe)"),
])  # fmt: skip
def test_learning_from_a_teacher_costs_what_the_plan_says(settings, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    topology = evolve(BY_NAME[name], shared=tuple(s for s in BY_NAME[name].shared if not s.startswith("loss")))
    hold_against_the_trace(plan_of(topology, tmp_path, more=DISTILLED.format(settings)))


LIVE = 'loss distill {{ teacher = "{}", live = true, chunk = 1 MiB, {} }}'
SMALL = {"hidden_size": 24, "num_hidden_layers": 3}
THREE_HEADS = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1}


@pytest.mark.matrix
@pytest.mark.parametrize(("teacher", "settings", "name"), [
    ("small", "form = jsd, temperature = 2, mix = 0.3", "tp 2, z loss (dense)"),
    ("small", "form = reverse_kl", "fsdp 2, three microbatches (dense)"),
    ("odd", "mix = 0.1", "tp 2, without loss (dense)"),
    ("small", "mix = 0.1", "pp 2, zbv (dense)"),
    ("small", "form = reverse_kl", "ring 2 · tp 2 · ep 2 (moe)"),
    ("small", "form = jsd", "pp 2 · fsdp 2 · tp 2 (dense)"),
    ("small", "mix = 0.1", "replicate 2, ddp (dense)"),
    ("sparse", "form = jsd", "ring 2 · tp 2 · ep 2 (moe)"),
    ("sparse", "mix = 0.1", "fsdp 2 · ep 2, balance bias (moe)"),
])  # fmt: skip
def test_a_teacher_beside_the_model_costs_what_the_plan_says(teacher, settings, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    topology = evolve(BY_NAME[name], shared=tuple(s for s in BY_NAME[name].shared if not s.startswith("loss")))
    if teacher == "sparse":
        make_sparse_teacher(tmp_path / teacher, 258)
    else:
        make_teacher(tmp_path / teacher, 258, **(SMALL if teacher == "small" else THREE_HEADS))
    hold_against_the_trace(plan_of(topology, tmp_path, more=LIVE.format(teacher, settings)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (2, "tp 2, z loss (dense)"),
        (1, "fsdp 2, three microbatches (dense)"),
        (1, "tp 2, without loss (dense)"),
        (2, "fsdp 2 · tp 2 (dense)"),
        (2, "ring 2 · ulysses 2, fold none (dense)"),
        (1, "fsdp 2 · ep 2, full recomputation (moe)"),
        (2, "tp 2, tiled, without sequence (dense)"),
        (1, "replicate 2, ddp (dense)"),
        (2, "tp 4, uneven vocabulary, tied (dense)"),
        (1, "fsdp 2, tied (dense)"),
        pytest.param(1, "pp 2, gpipe (dense)"),
        *(
            (modules, name)
            for modules, name in (
                (2, "pp 2, gpipe (dense)"),
                (1, "pp 2, tied (dense)"),
                (1, "pp 2, interleaved_1f1b (dense)"),
                (1, "pp 2 · fsdp 2 · tp 2 (dense)"),
                (2, "pp 2 · fsdp 2 · tp 2 (dense)"),
                (1, "pp 2, three microbatches (dense)"),
            )
        ),
    ],
)
def test_modules_that_predict_further_tokens_cost_what_the_plan_says(modules, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    topology = evolve(BY_NAME[name], shared=(*BY_NAME[name].shared, f"model.mtp={modules}"))
    hold_against_the_trace(plan_of(topology, tmp_path))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("fsdp 2 · tp 2 (dense)", "adafactor"),
        ("fsdp 2 · tp 2 (dense)", "muon"),
        *(
            (name, optimizer)
            for name in ("fsdp 4 · ep 2 (moe)", "pp 2 · fsdp 2 · tp 2 (dense)")
            for optimizer in ("muon", "adafactor", "adam_mini")
        ),
        ("fsdp 2 · tp 2 (dense)", "adam_mini"),
    ],
)
def test_an_optimizer_of_whole_matrices_costs_what_the_plan_says(name, optimizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(BY_NAME[name], tmp_path, optimizer=f"{optimizer} {{ lr = 0.01")
    assert any(call.node == "step.optimizer" for each in plan.estimates.classes for call in each.traffic)
    hold_against_the_trace(plan)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("fsdp 2 · tp 2 (dense)", "heads = true"),
        ("fsdp 2 · tp 2 (dense)", "neurons = 0.9"),
        ("fsdp 4 · ep 2 (moe)", "neurons = 0.9"),
    ],
)
def test_muon_by_heads_and_neurons_costs_what_the_plan_says(name, setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(BY_NAME[name], tmp_path, optimizer=f"muon {{ lr = 0.01, {setting}"))


@pytest.mark.slow
def test_whole_matrices_on_64_ranks_cost_what_the_plan_says(monkeypatch):
    monkeypatch.chdir(SPECS.parent)
    compiled = plan_from_spec(SPECS / "llama_8b_64gpu.xtrain", ("optimizer=muon",))
    assert compiled.plan is not None, compiled.diagnostics.render()
    assert compiled.plan.mesh.world_size == 64
    assert any(call.node == "step.optimizer" for each in compiled.plan.estimates.classes for call in each.traffic)
    hold_against_the_trace(compiled.plan)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "optimizer",
    ["adamw8bit { lr = 0.01, block = 8", "adamw { lr = 0.01, states = bf16",
        "schedule_free { lr = 0.01",
        "muon { lr = 0.01, states = bf16"],
)  # fmt: skip
def test_moments_in_other_formats_cost_what_the_plan_says(optimizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(BY_NAME["fsdp 2 · tp 2 (dense)"], tmp_path, optimizer=optimizer))


@pytest.mark.matrix
@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t.name not in FEW], ids=lambda t: t.name)
def test_every_layout_costs_what_its_plan_says(topology, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(topology, tmp_path, shallow=False))


IN_CI = ("30b",)
ALL = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.matrix) for name in WIDE]


@pytest.mark.parametrize("name", ALL)
def test_wide_models_in_two_formats_cost_what_their_plans_say(name, monkeypatch):
    """Without `compile`: traces run blocks operation by operation."""
    monkeypatch.chdir(SPECS.parent)
    spec, *sets = WIDE[name]
    compiled = plan_from_spec(SPECS / spec, (*sets, "compile.mode=none"))
    assert compiled.plan is not None, compiled.diagnostics.render()
    hold_against_the_trace(compiled.plan)


def plan_of(
    topology: Topology, folder: Path, *, more: str = "", optimizer: str | None = None, shallow: bool = True
) -> Plan:
    trial = evolve(topology.trial("fp32", shallow=shallow), more=more)
    trial = trial if optimizer is None else evolve(trial, optimizer=optimizer)
    (folder / "data.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    sets = ("precision.params=fp32", "workspace.root=runs", *trial.settings, *topology.layout)
    compiled = plan_from_spec(trial.write(folder, alone=False), sets)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


WIDE_VOCABULARY = """
experiment wide {{ seed = 1, budget = 10 steps }}
model llama {{ dim = 1024, layers = 2, heads = 8, kv_heads = 8, vocab = 128256 }}
tokenizer bytes
dataset lines {{ source = synthetic(), holdout = 10% }}
batch {{ sequence = 4096, micro = 2, rows = 2 }}
precision {{ params = fp32, compute = bf16 }}
optimizer adamw {{ lr = 1e-3 }}
{more}
"""


@pytest.mark.matrix
def test_a_loss_of_pairs_takes_no_more_memory_than_the_cross_entropy(tmp_path, monkeypatch):
    """With a vocabulary of 128 k and rows of 8192 tokens, whose logits are 4 GiB: as planned, and as traced."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbered.py").write_text(PARTS)
    found = []
    for loss in ("loss cross_entropy", CHAIN.format(kind="pairs") + "loss dpo { reference = precomputed }"):
        (tmp_path / "wide.xtrain").write_text(WIDE_VOCABULARY.format(more=loss))
        compiled = plan_from_spec(tmp_path / "wide.xtrain")
        assert compiled.plan is not None, compiled.diagnostics.render()
        (traced,) = trace_plan(compiled.plan)
        (closed,) = compiled.plan.estimates.classes
        found.append((traced.memory.total_bytes, closed.memory.total_bytes - closed.memory.reserve))
    for plain, pairs in zip(*found, strict=True):
        assert pairs <= 1.05 * plain
    assert found[1][1] == pytest.approx(found[1][0], rel=0.06)
