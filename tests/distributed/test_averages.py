"""Averaged weights: what they are, on whatever ranks; who works with them; and that nothing else notices."""

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from checkpoints import folder, tensors
from forked_ranks import Mutation, Outcome
from projects import events
from topologies import BY_NAME, ELSEWHERE, Topology
from trials import TOLERANCE, Laboratory, Trial, gaps, stray_shapes

MORE = """
every 1 step checkpoint
checkpoint {{ keep = none }}
every 1 step eval lines {{ batches = 2 }}
ema {{ decay = {decay}, every = {every} }}
"""
DECAY, EVERY, STEPS = 0.6, 2, 4
BIAS = ("model.router.score=sigmoid", "model.router.bias_speed=1e-2")
AT_LENGTH = (
    "pp 2 · fsdp 2 · ep 2 (moe)", "one rank, four microbatches (dense)", "fsdp 2 (dense)", "replicate 2, ddp (dense)",
    "replicate 2 · fsdp 2 (dense)", "tp 4, uneven vocabulary, tied (dense)", "tp 2 (moe)", "pp 2, tied (dense)",
    "pp 2, zbv (dense)", "fsdp 4 · ep 2 (moe)", "ring 2 (dense)", "pp 2 · fsdp 2 · tp 2 (dense)",
)  # fmt: skip
TWO = BY_NAME["fsdp 2, one microbatch (dense)"]


def averaging(layout: Topology, params: str = "fp64", *, decay: float = DECAY, every: int = EVERY) -> Trial:
    biased = BIAS if layout.model == "moe" else ()
    more = MORE.format(decay=decay, every=every)
    trial = layout.trial(params)
    return evolve(trial, steps=STEPS, more=more, settings=(*trial.settings, *layout.flat, *biased))


def by_hand(directory: Path, updates: range, decay: float = DECAY) -> dict[str, np.ndarray]:
    """Name → the mean of the weights at these steps, each step weighing `1 / decay` times what the one before does."""
    weights = [{n: t.numpy() for n, t in tensors(folder(directory).path(s)).items()} for s in updates]
    shares = [decay ** (len(updates) - number) for number in range(1, len(updates) + 1)]
    found = {}
    for name in (name for name in weights[0] if name.startswith("model.")):
        whole = sum(each[name] * share for each, share in zip(weights, shares, strict=True))
        found[name.removeprefix("model.")] = whole / sum(shares)
    return found


def averages(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("ema."): value for name, value in state.items() if name.startswith("ema.")}


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for name, value in ours.items():
        assert np.abs(value - theirs[name]).max() <= 1e-12 * np.abs(theirs[name]).max(), name


@pytest.mark.parametrize(
    "name",
    [*ELSEWHERE["averages"], *(pytest.param(name, marks=pytest.mark.slow) for name in AT_LENGTH)],
)  # fmt: skip
def test_the_average_is_the_one_computed_by_hand_and_that_of_one_process(lab: Laboratory, name: str):
    layout = BY_NAME[name]
    trial = averaging(layout)
    outcome, alone = lab.run(trial, layout.layout, timeout=300.0), lab.alone(trial)
    expected = by_hand(outcome.directory, range(EVERY, STEPS + 1, EVERY))
    assert averages(outcome.tensors).keys() == expected.keys() == averages(alone.tensors).keys()
    for state in outcome.whole:
        assert_close(averages(state), expected)
    # Evaluated with averages on ranks that have gathered other weights before: the same losses.
    assert gaps(outcome, alone).worst <= TOLERANCE["fp64"]
    assert stray_shapes(lab.plan(trial, layout.layout), outcome) == []
    saved = tensors(folder(outcome.directory).path(STEPS))
    published = tensors(folder(outcome.directory).pointed("model").path)
    for each, value in averages(outcome.tensors).items():
        np.testing.assert_array_equal(saved[f"ema.{each}"].numpy(), value)
        np.testing.assert_array_equal(published[f"model.{each}"].numpy(), value)


def weights_of(outcome: Outcome) -> list[str]:
    return [event["weights"] for event in outcome.evals]


@pytest.mark.slow
def test_looking_with_averages_changes_nothing_that_is_trained(lab: Laboratory):
    """Also of what is saved beside training; tests/runtime/nn/test_ema.py shows that a copy under way is waited for."""
    trial = evolve(averaging(TWO, "fp32", every=1), steps=2)
    order = f"{trial.more}\nevery 1 step eval lines {{ batches = 1 }} then checkpoint"
    beside = (*TWO.layout, "checkpoint.mode=async")
    looked = lab.run(evolve(trial, more=order), (*beside, "ema.eval=true"))
    not_looked = lab.run(evolve(trial, more=order), (*beside, "ema.eval=false"))
    assert set(weights_of(looked)) == {"averaged"} and set(weights_of(not_looked)) == {"trained"}
    assert looked.curve == not_looked.curve
    for ours, theirs in zip(looked.whole, not_looked.whole, strict=True):
        assert [name for name in theirs if not np.array_equal(ours[name], theirs[name])] == []
    for step in range(1, trial.steps + 1):
        ours, theirs = (tensors(folder(run.directory).path(step)) for run in (looked, not_looked))
        assert [name for name in theirs if not np.array_equal(ours[name], theirs[name])] == [], step


