"""Saving on several ranks: beside training, on disks that fail, and when the writer dies at any moment."""

import pytest
import torch
from attrs import evolve
from checkpoints import folder, same, steps
from forked_ranks import Mutation, RanksFailed
from projects import events
from topologies import FLAT, Topology
from trials import Laboratory

from xtrain.plan.plan import Plan
from xtrain.runtime.store.checkpoints import CheckpointFolder

SLOW = pytest.mark.slow  # what one rank can show is shown in tests/runtime/store/test_saver.py
TWO = Topology(fsdp=2, accumulate=1, shared=FLAT)
EACH = "every 1 step checkpoint\ncheckpoint {{ keep = none, model = false, {} }}"


def trial(settings: str, count: int = 5):
    return evolve(TWO.trial("fp32"), steps=count, more=EACH.format(settings))


def run(lab: Laboratory, name: str, settings: str, mutation: Mutation | None = None, count: int = 5):
    return lab.ranks.run(lab.plan(trial(settings, count), TWO.layout), lab.folder, name=name, mutation=mutation)


@pytest.fixture(scope="module")
def plain(lab: Laboratory):
    """Every step saved while training waits."""
    return run(lab, "saved-sync", "mode = sync")


@pytest.mark.parametrize("mode", ["async", pytest.param("async_pinned", marks=SLOW)])
def test_what_is_written_beside_training_is_the_state_of_its_step(lab, plain, mode):
    outcome = run(lab, f"saved-{mode}", f"mode = {mode}", Mutation("slow_disk", seconds=0.05))
    assert steps(outcome.directory) == steps(plain.directory) == [1, 2, 3, 4, 5]
    for step in steps(plain.directory):
        assert same(folder(outcome.directory).path(step), folder(plain.directory).path(step)), step
    assert outcome.curve == plain.curve
    saved = events(outcome.directory, "checkpoint")
    assert [event["step"] for event in saved] == [1, 2, 3, 4, 5]
    assert all(event["seconds"] > 0.05 for event in saved)
    assert all(entry.flaws(content=True) == [] for entry in folder(outcome.directory).published())


@SLOW
def test_tensors_that_are_no_copy_would_be_found(lab, plain):
    outcome = run(lab, "saved-live", "mode = async", Mutation("live_tensors", seconds=0.3))
    assert not all(same(folder(outcome.directory).path(s), folder(plain.directory).path(s)) for s in (1, 2, 3, 4))


@SLOW
def test_saves_that_overlap_become_one_and_are_named_after_the_step_they_are_of(lab, plain):
    slow = Mutation("slow_disk", seconds=0.3)
    outcome = run(lab, "saved-latest", "mode = async, overlap = latest", slow)
    found = steps(outcome.directory)
    assert found[0] == 1 and found[-1] == 5 and len(found) < 5
    for step in found:
        assert same(folder(outcome.directory).path(step), folder(plain.directory).path(step)), step


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=SLOW)])
def test_a_disk_that_is_full_for_a_while_costs_only_these_saves(lab, plain, mode):
    outcome = run(lab, f"full-{mode}", f"mode = {mode}", Mutation("full_disk", rank=1, saves=[1, 2]))
    assert steps(outcome.directory) == [1, 4, 5]
    assert outcome.curve == plain.curve and folder(outcome.directory).remains() == []
    warnings = [event["message"] for event in events(outcome.directory, "warning")]
    assert len(warnings) == 2
    assert "step 2 could not be saved, the last checkpoint is of step 1: No space left on device" in warnings[0]


@SLOW
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_stays_full_ends_the_run_on_all_ranks(lab, mode):
    full = Mutation("full_disk", rank=1, saves=list(range(1, 9)))
    with pytest.raises(RanksFailed) as failed:
        run(lab, f"stays-full-{mode}", f"mode = {mode}, failures = 2", full)
    directory = lab.folder / "jobs" / f"stays-full-{mode}"
    assert "rank 0: exit code 1, rank 1: exit code 1" in str(failed.value)
    (failure,) = events(directory, "failure")
    assert failure["code"] == "X721" and failure["exit_code"] == 3 and failure["traceback"] == ""
    assert steps(directory) == [1] and folder(directory).remains() == []
    assert folder(directory).latest().flaws(content=True) == []


