"""Losses of pairs, sequences and weighted tokens on layouts: what one process minimises, measures and learns."""

import json

import pytest
from attrs import evolve
from forked_ranks import Mutation
from packed_rows import CHAIN, PARTS
from projects import records
from topologies import BY_NAME, Topology
from trials import TOLERANCE, Laboratory, Trial, gaps

# (loss, layout) of the ordinary tests; the others are in the matrix.
LOSSES = {
    "dpo": ("pairs", "loss dpo { label_smoothing = 0.1, reference = precomputed, chunk = 8 KiB }"),
    "ipo": ("pairs", "loss dpo { form = ipo, reference = precomputed, chunk = 8 KiB }"),
    "orpo": ("pairs", "loss orpo { beta = 0.5, chunk = 8 KiB }"),
    "cpo": ("pairs", "loss cpo { chunk = 8 KiB }"),
    "simpo": ("pairs", "loss simpo { chunk = 8 KiB }"),
    "kto": ("sequences", "loss kto { beta = 0.5, undesirable = 1.5, reference = precomputed, chunk = 8 KiB }"),
    "ppo": ("sequences",
        "loss ppo { dual_clip = 3.0, kl = k2, kl_weight = 0.1, reference = precomputed, chunk = 8 KiB }"),
    "grpo": ("sequences", "loss grpo { kl = k3, kl_weight = 0.1, reference = precomputed, chunk = 8 KiB }"),
    "dr_grpo": ("sequences", "loss grpo { normalise = dr_grpo, max_tokens = 40, chunk = 8 KiB }"),
    "cispo": ("sequences", "loss cispo { normalise = sequence, chunk = 8 KiB }"),
    "gspo": (
        "sequences",
        "loss gspo { clip_low = 0.2, clip_high = 0.3, kl = k1, kl_weight = 0.1, chunk = 8 KiB\n"
        "reference = precomputed }",
    ),
    "importance": ("sequences", "loss importance_sampling { chunk = 8 KiB }"),
    "bradley_terry": ("pairs", "loss bradley_terry { margin = true, centre = 0.1 }"),
    "regression": ("sequences", "loss regression"),
    "adapted": ("pairs", "loss bradley_terry\nadapter lora { rank = 2 }"),
    "weighted": ("sequences",
        "loss cross_entropy { weighted = true, focal = 1.5, label_smoothing = 0.1, z_loss = 0.1, chunk = 8 KiB }"),
}  # fmt: skip
OWN = '''
import torch
import torch.nn.functional as F
from xtrain import loss

@loss(unit="pair", columns=["ref_logprobs"])
def own_pairs(logprob_U, ref_logprobs, entropy_T, tokens_U, *, beta: float = 0.1):
    """Of everything that a loss of pairs may read."""
    chosen_U, rejected_U = logprob_U - ref_logprobs
    return -F.logsigmoid(beta * (chosen_U - rejected_U)) - 0.1 * (entropy_T / tokens_U).sum(0)

@loss(unit="sequence", columns=["advantages"], values=["label"])
def own_sequences(logprob_U, advantages, label, tokens_U):
    return (logprob_U / tokens_U - label).square() - advantages * logprob_U / tokens_U**2

@loss(columns=["advantages", "logprobs"])
def own_tokens(logprob_T, advantages, logprobs, *, low: float = 0.5):
    return -torch.clamp((logprob_T - logprobs).exp(), min=low) * advantages
'''
LOSSES |= {
    "own pairs": ("pairs", 'use "losses.py"\nloss own_pairs { beta = 0.2, reference = precomputed, chunk = 8 KiB }'),
    "own sequences": ("sequences", 'use "losses.py"\nloss own_sequences { chunk = 8 KiB }'),
    "own tokens": ("sequences", 'use "losses.py"\nloss own_tokens { chunk = 8 KiB, z_loss = 0.1 }'),
}
HYBRID = {"tp 2 (hybrid)": Topology(model="hybrid", tp=2), "ring 2 (hybrid)": Topology(model="hybrid", ring=2)}
DELTA = {"tp 2 (delta)": Topology(model="delta", tp=2), "ring 2 (delta)": Topology(model="delta", ring=2)}
NAMED = {**BY_NAME, **HYBRID, **DELTA}
LAYOUTS = (
    "pp 2 · fsdp 2 · tp 2 (dense)", "fsdp 2, three microbatches (dense)", "tp 2, uneven vocabulary (dense)",
    "tp 2, without loss (dense)", "ring 2 (dense)", "ulysses 2 (dense)", "pp 2, zbv (dense)", "pp 2 · ring 2 (dense)",
    "fsdp 2 · ep 2 (moe)", "one rank, four microbatches (moe)", *HYBRID,
)  # fmt: skip
ORDINARY = {
    ("dpo", "tp 2, uneven vocabulary (dense)"),
    ("bradley_terry", "tp 2, uneven vocabulary (dense)"),
}
CASES = [pytest.param(loss, layout, marks=() if (
    loss, layout,
) in ORDINARY else pytest.mark.matrix) for loss in LOSSES for layout in LAYOUTS]  # fmt: skip
CASES += [pytest.param("dpo", layout, marks=pytest.mark.matrix) for layout in DELTA]