@pytest.mark.slow
def test_what_is_evaluated_is_what_is_published_and_taken_over(lab: Laboratory):
    """A learning rate of nothing evaluates the weights that a run begins with."""
    outcome = lab.run(averaging(TWO), TWO.layout)
    own = folder(outcome.directory)
    expected = averages(outcome.tensors)
    assert expected
    still = evolve(TWO.trial("fp64"), steps=1, settings=TWO.flat)
    for source in (own.pointed("model").path, own.path(STEPS)):
        heir = lab.run(still, (f'checkpoint.pretrained="{source}"', "optimizer.lr=1e-30"))
        (taken,) = events(heir.directory, "pretrained")
        assert taken["weights"] == "averaged"  # of weights alone too, which have no others
        for name, value in expected.items():
            np.testing.assert_array_equal(heir.tensors[name], value)
        assert abs(heir.evals[-1]["loss"] - outcome.evals[-1]["loss"]) < 1e-12


@pytest.mark.slow
def test_a_run_goes_on_with_its_average_and_begins_or_leaves_one_behind(lab: Laboratory):
    """From the middle of another run, which is what going on from one's own checkpoint is."""
    trial = averaging(TWO, every=1)
    bare = evolve(trial, more=trial.more.partition("ema")[0])
    half = STEPS // 2

    def go_on(chosen: Trial, origin: Outcome, layout: tuple[str, ...] = ()) -> tuple[Outcome, str | None, str]:
        """What became of the run, what it said of the average, and its warnings."""
        source = folder(origin.directory).path(half)
        outcome = lab.run(chosen, (*layout, f'checkpoint.from="{source}"'), alone=not layout)
        assert outcome.curve == origin.curve[half:]
        (resumed,) = events(outcome.directory, "resumed")
        warnings = [event["message"] for event in events(outcome.directory, "warning")]
        return outcome, resumed["groups"].get("ema"), " ".join(warnings)

    whole = lab.run(trial, TWO.layout)
    ended, word, _ = go_on(trial, whole, TWO.layout)
    assert word == "read"
    assert [name for name in whole.tensors if not np.array_equal(whole.tensors[name], ended.tensors[name])] == []

    # Whether there is one is no matter of ranks.
    whole, without = lab.run(trial, (), alone=True), lab.run(bare, (), alone=True)
    begun, word, warned = go_on(trial, without)
    assert word == "begun" and "the average starts from the weights of this step" in warned
    assert_close(averages(begun.tensors), by_hand(begun.directory, range(half + 1, STEPS + 1)))

    dropped, word, warned = go_on(bare, whole)
    assert word == "dropped" and "this plan has no `ema`" in warned
    assert averages(dropped.tensors) == {}


@pytest.mark.slow
def test_random_numbers_of_ranks_go_on_where_they_were(lab: Laboratory):
    """Every rank adds noise of its own to its weights, drawn in odd numbers from each of the streams.

    One left out is noticed; that each is, tests/runtime/store/test_full_state.py shows without ranks.
    """
    more = "every 1 step checkpoint\ncheckpoint { keep = none, mode = async }"
    trial = evolve(TWO.trial("fp32"), steps=3, more=more, settings=TWO.flat)

    def go(name: str, *sets: str, left_out: str = "") -> Outcome:
        plan, mutation = lab.plan(trial, (*TWO.layout, *sets)), Mutation("noise", left_out=left_out)
        return lab.ranks.run(plan, lab.folder, name=name, mutation=mutation)

    whole = go("noise")
    source = folder(whole.directory).path(1)  # after an odd number of draws a normal number is left over
    for stream in ("", "numpy"):
        ended = go(f"noise-without-{stream or 'nothing'}", f'checkpoint.from="{source}"', left_out=stream)
        assert events(ended.directory, "resumed")[-1]["groups"]["rng"] == "own"
        equal = [np.array_equal(whole.tensors[name], ended.tensors[name]) for name in whole.tensors]
        assert all(equal) is (stream == "") is (ended.curve == whole.curve[1:]), stream


@pytest.mark.slow
def test_ranks_of_another_layout_start_their_random_numbers_anew(lab: Laboratory):
    trial = evolve(TWO.trial("fp64"), more="every 1 step checkpoint")
    lab.ranks.run(lab.plan(evolve(trial, steps=1), TWO.layout), lab.folder, name="other-ranks")
    tensor = BY_NAME["tp 2 (dense)"]
    moved = lab.ranks.run(lab.plan(evolve(trial, steps=2), tensor.layout), lab.folder, name="other-ranks")
    assert events(moved.directory, "resumed")[-1]["groups"]["rng"] == "anew"