@SLOW
def test_a_smaller_keep_makes_room_before_the_first_save(lab):
    """On a disk that is full: no save succeeds, and what is too old is gone all the same."""
    best = "every 1 step eval lines {{ batches = 1 }}\nevery 1 step checkpoint\ncheckpoint {{ {} }}"

    def start(settings: str, count: int, mutation: Mutation | None = None) -> None:
        trial = evolve(TWO.trial("fp32"), steps=count, more=best.format(settings))
        lab.ranks.run(lab.plan(trial, TWO.layout), lab.folder, name="less-kept", mutation=mutation)

    start("keep = none, best = eval.lines.loss", 4)
    directory = lab.folder / "jobs" / "less-kept"
    folder(directory).root.joinpath("best").write_text("ckpt-s000000000001\n")
    shard = folder(directory).path(4) / "__1_0.distcp"
    shard.write_bytes(bytes(len(shard.read_bytes())))  # as large as before: only its content tells
    with pytest.raises(RanksFailed):
        full = Mutation("full_disk", rank=1, saves=list(range(9)))
        start("keep = 1, best = eval.lines.loss, failures = 1", 6, full)
    assert events(directory, "resumed")[-1]["step"] == 3
    assert steps(directory) == [1, 3, 4]  # the best, what it goes on from, and what `latest` names
    (pruned,) = events(directory, "pruned")
    assert (pruned["step"], pruned["checkpoints"]) == (3, ["ckpt-s000000000002"])
    assert folder(directory).pointed("model") is not None


@SLOW
def test_the_last_save_has_to_succeed(lab):
    with pytest.raises(RanksFailed):
        run(lab, "last-full", "mode = async, failures = none", Mutation("full_disk", rank=0, saves=[4, 5]))
    directory = lab.folder / "jobs" / "last-full"
    assert steps(directory) == [1, 2, 3, 4]
    run(lab, "last-full", "mode = async")
    assert events(directory, "resumed")[-1]["step"] == 4 and steps(directory)[-1] == 5


@SLOW
def test_damaged_content_is_passed_over_on_all_ranks(lab, plain):
    run(lab, "damaged", "mode = sync", count=4)
    directory = lab.folder / "jobs" / "damaged"
    for step in (4, 3):
        shard = folder(directory).path(step) / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 255
        shard.write_bytes(content)
    (directory / "finished").unlink()
    outcome = run(lab, "damaged", "mode = sync")
    assert events(directory, "resumed")[-1]["step"] == 2
    warnings = [event["message"] for event in events(directory, "warning")]
    assert "ckpt-s000000000004 is damaged and was skipped: __1_0.distcp has changed since it was written" in warnings[0]
    assert "ckpt-s000000000003" in warnings[1] and "resuming from ckpt-s000000000002" in warnings[2]
    assert outcome.curve == plain.curve  # no step is told twice
    for step in (3, 4, 5):
        assert same(folder(directory).path(step), folder(plain.directory).path(step)), step


def killed(lab: Laboratory, topology: Topology, name: str, settings: str, change: int) -> tuple[Plan, CheckpointFolder]:
    """A run whose writer dies at some change of a file; whatever pointers name then is whole."""
    more = f"every 1 step checkpoint\nevery 1 step eval lines\ncheckpoint {{ {settings} }}"
    plan = lab.plan(evolve(topology.trial("fp32"), steps=5, more=more), topology.layout)
    with pytest.raises(RanksFailed):
        lab.ranks.run(plan, lab.folder, name=name, mutation=Mutation("death", change=change))
    found = folder(lab.folder / "jobs" / name)
    for pointer in ("latest", "best"):
        if named := found.named(pointer):
            assert (entry := found.pointed(pointer)) is not None, f"{pointer} names {named}"
            assert entry.flaws(content=True) == []
    return plan, found


@SLOW
@pytest.mark.parametrize("change", range(19, 84))
def test_a_writer_that_is_killed_leaves_a_run_that_goes_on(lab, plain, change):
    """At each moment of the second and third save, with retention behind them."""
    name, settings = f"killed-{change}", "mode = sync, keep = 1, best = eval.lines.loss"
    plan, _ = killed(lab, TWO, name, settings, change)
    (lab.folder / "jobs" / name / "metrics.jsonl").unlink(missing_ok=True)
    outcome = lab.ranks.run(plan, lab.folder, name=name)
    last = outcome.curve[-1]
    assert last == plain.curve[-1]


ALONE = Topology(accumulate=1, sets=("checkpoint.backend=file",))


@pytest.fixture(scope="module")
def alone(lab: Laboratory):
    """One process that saves nothing but its end."""
    return lab.ranks.run(lab.plan(evolve(ALONE.trial("fp32"), steps=5), ALONE.layout), lab.folder, name="alone")


@SLOW
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("change", [*range(850, 1750, 53)])
def test_a_writer_of_one_file_that_is_killed_leaves_a_run_that_goes_on(lab, alone, mode, change):
    """From the second save to the third: in the file itself, and between the changes of names around it."""
    name, settings = f"killed-{mode}-{change}", f"mode = {mode}, keep = 1, best = eval.lines.loss"
    plan, found = killed(lab, ALONE, name, settings, change)
    for pointer in ("latest", "best"):
        if found.alias(pointer).exists():
            assert torch.load(found.alias(pointer), weights_only=True)["optimizer.norm.weight.step"] >= 1
    (lab.folder / "jobs" / name / "metrics.jsonl").unlink(missing_ok=True)
    outcome = lab.ranks.run(plan, lab.folder, name=name)
    assert outcome.curve[-1] == alone.curve[-1]
    assert found.alias("latest").samefile(found.path(5) / "state.pt") and found.remains() == []
