"""References of losses: computed in every layout as in one process, once, with the weights that are meant."""

import json
import shutil

import numpy as np
import pytest
from attrs import evolve
from forked_ranks import Mutation, Outcome
from projects import events, records
from topologies import BY_NAME
from trials import TOLERANCE, Laboratory, Trial, gaps

PAIRS = (
    'dataset.lines.source=jsonl("pairs.jsonl")',
    "dataset.lines.chosen=good",
    "dataset.lines.rejected=bad",
)
DPO = "loss dpo { beta = 0.5, chunk = 8 KiB }"
LAYOUTS = (
    "pp 2 · fsdp 2 · tp 2 (dense)", "fsdp 2, three microbatches (dense)", "tp 2, uneven vocabulary (dense)",
    "tp 2, without loss (dense)", "ring 2 (dense)", "ulysses 2 (dense)", "pp 2, zbv (dense)", "pp 2 · ring 2 (dense)",
    "fsdp 2 · ep 2 (moe)",
)  # fmt: skip
ORDINARY = ("pp 2 · ring 2 (dense)",)
CASES = [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.matrix) for name in LAYOUTS]


def trial_of(lab: Laboratory, layout: str, loss: str = DPO) -> Trial:
    """Pairs of texts that begin alike, several of them in a row."""
    answers = [(f"{i} + 5 = ", f"{i + 5}{'!' * (i % 4)}", f"{i + 6}{'?' * (i % 3)}") for i in range(60)]
    lines = [json.dumps({"good": prompt + good, "bad": prompt + bad}) for prompt, good, bad in answers]
    (lab.folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    trial = BY_NAME[layout].trial("fp64", shallow=True)
    return evolve(trial, settings=(*trial.settings, *PAIRS), more=loss)


def run(lab: Laboratory, trial: Trial, sets: tuple[str, ...], root: str, **how: object) -> Outcome:
    """With a cache of its own."""
    shutil.rmtree(lab.folder / root, ignore_errors=True)
    return lab.run(trial, (*sets, f"workspace.root={root}"), saves=False, **how)


def column(lab: Laboratory, root: str) -> np.ndarray:
    """What is in the cache."""
    (found,) = (lab.folder / root / "cache" / "reference").iterdir()
    return np.fromfile(found / "logprobs.bin", dtype=np.float64)


@pytest.mark.parametrize("layout", CASES)
def test_a_layout_computes_what_one_process_does(lab: Laboratory, layout: str):
    trial = trial_of(lab, layout)
    alone = run(lab, trial, (), "alone", alone=True)
    outcome = run(lab, trial, BY_NAME[layout].layout, "ranks")
    ours, theirs = column(lab, "ranks"), column(lab, "alone")
    assert ours.shape == theirs.shape and np.array_equal(np.isnan(ours), np.isnan(theirs))
    known = ~np.isnan(theirs)
    assert known.sum() > 100 and (theirs[known] < 0).all() and np.ptp(theirs[known]) > 1
    assert np.abs(ours[known] - theirs[known]).max() < 1e-12
    assert alone.curve[0][1] != 0 and gaps(outcome, alone).worst < TOLERANCE["fp64"]
    held, expected = ([each.evals[-1]["objective"], *each.evals[-1]["metrics"].values()] for each in (outcome, alone))
    assert len(held) == 5 and held == pytest.approx(expected, rel=1e-10, abs=1e-10)
    *_, told = events(outcome.directory, "reference")
    assert told["computed"] and told["done"] == told["rows"] > 0 and told["tokens"] == len(ours)


def test_held_out_pairs_have_a_reference_too(lab: Laboratory):
    """Of weights that are the reference no answer is preferred: in evaluations as in steps."""
    trial = evolve(trial_of(lab, LAYOUTS[0]), steps=1, optimizer="adamw { lr = 1e-30")
    other = 'dataset other { source = jsonl("pairs.jsonl"), chosen = "good", rejected = "bad", holdout = 100% }'
    more = f"{other}\nmixture {{ lines = 1 }}\non finish eval other {{ batches = none }}\n{DPO}"
    outcome = run(lab, evolve(trial, more=more), (), "alone", alone=True)
    assert {event["dataset"] for event in outcome.evals} == {"lines", "other"}
    for event in outcome.evals:
        assert event["objective"] == pytest.approx(np.log(2), rel=1e-12)
        assert event["metrics"]["rewards/margin"] == pytest.approx(0, abs=1e-12)
    told = {event["dataset"]: event["rows"] for event in events(outcome.directory, "reference")}
    assert told.keys() == {"lines", "other"} and min(told.values()) > 0


@pytest.mark.slow
def test_a_run_over_two_datasets_of_pairs_goes_on_bit_for_bit(lab: Laboratory):
    """From the middle of a mixture, with what is minimised, measured and evaluated."""
    trial = evolve(trial_of(lab, LAYOUTS[0]), steps=4)
    (lab.folder / "more.jsonl").write_text("".join((lab.folder / "pairs.jsonl").read_text().splitlines(True)[::3]))
    other = 'dataset other { source = jsonl("more.jsonl"), chosen = "good", rejected = "bad" }'
    trial = evolve(trial, more=f"{other}\nmixture {{ lines = 2, other = 1 }}\n{DPO}")
    whole, later = lab.resumed(trial, ("batch.micro=2",), "pairs")
    lines, again = (records(each.directory, "metrics") for each in (whole, later))
    names = [name for name in lines[0] if name.startswith(("objective", "rewards/", "loss/", "rows/"))]
    assert len(names) == 1 + 4 + 2 + 2
    assert [[line.get(name) for name in names] for line in again] == [
        [line.get(name) for name in names] for line in lines[1:]
    ]
    assert later.evals[-1]["objective"] == whole.evals[-1]["objective"]


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["own_rows_of_reference", "empty_reference"])
def test_a_fault_is_noticed(lab: Laboratory, fault: str):
    layout = "fsdp 2, three microbatches (dense)"
    trial = trial_of(lab, layout)
    alone = run(lab, trial, (), "alone", alone=True)
    outcome = run(lab, trial, BY_NAME[layout].layout, "ranks", mutation=Mutation(fault))
    assert gaps(outcome, alone).worst > 1e3 * TOLERANCE["fp64"]


@pytest.mark.slow
def test_processes_that_read_find_the_numbers(lab: Laboratory):
    """Of a trial that others read, every step is the same bit for bit."""
    trial = trial_of(lab, LAYOUTS[1])
    alone, read = (run(lab, trial, (f"batch.workers={count}",), "alone", alone=True) for count in (0, 1))
    assert alone.curve == read.curve and all(np.isfinite(each).all() for each in read.curve)
