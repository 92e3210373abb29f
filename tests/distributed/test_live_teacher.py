"""Learning from a teacher that computes beside the student, on layouts: what one process minimises, measures and
learns."""

import pytest
from attrs import evolve
from forked_ranks import Mutation
from projects import records
from teachers import make_sparse_teacher, make_teacher
from topologies import BY_NAME
from trials import TOLERANCE, Laboratory, Trial, gaps

LOSSES = {
    "jsd": "form = jsd, beta = 0.3, temperature = 2, mix = 0.25, z_loss = 0.1",
    "forward": "form = forward_kl, mix = 0.1",
    "reverse": "form = reverse_kl, temperature = 0.7",
}
NAMES = ("objective", "distill/divergence", "distill/agreement")
# small: of other widths than the student, which tp divides too. odd: tp does not.
TEACHERS = {
    "small": {"hidden_size": 24, "num_hidden_layers": 3},
    "odd": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1},
}
# (loss, teacher, layout)
ORDINARY = (("jsd", "small", "tp 2, uneven vocabulary (dense)"),)
MATRIX = (
    ("forward", "odd", "tp 2, without loss (dense)"),
    ("reverse", "small", "fsdp 2, three microbatches (dense)"),
    ("reverse", "small", "tp 2, uneven vocabulary (dense)"),
    ("forward", "small", "tp 2, uneven vocabulary (dense)"),
    ("jsd", "odd", "tp 2, uneven vocabulary (dense)"),
    ("jsd", "small", "tp 2, without loss (dense)"),
    ("forward", "small", "ring 2 (dense)"),
    ("jsd", "small", "ulysses 2 (dense)"),
    ("jsd", "small", "pp 2, zbv (dense)"),
    ("forward", "small", "pp 2, zero_bubble (dense)"),
    ("reverse", "small", "pp 2 · fsdp 2 · tp 2 (dense)"),
    ("forward", "small", "replicate 2, ddp (dense)"),
    ("jsd", "small", "fsdp 2 · ep 2 (moe)"),
    ("jsd", "sparse", "fsdp 2 · ep 2 (moe)"),
    ("forward", "sparse", "fsdp 2, three microbatches (dense)"),
    ("reverse", "sparse", "ring 2 · tp 2 · ep 2 (moe)"),
)


def trial_of(lab: Laboratory, loss: str, teacher: str, layout: str) -> Trial:
    topology = BY_NAME[layout]
    vocab = 259 if "model.vocab=259" in topology.shared else 258
    folder = f"live-{teacher}-{vocab}"
    if not (lab.folder / folder).exists():
        make = make_sparse_teacher if teacher == "sparse" else make_teacher
        make(lab.folder / folder, vocab, **TEACHERS.get(teacher, {}))
    text = f'loss distill {{ teacher = "{folder}", live = true, chunk = 8 KiB, {LOSSES[loss]} }}'
    shared = tuple(each for each in topology.shared if not each.startswith("loss"))
    return evolve(evolve(topology, shared=shared).trial("fp64", shallow=True), more=text)


@pytest.mark.matrix  # by default a model that samples is taught: test_rollouts.py
@pytest.mark.parametrize(("loss", "teacher", "layout"), [*ORDINARY, *MATRIX])
def test_a_layout_learns_what_one_process_does(here: Laboratory, loss: str, teacher: str, layout: str):
    trial = trial_of(here, loss, teacher, layout)
    alone = here.alone(trial)
    outcome = here.run(trial, BY_NAME[layout].layout, saves=False)
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit and found.eval < limit and found.routing < limit
    assert not {tensor: gap for tensor, gap in found.tensors.items() if not gap < limit}
    for mine, other in zip(*(records(one.directory, "metrics") for one in (outcome, alone)), strict=True):
        assert [mine[name] for name in NAMES] == pytest.approx([other[name] for name in NAMES], rel=limit)
        assert other["distill/divergence"] > 0


FAULTS = (
    ("jsd", "small", "tp 2, uneven vocabulary (dense)", "own_divergence"),
    ("reverse", "small", "fsdp 2, three microbatches (dense)", "own_tokens"),
)


@pytest.mark.matrix
@pytest.mark.parametrize(("loss", "teacher", "layout", "fault"), FAULTS)
def test_a_fault_is_noticed(here: Laboratory, loss: str, teacher: str, layout: str, fault: str):
    trial = trial_of(here, loss, teacher, layout)
    outcome = here.run(trial, BY_NAME[layout].layout, mutation=Mutation(fault), saves=False)
    assert gaps(outcome, here.alone(trial)).worst > 1e3 * TOLERANCE["fp64"]
