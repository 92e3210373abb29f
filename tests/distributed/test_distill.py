"""Learning from what a teacher has stored, on layouts: what one process minimises, measures and learns."""

import json

import pytest
from attrs import evolve
from forked_ranks import Mutation
from projects import records
from teachers import make_teacher, taught
from topologies import BY_NAME
from trials import TOLERANCE, Laboratory, Trial, gaps

from xtrain.planner.load import plan_from_spec

LOSSES = {
    "jsd": "form = jsd, beta = 0.3, temperature = 2, mix = 0.25, z_loss = 0.1",
    "forward": "form = forward_kl",
    "reverse": "form = reverse_kl, temperature = 0.7",
}
NAMES = ("objective", "distill/divergence", "distill/agreement")
LAYOUTS = (
    "fsdp 2, three microbatches (dense)", "tp 2, uneven vocabulary (dense)", "tp 2, without loss (dense)",
    "ring 2 (dense)", "ulysses 2 (dense)", "pp 2, zbv (dense)", "pp 2 · fsdp 2 · tp 2 (dense)", "fsdp 2 · ep 2 (moe)",
)  # fmt: skip
ORDINARY = {("jsd", LAYOUTS[0])}  # a live teacher's row, in test_live_teacher.py, has the same form under tp
CASES = [pytest.param(loss, layout, marks=() if (
    loss, layout,
) in ORDINARY else pytest.mark.matrix) for loss in LOSSES for layout in LAYOUTS]  # fmt: skip


def trial_of(lab: Laboratory, loss: str, layout: str) -> Trial:
    """What a teacher stores of it is in the cache then."""
    topology = BY_NAME[layout]
    vocab = 259 if "model.vocab=259" in topology.shared else 258
    make_teacher(lab.folder / f"teacher-{vocab}", vocab)
    text = f'loss distill {{ teacher = "teacher-{vocab}", top = 12, chunk = 8 KiB, {LOSSES[loss]} }}'
    shared = tuple(each for each in topology.shared if not each.startswith("loss"))
    trial = evolve(evolve(topology, shared=shared).trial("fp64", shallow=True), more=text)
    assert taught(lab.plan(trial, (), alone=True), lab.folder) == 0
    return trial


@pytest.mark.parametrize(("loss", "layout"), CASES)
def test_a_layout_learns_what_one_process_does(lab: Laboratory, loss: str, layout: str):
    trial = trial_of(lab, loss, layout)
    alone = lab.alone(trial)
    outcome = lab.run(trial, BY_NAME[layout].layout, saves=False)
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert not found.beyond(limit)
    both = list(zip(*(records(one.directory, "metrics") for one in (outcome, alone)), strict=True))
    assert len(both) == trial.steps
    for mine, other in both:
        assert [mine[name] for name in NAMES] == pytest.approx([other[name] for name in NAMES], rel=limit)
        assert other["distill/divergence"] > 0


FAULTS = (
    ("jsd", "fsdp 2, three microbatches (dense)", "own_tokens"),
    ("forward", "tp 2, uneven vocabulary (dense)", "own_rest"),
)


@pytest.mark.matrix
@pytest.mark.parametrize(("loss", "layout", "fault"), FAULTS)
def test_a_fault_is_noticed(lab: Laboratory, loss: str, layout: str, fault: str):
    trial = trial_of(lab, loss, layout)
    outcome = lab.run(trial, BY_NAME[layout].layout, mutation=Mutation(fault), saves=False)
    assert gaps(outcome, lab.alone(trial)).worst > 1e3 * TOLERANCE["fp64"]


STUDENT = """experiment student { seed = 1, budget = 60 steps }
model qwen3 { dim = 64, layers = 2, heads = 4, ffn = 128, init_std = 0.1 }
tokenizer bytes
dataset words { source = jsonl("words.jsonl") }
batch { sequence = 64, rows = 8, micro = 8 }
loss distill { teacher = "teacher-258", top = 8 }
optimizer adamw { lr = 1e-2, weight_decay = 0 }
launch { device = cpu }
workspace { root = "runs" }
every 1 step log
every 1000 steps checkpoint
"""


@pytest.mark.slow  # by default layouts above, and the loss of steps and evaluations against vectors of another library
def test_a_student_learns_what_its_teacher_holds_probable(lab: Laboratory):
    """What that is, random weights decide: the labels do not show it."""
    words = ["".join(chr(97 + (i * j * j + j) % 26) for j in range(20)) for i in range(24)]
    (lab.folder / "words.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    make_teacher(lab.folder / "teacher-258", 258)
    spec = lab.folder / "student.xtrain"
    spec.write_text(STUDENT)
    plan = plan_from_spec(spec).plan
    assert plan is not None and taught(plan, lab.folder) == 0
    found = records(lab.ranks.run(plan, lab.folder, name="student", saves=False).directory, "metrics")
    first, last = found[0], found[-1]
    assert first["distill/agreement"] < 0.1 and last["distill/agreement"] > 0.8
    assert last["distill/divergence"] < 0.1 * first["distill/divergence"]
    assert last["loss"] > first["loss"]  # labels are other tokens
