"""Pairs of plans, and whether a checkpoint of the first can be gone on with under the second: one row each.

`diff_pairs/` has the specs. The rows that could be decided wrongly without anybody noticing are run for real in
`test_diff_resume.py`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.diff import compare_plans, render_diff, to_json

FOLDER = Path(__file__).parent / "diff_pairs"


@frozen(kw_only=True)
class Pair:
    """Specs `a` and `b` with `--set` texts, and what must be said. effect: of a run that goes on; words: in reasons.

    b: the same spec as `a` unless given. step: that of the checkpoint. certain: False where the data decides.
    """

    name: str
    a: str = "dense"
    b: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    kind: str
    effect: str = ""
    words: tuple[str, ...] = ()
    step: int | None = None
    certain: bool = True


FSDP2 = ("parallel.fsdp.size=2",)
TP2 = ("parallel.tp.size=2",)
ALIGNED = ("collate=to_tensor -> flatten -> shift_tokens -> pack(align = 4)",)
COPIES = ("parallel.stack=ddp", "parallel.fsdp.replicate=2")
RING = ("parallel.cp.size=2", "parallel.cp.ring=2")
LOSS = "loss.kind=cross_entropy"
BIASED = ("model.router.score=sigmoid", "model.router.bias_speed=1e-3")

PAIRS = (
    # the same ---------------------------------------------------------------------------------------------------------
    Pair(name="nothing", kind="same", effect="none"),
    Pair(name="where runs are written", after=("workspace.root=elsewhere",), kind="same", effect="none"),
    Pair(name="what is known of the machines",
        after=("cluster.preset=other", "cluster.memory=64 GiB", "cluster.price=2"), kind="same", effect="none"),
    Pair(name="defaults written out", after=("optimizer.eps=1e-8",), kind="same", effect="none"),
    # safe, without a trace in what is trained -------------------------------------------------------------------------
    Pair(name="cadence", after=("checkpoint.keep=1",), kind="safe", effect="none", words=("checkpoint.keep 3 → 1",)),
    Pair(name="a dataset more to evaluate", b="more_data", kind="safe", effect="none",
        words=("dataset.prose is new: it is evaluated, never trained on", "every eval prose then eval code")),
    Pair(name="another name", b="renamed", kind="safe", effect="none", words=("pair → renamed", "code → programs")),
    Pair(name="bad records that are allowed", after=("dataset.code.bad_records=5",), kind="safe", effect="none",
        words=("dataset.code.bad_records 0 → 5",)),
    Pair(name="deviation of the first weights", after=("model.init_std=0.1",), kind="safe", effect="learning",
        words=("only affects the initial weights",)),
    Pair(name="a longer run at a constant rate", a="moe", after=("experiment.budget=200 steps",), kind="safe",
        effect="none", words=("100 → 200 steps", "up to step 100 is the same as in a run of 200 steps")),
    Pair(name="a longer run before its fall", before=("scheduler.kind=wsd", "scheduler.decay=20 steps"),
        after=("scheduler.kind=wsd", "scheduler.decay=20 steps", "experiment.budget=200 steps"), step=80, kind="safe",
        effect="none", words=("up to step 80 is the same as in a run of 200 steps",)),
    Pair(name="a run that is not to be resumed", after=("checkpoint.resume=false",), kind="safe", effect="none",
        words=("checkpoint.resume false: the run starts from step 0",)),
    Pair(name="how rows are read", after=("batch.prefetch=4", "batch.workers=2"), kind="safe", effect="none",
        words=("batch.prefetch 2 → 4: rows are read earlier or later", "batch.workers 0 → 2")),
    Pair(name="a phase that is yet to come", a="mixed", after=("phase.late.mix={ talks: 9 }",), kind="safe", step=50,
        effect="none", words=("phase.late code 85.7%, talks 14.3% → code 6.06%, prose 3.03%, talks 90.9%",
            "the run reaches this phase at step 81, as it would have from the start")),
    Pair(name="a phase that is put off", a="mixed", after=("phase.late.from=90%",), kind="safe", step=80, effect="none",
        words=("phase.late from step 81 → from step 91",)),
    Pair(name="a rate that is yet to come", a="mixed", after=("phase.late.lr_scale=0.1",), kind="safe", step=79,
        effect="none", words=("phase.late learning rate × 0.5 → × 0.1",)),
    # safe, up to rounding ---------------------------------------------------------------------------------------------
    Pair(name="microbatches of the same rows", after=("batch.micro=8",), kind="safe", effect="rounding",
        words=("8 · 2 → 2 · 8: the same rows in every step",)),
    Pair(name="computed in bf16", after=("precision.compute=bf16",), kind="safe", effect="rounding",
        words=("precision.compute fp32 → bf16", "the state keeps its format")),
    Pair(name="kept in a wider format", before=("precision.params=bf16",), after=("precision.params=fp32",),
        kind="safe", effect="rounding", words=("bf16 → fp32: the saved state is represented exactly",)),
    Pair(name="recomputation", after=("activation.mode=full",), kind="safe", effect="rounding",
        words=("activation mode none → full",)),
    Pair(name="pieces of the loss", after=(LOSS, "loss.chunk=1 MiB"), kind="safe", effect="rounding",
        words=("loss.chunk",)),
    Pair(name="attention kernel", after=("model.attention=mask",), kind="safe", effect="rounding",
        words=("model.attention",)),
    Pair(name="order of a pipeline", a="moe", before=("parallel.pp.size=2",),
        after=("parallel.pp.size=2", "parallel.pp.schedule=gpipe"), kind="safe", effect="rounding",
        words=("parallel.pp.schedule 1f1b → gpipe",)),
    # safe, and something else is learned ------------------------------------------------------------------------------
    Pair(name="learning rate", after=("optimizer.lr=5e-4",), step=10, kind="safe", effect="learning",
        words=("optimizer.lr 0.001 → 0.0005: step 11 takes the rate 0.0005 instead of 0.001",)),
    Pair(name="kind of scheduler", after=("scheduler.kind=linear",), kind="safe", effect="learning",
        words=("scheduler.kind cosine → linear",)),
    Pair(name="warm-up", after=("scheduler.warmup=20 steps",), kind="safe", effect="learning",
        words=("10 steps → 20",)),
    Pair(name="a longer run on a cosine", after=("experiment.budget=200 steps",), step=100, kind="safe",
        effect="learning",
        words=("the curve (cosine) now spans 200 steps; step 101 takes the rate 0.00058 after 0.0001 in step 100",)),
    Pair(name="a shorter run than was done", after=("experiment.budget=40 steps",), step=50, kind="incompatible",
        words=("experiment.budget 40 steps, and the checkpoint is of step 50: nothing is left to train (X722)",)),
    Pair(name="a run that begins where it is to end",
        after=("experiment.budget=50 steps", 'checkpoint.from="runs/a/b"'), step=50, kind="incompatible",
        words=("nothing is left to train (X722)",)),
    Pair(
        name="a run that is to end where it stands",
        after=("experiment.budget=50 steps",),
        step=50,
        kind="safe",
        effect="learning",  # the rate was never as low as it would have been
        words=("the checkpoint is of the last step: only the end of the run is left",),
    ),
    Pair(name="a run at a constant rate that is to end where it stands", a="moe", after=("experiment.budget=50 steps",),
        step=50, kind="safe", effect="none", words=("only the end of the run is left",)),
    Pair(name="clip", after=("optimizer.clip=none",), kind="safe", effect="learning",
        words=("optimizer.clip 1 → none",)),
    Pair(name="z loss", after=(LOSS, "loss.z_loss=1e-4"), kind="safe", effect="learning",
        words=("loss.z_loss 0 → 0.0001",)),
    Pair(name="betas", after=("optimizer.betas=[0.9, 0.99]",), kind="safe", effect="learning", words=("[0.9, 0.99]",)),
    Pair(name="weight of the balance loss", a="moe", after=("model.router.aux_loss=1e-2",), kind="safe",
        effect="learning", words=("model.router.aux_loss 0.001 → 0.01",)),
    Pair(name="speed of the balance biases", a="moe", before=BIASED, after=(BIASED[0], "model.router.bias_speed=1e-2"),
        kind="safe", effect="learning", words=("model.router.bias_speed 0.001 → 0.01",)),
    Pair(name="rows of a step", after=("batch.rows=32",), kind="safe", effect="learning",
        words=("batch.rows 16 → 32: a step takes a different number of rows", "no row is lost or repeated")),
    Pair(name="another mixture", a="mixed", after=("mixture.prose=0.1",), kind="safe", effect="learning", step=50,
        words=("mixture code 60%, prose 30%, talks 10% → code 75%, prose 12.5%, talks 12.5%",
            "each dataset continues at its own position")),
    Pair(name="another temperature", a="mixed", after=("mixture.temperature=2",), kind="safe", effect="learning",
        words=("a checkpoint of step 0 or before continues as if nothing had changed",)),
    Pair(name="a phase that has begun", a="mixed", after=("phase.late.mix={ talks: 9 }",), kind="safe", step=81,
        effect="learning", words=("each dataset continues at its own position",)),
    Pair(name="a phase at no known step", a="mixed", after=("phase.late.mix={ talks: 9 }",), kind="safe",
        effect="learning", words=("a checkpoint of step 80 or before continues as if nothing had changed",)),
    Pair(name="one dataset and several", b="mixed", kind="safe", effect="learning", step=10,
        words=("dataset.prose is new: training starts with its first row", "phase.late is new: code 85.7%")),
    Pair(name="a dataset less", a="mixed", after=("mixture.talks=0",), kind="safe", effect="learning",
        words=("dataset.talks is gone: it is no longer trained on",)),
    # resharded --------------------------------------------------------------------------------------------------------
    Pair(name="more ranks, the same rows", after=FSDP2, kind="resharded", effect="rounding",
        words=("fsdp 1 → 2", "each of 2 data ranks takes 8 rows, not 16")),
    Pair(name="tensor parallel", after=TP2, kind="resharded", effect="rounding", words=("tp 1 → 2",)),
    Pair(name="pipeline", after=("parallel.pp.size=2",), kind="resharded", effect="rounding", words=("pp 1 → 2",)),
    Pair(name="layers of the stages", before=("parallel.pp.size=2", "parallel.pp.layers=[2, 2]"),
        after=("parallel.pp.size=2", "parallel.pp.layers=[3, 1]"), kind="resharded", effect="rounding",
        words=("divided differently",)),
    Pair(name="ulysses, folded or not", before=("parallel.cp.size=2", "parallel.cp.ulysses=2"),
        after=("parallel.cp.size=2", "parallel.cp.ulysses=2", "parallel.cp.fold=none"), kind="resharded",
        effect="rounding", words=("sharded over ulysses → nothing",)),
    Pair(name="experts", a="moe", before=FSDP2, after=(*FSDP2, "parallel.ep.size=2"), kind="resharded",
        effect="rounding", words=("ep 1 → 2",)),
    Pair(name="a ring where documents are aligned", before=ALIGNED, after=(*ALIGNED, *RING), kind="resharded",
        effect="rounding", words=("ring 1 → 2",)),
    Pair(name="copies to shards", before=COPIES, after=FSDP2, kind="resharded", words=("replicate 2 → 1, fsdp 1 → 2",)),
    Pair(name="copies of another stack", before=COPIES, after=("parallel.fsdp.size=1", "parallel.fsdp.replicate=2"),
        kind="safe", effect="rounding", words=("parallel.stack ddp → parallel",)),
    Pair(name="copies to one rank", before=COPIES, kind="resharded", effect="rounding", words=("replicate 2 → 1",)),
    Pair(name="other ranks and another rate", after=(*FSDP2, "optimizer.lr=2e-3"), kind="resharded", effect="learning",
        words=("fsdp 1 → 2", "optimizer.lr 0.001 → 0.002")),
    Pair(name="more ranks, and so other rows", before=("batch.rows=auto",), after=("batch.rows=auto", *FSDP2),
        kind="resharded", effect="learning", words=("batch.rows 2 → 4",)),
    # incompatible -----------------------------------------------------------------------------------------------------
    Pair(name="length of rows", after=("batch.sequence=128",), kind="incompatible",
        words=("batch.sequence 256 → 128",)),
    Pair(name="seed", after=("experiment.seed=2",), kind="incompatible",
        words=("experiment.seed 1 → 2: rows are in another order",)),
    Pair(name="held-out share", after=("dataset.code.holdout=5%",), kind="incompatible", certain=False,
        words=("dataset.code.holdout 0.01 → 0.05: other documents",)),
    Pair(name="nothing held out", after=("dataset.code.holdout=0%",), kind="incompatible",
        words=("dataset.code.holdout 0.01 → 0: other documents",)),
    Pair(name="long documents", after=("dataset.code.oversized=skip",), kind="incompatible", certain=False,
        words=("split → skip",)),
    Pair(name="other text", b="other_data", kind="incompatible", certain=False,
        words=("jsonl(data/*.jsonl) → jsonl(other/*.jsonl)",)),
    Pair(name="other content of one of several", a="mixed", after=('dataset.prose.source=text("other/*.txt")',),
        kind="incompatible", certain=False, words=("dataset.prose.source text(prose/*.txt) → text(other/*.txt)",)),
    Pair(name="what is predicted", a="mixed", after=("dataset.talks.train_on=last",), kind="incompatible",
        certain=False, words=("dataset.talks.train_on assistant → last: other tokens would be predicted",)),
    Pair(name="template", a="mixed", after=("dataset.talks.template=chatml",), kind="incompatible", certain=False,
        words=("dataset.talks.template plain → chatml: rows would have other text, unless both templates write",)),
    Pair(name="form of records", a="mixed", after=("dataset.talks.messages=none", "dataset.talks.template=auto"),
        kind="incompatible", words=("dataset.talks.text chat → text: records would be read in another form",)),
    Pair(name="options of a source", before=("dataset.code.source=synthetic(length = 9)",),
        after=("dataset.code.source=synthetic(length = 8)",), kind="incompatible",
        words=("dataset.code.source length 9 → 8: rows would have other text",)),
    Pair(name="field of the text", after=("dataset.code.text=body",), kind="incompatible", words=("text → body",)),
    Pair(name="alignment", after=("collate=to_tensor -> flatten -> shift_tokens -> pack(align = 8)",),
        kind="incompatible", words=("collate.pack.align 1 → 8",)),
    Pair(name="a ring, and so another alignment", after=RING, kind="incompatible", words=("collate.pack.align 1 → 4",)),
    Pair(name="tokenizer", after=("tokenizer.source=assets/tokenizer", "model.vocab=258"), kind="incompatible",
        words=("tokenizer bytes → assets/tokenizer",)),
    Pair(name="a tokenizer that may have been moved", before=("tokenizer.source=assets/tokenizer", "model.vocab=300"),
        after=("tokenizer.source=elsewhere/tokenizer", "model.vocab=300"), kind="incompatible", certain=False,
        words=("unless both hold the same tokenizer.json",)),
    Pair(name="vocabulary", after=("model.vocab=320",), kind="incompatible",
        words=("model.vocab 258 → 320: embed_tokens.weight is 258 × 64 there and 320 × 64 here, and 1 more differs",)),
    Pair(name="layers", after=("model.layers=5",), kind="incompatible",
        words=("model.layers 4 → 5: layers.4.input_layernorm.weight", "are not in the checkpoint")),
    Pair(name="tied embeddings", after=("model.tie_embeddings=true",), kind="incompatible",
        words=("model.tie_embeddings false → true: lm_head.weight is in the checkpoint only",)),
    Pair(name="heads of the same shapes", before=("model.kv_heads=8",),
        after=("model.heads=4", "model.kv_heads=4", "model.head_dim=16"), kind="incompatible",
        words=("model.heads 8 → 4: the same weights would give other results",)),
    Pair(name="base of the positions", after=("model.rope_theta=500000.0",), kind="incompatible",
        words=("model.rope_theta 10000 → 500000: the same weights",)),
    Pair(name="kept in a narrower format", after=("precision.params=bf16",), kind="incompatible",
        words=("precision.params fp32 → bf16: parameters and moments would be rounded",)),
    Pair(name="experts of a token", a="moe", after=("model.experts_per_token=4",), kind="incompatible",
        words=("model.experts_per_token 2 → 4: the same weights",)),
    Pair(name="scores of the router", a="moe", after=("model.router.score=sigmoid",), kind="incompatible",
        words=("model.router.score softmax → sigmoid",)),
    Pair(name="balance biases where there were none", a="moe", before=(BIASED[0],), after=BIASED, kind="incompatible",
        words=("bias_speed 0 → 0.001: the plan has load-balancing biases of routers, and the checkpoint has none",)),
    Pair(name="a dense model and one of experts", b="moe", kind="incompatible", words=("experts 0 → 8",)),
)  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> Callable[[str, tuple[str, ...]], Plan]:
    known: dict[tuple[str, tuple[str, ...]], Plan] = {}

    def build(spec: str, sets: tuple[str, ...]) -> Plan:
        if (spec, sets) not in known:
            compiled = plan_from_spec(FOLDER / f"{spec}.xtrain", sets)
            assert compiled.plan is not None, compiled.diagnostics.render()
            known[spec, sets] = compiled.plan
        return known[spec, sets]

    return build


def compare(plans, pair: Pair):
    return compare_plans(plans(pair.a, pair.before), plans(pair.b or pair.a, pair.after), pair.step)


def test_the_table_has_every_verdict_and_no_name_twice():
    assert len(PAIRS) >= 20 and len({pair.name for pair in PAIRS}) == len(PAIRS)
    assert {pair.kind for pair in PAIRS} == {"same", "safe", "resharded", "incompatible"}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_pair_has_the_right_verdict_for_the_right_reason(plans, pair: Pair):
    verdict = compare(plans, pair).verdict
    said = [f"{reason.path} {reason.text}" for reason in verdict.reasons]
    assert verdict.kind == pair.kind, said
    assert verdict.certain == pair.certain, said
    if pair.effect:
        assert verdict.effect == pair.effect, said
    for words in pair.words:
        assert any(words in reason for reason in said), (words, said)
    assert bool(said) == (pair.kind != "same")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_other_way_round_is_refused_for_the_same_kinds_of_reasons(plans, pair: Pair):
    """What changes the model or the rows does so both ways; only a wider format cannot be taken back."""
    there = compare(plans, pair).verdict.kind
    back = compare_plans(plans(pair.b or pair.a, pair.after), plans(pair.a, pair.before)).verdict.kind
    formats = {"kept in a wider format", "kept in a narrower format"}
    ends = {"a shorter run than was done", "a run that begins where it is to end"}
    one_way = {"a run that is not to be resumed"} | formats | ends
    assert (there == back) != (pair.name in one_way)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_every_page_fits(plans, pair: Pair):
    found = compare(plans, pair)
    text = render_diff(found, ("a.xtrain", "b.xtrain"))
    assert max(map(len, text.splitlines())) <= 100
    assert pair.kind in text and "\x1b" not in text
    assert to_json(found)["verdict"]["kind"] == pair.kind