def trial_of(lab: Laboratory, loss: str, layout: str) -> Trial:
    (lab.folder / "numbered.py").write_text(PARTS)
    (lab.folder / "losses.py").write_text(OWN)
    topology, (kind, text) = NAMED[layout], LOSSES[loss]
    trial = topology.trial("fp64", shallow=True)
    return evolve(trial, align=1, more=CHAIN.format(kind=kind) + text)


@pytest.mark.parametrize(("loss", "layout"), CASES)
def test_a_layout_minimises_what_one_process_does(lab: Laboratory, loss: str, layout: str):
    trial = trial_of(lab, loss, layout)
    alone = lab.alone(trial)
    outcome = lab.run(trial, NAMED[layout].layout, saves=False)
    found = gaps(outcome, alone)
    limit = TOLERANCE["fp64"]
    assert not found.beyond(limit)
    ours, theirs = (records(one.directory, "metrics") for one in (outcome, alone))
    names = [name for name in theirs[0] if name == "objective" or name.startswith(("rewards/", "policy/"))]
    assert len(names) == 1 + MEASURED[loss]
    for mine, other in zip(ours, theirs, strict=True):
        assert [mine[name] for name in names] == pytest.approx([other[name] for name in names], rel=limit, abs=limit)
    held_out = [one.evals[-1] for one in (outcome, alone)]
    assert list(held_out[1].get("metrics", {})) == names[1:]
    found = [[each["objective"], *each.get("metrics", {}).values()] for each in held_out]
    assert found[0] == pytest.approx(found[1], rel=limit, abs=limit)


@pytest.mark.parametrize(
    "loss", ["dpo", "grpo", *(pytest.param(n, marks=pytest.mark.matrix) for n in ("gspo", "ppo", "bradley_terry"))]
)
def test_evaluations_measure_what_steps_do(lab: Laboratory, loss: str):
    """Of the same rows and weights: a step that takes all rows and hardly moves, and an evaluation behind it."""
    trial = trial_of(lab, loss, "ring 2 (dense)")
    texts = [f"{number} " + "abc def " * (4 + number % 3) for number in range(trial.rows)]  # each fills a row
    (lab.folder / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = 'source = jsonl("few.jsonl")'
    both = f"dataset few {{ {source} }}\ndataset same {{ {source}, holdout = 100% }}"
    more = [both, "mixture { few = 1, lines = 0 }", "on finish eval same { batches = none }", trial.more]
    trial = evolve(trial, more="\n".join(more), steps=1, optimizer="adamw { lr = 1e-30")
    outcome = lab.run(trial, (), alone=True, saves=False)
    (line,) = records(outcome.directory, "metrics")
    event = next(each for each in outcome.evals if each["dataset"] == "same")
    for name, value in (("objective", event["objective"]), *event["metrics"].items()):
        assert line[name] == pytest.approx(value, rel=1e-12)


def test_metrics_of_policies_are_means_over_tokens(lab: Laboratory):
    """However tokens count for what is minimised."""
    found = []
    for normalise in ("token", "sequence", "dr_grpo, max_tokens = 40"):
        trial = trial_of(lab, "ppo", "ring 2 (dense)")
        loss = f"loss ppo {{ normalise = {normalise}, chunk = 8 KiB }}"
        trial = evolve(trial, more=CHAIN.format(kind="sequences") + loss, steps=1)
        (line,) = records(lab.alone(trial).directory, "metrics")
        found.append({name: value for name, value in line.items() if name.startswith("policy/")})
    assert found[0] == found[1] == found[2] and 0 < found[0]["policy/clipped"] < 1


MEASURED = {
    "kto": 2, "regression": 2, "weighted": 0, "ppo": 5, "grpo": 5, "gspo": 5, "dr_grpo": 4, "cispo": 4, "importance": 4,
}  # fmt: skip
MEASURED |= dict.fromkeys(("own pairs", "own sequences", "own tokens"), 0)
MEASURED |= {name: 4 for name in LOSSES if name not in MEASURED}
# By default a fault in what two ranks share of a pair.
FAULTS = (("dpo", "tp 2, uneven vocabulary (dense)", "cut_pairs"),)
MORE = (
    ("dpo", "fsdp 2, three microbatches (dense)", "own_tokens"),
    ("bradley_terry", "tp 2, uneven vocabulary (dense)", "own_rewards"),
    ("dpo", "pp 2 · ring 2 (dense)", "own_sums"),
    ("dpo", "tp 2, uneven vocabulary (dense)", "numbers_without_labels"),
    ("grpo", "ulysses 2 (dense)", "mean_of_microbatch"),
    ("bradley_terry", "ulysses 2 (dense)", "own_rewards"),
    ("bradley_terry", "tp 2, uneven vocabulary (dense)", "own_summands"),
    ("regression", "ulysses 2 (dense)", "token_before"),
)


@pytest.mark.parametrize(
    ("loss", "layout", "fault"), [*FAULTS, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE)]
)
def test_a_fault_is_noticed(lab: Laboratory, loss: str, layout: str, fault: str):
    trial = trial_of(lab, loss, layout)
    outcome = lab.run(trial, NAMED[layout].layout, mutation=Mutation(fault), saves=False)
    assert gaps(outcome, lab.alone(trial)).worst > 1e3 * TOLERANCE["fp64"]
