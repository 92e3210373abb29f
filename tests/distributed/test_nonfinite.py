"""Numbers that are none, on one rank alone: what is declared happens on all of them, and what follows is exact."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from checkpoints import folder, same, steps
from forked_ranks import Mutation, Outcome, RanksFailed
from projects import events, records
from topologies import BY_NAME, Topology
from trials import Laboratory

SLOW = pytest.mark.slow
TWO = BY_NAME["fsdp 2, one microbatch (dense)"]
ONE = Topology(accumulate=1)  # for what does not depend on which rank it was
SAVED = "every {every} steps checkpoint\ncheckpoint {{ keep = none, model = false, mode = {mode} }}\non nan{policy}\n"
BIAS = ("model.router.score=sigmoid", "model.router.bias_speed=1e-2")
ROLLBACK = "(2) rollback"


def run(
    lab: Laboratory,
    name: str,
    policy: str,
    mutation: Mutation | None = None,
    *,
    layout: Topology = TWO,
    count: int = 7,
    every: int = 2,
    mode: str = "sync",
    more: str = "",
    sets: tuple[str, ...] = (),
) -> Outcome:
    settings = (*layout.shared, *layout.flat, *(BIAS if layout.model == "moe" else ()), *sets)
    text = SAVED.format(every=every, mode=mode, policy=policy) + more
    trial = evolve(layout.trial("fp64"), steps=count, more=text, settings=settings)
    return lab.ranks.run(lab.plan(trial, layout.layout), lab.folder, name=name.replace(" ", "_"), mutation=mutation)


def failed(lab: Laboratory, name: str, policy: str, mutation: Mutation, **others: object) -> Path:
    with pytest.raises(RanksFailed):
        run(lab, name, policy, mutation, **others)  # type: ignore[arg-type]
    return lab.folder / "jobs" / name.replace(" ", "_")


def equal(ours: Outcome, theirs: Outcome) -> None:
    """Every tensor on every rank bit for bit, and all that was logged."""
    assert ours.curve == theirs.curve
    for counted, expected in zip(ours.routing, theirs.routing, strict=True):
        for name in expected:  # of the balance loss a sum over the whole run is kept, which is rounded on the way
            exact = name != "moe/aux_loss"
            assert counted[name] == (expected[name] if exact else pytest.approx(expected[name], rel=1e-12))
    for actual, expected in zip(ours.whole, theirs.whole, strict=True):
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not np.array_equal(actual[name], expected[name])] == []


def steps_of(directory: Path, kind: str) -> list[int]:
    return [event["step"] for event in events(directory, kind)]


# What is skipped ------------------------------------------------------------------------------------------------------

LAYOUTS = (
    "fsdp 2 · ep 2 (moe)", "pp 2, 1f1b (dense)", "tp 2 (dense)", "replicate 2, ddp (dense)", "fsdp 4 · ep 2 (moe)",
    "pp 2 · fsdp 2 · ep 2 (moe)", "pp 2, zbv (dense)", "ring 2 · ep 2 (moe)", "replicate 2, ddp (moe)",
    "pp 2 · fsdp 2 · tp 2 (dense)",
)  # fmt: skip


def layouts(ordinary: int) -> list:
    """The first so many with the ordinary tests, the others on demand."""
    return [pytest.param(BY_NAME[n], id=n, marks=() if i < ordinary else SLOW) for i, n in enumerate(LAYOUTS)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(1))
def test_a_skipped_step_leaves_nothing_behind(lab, layout):
    """What comes out of a block is no number on the last rank, so that routers, losses and gradients all take it in."""
    poison = Mutation("poison", rank=layout.world - 1, portions=[3, 4], kind="activation")
    skipped = run(lab, f"skip {layout.name}", "(3) skip", poison, layout=layout)
    expected = run(lab, f"skip {layout.name} expected", "(3) skip", Mutation("without", steps=[3, 4]), layout=layout)
    equal(skipped, expected)
    assert steps_of(skipped.directory, "skipped") == [3, 4] and steps_of(skipped.directory, "nonfinite") == []
    assert [step for step, *_ in skipped.curve] == [1, 2, 5, 6, 7]
    lines = [record for record in records(skipped.directory, "metrics") if record["step"] in (3, 4)]
    assert len(lines) == 2 and not any({"loss", "grad_norm", "lr"} & line.keys() for line in lines)
    for found in ("metrics", "ranks/00001"):  # nothing else was done since the records before
        lines = {r["step"]: r for r in records(skipped.directory, found) if "memory_bytes" in r}
        assert [step for step in lines if "step_seconds" not in lines[step]] == [1, 3, 4]
        assert not any({"tokens_per_second", "node_seconds", "tflops"} & lines[step].keys() for step in (1, 3, 4))
    # The save that was due behind step 4 is that of the step behind which all was well again.
    assert steps(skipped.directory) == [2, 5, 6, 7]


@pytest.mark.parametrize("kind", ["gradient", pytest.param("loss", marks=SLOW)])
@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=SLOW)])
def test_the_third_in_a_row_ends_the_run_on_all_ranks(lab, kind, value):
    """ok, bad, ok, bad, bad, bad: it ends at the sixth, and the third was the last good one."""
    name = f"third {kind} {value}"
    poison = Mutation("poison", rank=1, portions=[2, 4, 5, 6], kind=kind, value=value)
    directory = failed(lab, name, "(3) skip", poison, count=8)
    assert steps_of(directory, "skipped") == [2, 4, 5] and steps_of(directory, "nonfinite") == [6]
    (failure,) = events(directory, "failure")
    assert "3 steps in a row" in failure["error"] and "step 3 was the last good one" in failure["error"]
    assert all(f"step {step}: loss" in failure["error"] for step in (4, 5, 6)) and failure["traceback"] == ""
    assert steps(directory) == [3], "what came due behind a bad step was saved behind the next good one"
    assert (directory / "logs" / "1.log").read_text().count("rank 1: failed") == 1


def test_the_first_one_stops_a_run_unless_it_says_otherwise(lab):
    directory = failed(lab, "stops", " stop", Mutation("poison", rank=1, portions=[4]))
    assert steps_of(directory, "nonfinite") == [4] and steps_of(directory, "skipped") == []
    assert steps_of(directory, "failure") == [3] and steps(directory) == [2]


# What is undone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=SLOW)])
@pytest.mark.parametrize("layout", layouts(1))
def test_behind_a_rollback_the_run_is_the_one_that_never_saw_these_rows(lab, layout, mode):
    """Bad rows on one rank in steps 4 and 5: back to step 2, whose next rows are those of step 6."""
    poison = Mutation("poison", rank=layout.world - 1, portions=[4, 5], kind="activation")
    back = run(lab, f"back {layout.name} {mode}", ROLLBACK, poison, layout=layout, mode=mode)
    name = f"back {layout.name} {mode} expected"
    expected = run(lab, name, ROLLBACK, Mutation("further", behind=2, by=3), layout=layout, mode=mode)
    equal(back, expected)
    (event,) = events(back.directory, "rollback")
    assert (event["step"], event["from_step"], event["number"], event["of"]) == (2, 5, 1, 3)
    assert event["rows_left_out"] == 3 * layout.rows
    assert [step for step, *_ in back.curve] == [1, 2, 3, 4, 5, 6, 7]
    for step in (4, 6, 7):
        assert same(folder(back.directory).path(step), folder(expected.directory).path(step))
    (superseded,) = (back.directory / "logs").glob("metrics-superseded-*")
    assert [json.loads(line)["step"] for line in superseded.read_text().splitlines()] == [3, 4]


MIXED = """
dataset talks {{ source = jsonl("talks.jsonl"), messages = "messages", template = "plain" }}
mixture {{ lines = 0.6, talks = 0.4 }}
batch {{ prefetch = {prefetch}, workers = {workers} }}
"""


@pytest.mark.parametrize(("prefetch", "workers"), [(2, 0), pytest.param(4, 2, marks=SLOW)])
def test_what_was_read_ahead_of_a_mixture_is_read_anew(lab, prefetch, workers):
    more = MIXED.format(prefetch=prefetch, workers=workers)
    poison = Mutation("poison", rank=0, portions=[4, 5])
    back = run(lab, f"mixed {workers}", ROLLBACK, poison, more=more, layout=ONE)
    name, more = f"mixed {workers} expected", MIXED.format(prefetch=0, workers=0)
    equal(back, run(lab, name, ROLLBACK, Mutation("further", behind=2, by=3), more=more, layout=ONE))


@SLOW
def test_rows_that_were_left_out_count_to_the_epochs_of_the_budget(lab):
    poison = Mutation("poison", rank=1, portions=[4, 5])
    sets = ("experiment.budget=1 epochs",)
    whole = run(lab, "left out whole", ROLLBACK, sets=sets)
    back = run(lab, "left out", ROLLBACK, poison, sets=sets)
    assert len(back.curve) == len(whole.curve) - 3
    assert any("the rollback skipped rows" in event["message"] for event in events(back.directory, "warning"))


@SLOW  # tests/runtime/store/test_rollback_state.py kills at every change of the files
def test_a_killed_run_that_had_gone_back_goes_on_in_the_same_way(lab):
    """Killed in the step behind the rollback, before anything was saved again."""
    poison = {"rank": 1, "portions": [4, 5]}
    whole = run(lab, "killed whole", ROLLBACK, Mutation("poison", **poison))
    directory = failed(lab, "killed", ROLLBACK, Mutation("poison", **poison, dies={"step": 3, "time": 2}))
    assert steps_of(directory, "rollback") == [2] and folder(directory).named() == folder(directory).path(2).name
    ended = run(lab, "killed", ROLLBACK, Mutation("poison", **poison))
    assert steps_of(directory, "resumed") == [2] and steps_of(directory, "rollback") == [2]
    equal(ended, whole)
    states = [folder(each.directory).path(7) for each in (ended, whole)]
    counts = [json.loads((path / "state.json").read_text())["nonfinite"] for path in states]
    assert counts == [{"in_a_row": 0, "total": 2, "empty": 0, "last_good": 7, "went_back": [[5, 2]]}] * 2


@SLOW  # that the state of before is what a run goes back to, the tests above show
def test_weights_that_are_no_numbers_heal_by_going_back_and_not_by_skipping(lab):
    """They are no numbers from the update of step 4 on, which is saved: the checkpoint before that is the one."""
    rotten = Mutation("rotten", rank=1, updates=[4])
    back = run(lab, "rotten", ROLLBACK, rotten, count=9)
    # Back to 4, and at once two bad steps; back to 2, with the rows behind all these.
    assert [(e["from_step"], e["step"]) for e in events(back.directory, "rollback")] == [(6, 4), (6, 2)]
    expected = run(lab, "rotten expected", ROLLBACK, Mutation("further", behind=2, by=6), count=9)
    equal(back, expected)
    directory = failed(lab, "rotten skip", "(3) skip", rotten, count=9)
    assert steps_of(directory, "skipped") == [5, 6] and steps_of(directory, "nonfinite") == [7]


def test_it_gives_up_after_so_many_times_and_says_what_it_tried(lab):
    """The counters go on where the run was stopped."""
    poison = {"rank": 0, "portions": [4, 5, 8, 9, 13, 14]}
    policy = f"{ROLLBACK} {{ times = 2 }}"
    dies = {"step": 4}
    directory = failed(lab, "gives up", policy, Mutation("poison", **poison, dies=dies), count=20, layout=ONE)
    assert len(steps_of(directory, "rollback")) == 1
    directory = failed(lab, "gives up", policy, Mutation("poison", **poison), count=20, layout=ONE)
    assert [event["number"] for event in events(directory, "rollback")] == [1, 2]
    error = events(directory, "failure")[-1]["error"]
    assert "at most 2 rollbacks are allowed, and all are used up: from step 5 to 2, from step 6 to 4" in error
    assert "2 steps in a row without a finite loss" in error


def test_damaged_checkpoints_are_passed_over_and_without_any_it_ends(lab):
    poison = {"rank": 0, "portions": [6, 7]}
    hurt = Mutation("poison", **poison, hurts={"saved": 4})
    back = run(lab, "hurt", ROLLBACK, hurt, count=8, layout=ONE)
    assert steps_of(back.directory, "rollback") == [2]
    warnings = [event["message"] for event in events(back.directory, "warning")]
    assert any(
        "ckpt-s000000000004" in message and "has changed since it was written" in message for message in warnings
    )
    directory = failed(lab, "none yet", ROLLBACK, Mutation("poison", rank=0, portions=[1, 2]), layout=ONE)
    assert "there is no checkpoint to go back to yet" in events(directory, "failure")[-1]["error"]
    assert steps_of(directory, "rollback") == []
