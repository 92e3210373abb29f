"""The reducer, on streams as they are recorded and as they should not be."""

import json
import sys
import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from read_records import reduce, reduce_all, typed

from xtrain.records.lines import objects
from xtrain.records.metrics import StepMetrics
from xtrain.tui import state as module
from xtrain.tui.feed import MAX_POINTS
from xtrain.tui.lines.plain import going_on, outcome
from xtrain.tui.state import MAX_TICKS, RunState


def test_a_run_from_start_to_end(recorded) -> None:
    state = RunState()
    seen = [state.status]
    for record in recorded:
        state = reduce(state, record)
        if seen[-1] != state.status:
            seen.append(state.status)
    assert seen == ["waiting", "starting", "training", "done"]
    assert [(node.node, node.seconds) for node in state.setup] == [("setup.bootstrap", 0.31), ("setup.weights", 12.3)]
    assert state.setup_seconds == 13.0
    assert (state.step, state.steps, state.progress, state.loss) == (600, 600, 1.0, 1.0)
    assert state.evaluations["held[bold]out"].loss == 2.0
    assert state.checkpoint and state.checkpoint.step == 120
    assert (state.num_warnings, state.num_skipped, state.num_nonfinite) == (1, 1, 1)
    assert [tick.event for tick in state.ticks] == [
        "eval", "generate", "checkpoint", "warning", "nonfinite", "skipped",
    ]  # fmt: skip
    assert len(state.history.points()) == 10


def test_all_at_once_is_the_same_as_one_by_one(recorded) -> None:
    state = RunState()
    for record in recorded:
        state = reduce(state, record)
    assert reduce_all(RunState(), recorded) == state


def test_reducing_changes_no_earlier_state(recorded) -> None:
    states = [RunState()]
    for record in recorded:
        states.append(reduce(states[-1], record))
    again = RunState()
    for before, record in zip(states, recorded, strict=False):
        assert before == again
        again = reduce(again, record)


def test_node_under_way(recorded) -> None:
    state = reduce_all(RunState(), recorded[:4])
    assert state.under_way and state.under_way.node == "setup.weights"
    assert reduce(state, recorded[4]).under_way is None


def test_time_left_uses_the_median_pace(metrics, event) -> None:
    state = reduce(RunState(), event("run_start", 0, steps=100))
    assert state.seconds_left is None
    state = reduce(state, metrics(10, 10, step_seconds=3.0))
    assert state.seconds_left == pytest.approx(270)  # one record: its own step time
    state = reduce_all(state, [metrics(20, 20), metrics(30, 90), metrics(40, 100)])  # a long evaluation at step 20
    assert state.history.seconds_per_step == pytest.approx(1.0)
    assert state.seconds_left == pytest.approx(60)


def test_before_steps_are_logged_the_time_left_is_that_of_the_estimate(metrics, event) -> None:
    """Logging may be sparse: the run itself has measured its first steps."""
    start = reduce(RunState(), event("run_start", 0, step=0, steps=300))
    estimated = reduce(start, event("estimate", 9, step=10, step_seconds=0.5, steps_left=290, seconds_left=145.0))
    assert start.seconds_left is None and (estimated.step, estimated.seconds_left) == (10, pytest.approx(145.0))
    assert estimated.status == "training"
    logged = reduce_all(estimated, [metrics(100, 60.0), metrics(200, 160.0)])
    assert logged.seconds_left == pytest.approx(100.0), "the pace of recent steps is nearer"


def test_unknown_number_of_steps(metrics, event) -> None:
    state = reduce_all(RunState(), [event("run_start", 0, steps=None), metrics(5, 1), metrics(6, 2)])
    assert (state.steps, state.progress, state.seconds_left, state.step) == (None, None, None, 6)


def test_a_resumed_attempt_forgets_what_came_after_its_checkpoint(metrics, event) -> None:
    state = reduce_all(RunState(), [
        event("run_start", 0, steps=100, attempt=1),
        *(metrics(step, step) for step in range(1, 51)),
        event("eval", 40, 40, dataset="old", loss=1.0),
        event("checkpoint", 40, 40, path="a"),
        event("eval", 50, 50, dataset="new", loss=1.0),
        event("checkpoint", 50, 50, path="b"),
        event("failure", 51, 50, rank=1, error="x", traceback=""),
        event("run_end", 52, 50, status="failed"),
        event("run_start", 100, 40, steps=100, attempt=2, resumed_step=40),
    ])  # fmt: skip
    assert state.status == "starting" and not state.failures and state.end is None
    assert state.step == 40
    assert list(state.evaluations) == ["old"]
    assert state.checkpoint is None
    state = reduce_all(state, [metrics(41, 110), metrics(42, 111)])
    assert [step for step, _ in state.history.points()] == list(range(1, 43))
    assert state.history.recent == (1.0,)  # the time between the attempts was not spent training
    assert state.history.tokens_per_second == pytest.approx(10_000)


def test_an_attempt_that_begins_anew_forgets_everything(metrics, event) -> None:
    state = reduce_all(RunState(), [event("run_start", 0), metrics(5, 1), event("eval", 2, 5, dataset="d", loss=1.0)])
    state = reduce(state, event("run_start", 9, attempt=2, resumed_step=None))
    assert state.step == 0 and not state.evaluations and not state.history.points()


def test_steps_that_go_back_without_a_start_are_a_rewind(metrics) -> None:
    state = reduce_all(RunState(), [metrics(1, 1), metrics(2, 2), metrics(3, 3), metrics(2, 9, loss=7.0)])
    assert state.history.points() == ((1, 3.995), (2, 7.0))
    assert state.step == 2


def test_a_straggler_completes_the_curve_and_nothing_else(metrics) -> None:
    state = reduce_all(RunState(), [metrics(1, 1), metrics(3, 3), metrics(2, 2)])
    assert [step for step, _ in state.history.points()] == [1, 2, 3]
    assert state.history.step == 3


def test_the_same_record_twice_counts_once(metrics) -> None:
    assert len(reduce_all(RunState(), [metrics(1, 1), metrics(1, 1)]).history.points()) == 1


def test_nonfinite_losses_are_last_but_not_on_the_curve(metrics) -> None:
    state = reduce_all(RunState(), [metrics(1, 1), metrics(2, 2, loss=float("nan")), metrics(3, 3, loss=None)])
    assert [step for step, _ in state.history.points()] == [1]
    assert state.step == 3


def test_failure_before_the_end_is_known(event) -> None:
    assert reduce(RunState(), event("failure", 1, rank=3, error="e", traceback="t")).status == "failed"


def test_a_million_steps_are_quick_and_bounded(metrics) -> None:
    template = typed(metrics(0, 0))
    assert isinstance(template, StepMetrics)
    steps = (replace(template, step=n, time=float(n)) for n in range(1, 1_000_001))
    begin = time.process_time()
    state = module.reduce_all(RunState(), steps)
    assert time.process_time() - begin < 3
    points = state.history.points()
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS + 1
    assert points[0][0] == 1 and points[-1][0] == 1_000_000
    gaps = {b - a for (a, _), (b, _) in pairwise(points[:-1])}
    assert len(gaps) == 1
    assert sys.getsizeof(state.history.recent) < 2000


def test_ticks_are_bounded(event) -> None:
    state = reduce_all(RunState(), [event("warning", n, n, message="w") for n in range(1000)])
    assert len(state.ticks) == MAX_TICKS and state.ticks[-1].step == 999
    assert state.num_warnings == 1000


def test_going_back_undoes_what_lies_behind(metrics, event) -> None:
    state = reduce_all(RunState(), [event("run_start", 0, steps=20), *(metrics(n, n) for n in range(1, 9))])
    state = reduce(state, event("eval", 8, step=8, dataset="web", loss=2.0))
    state = reduce(state, event("eval", 8, step=4, dataset="code", loss=3.0))
    state = reduce(state, event("rollback", 9, step=4, from_step=8, checkpoint="ckpt-s000000000004", number=1, of=3))
    assert state.step == 4 and [n for n, _ in state.history.points()] == [1, 2, 3, 4]
    assert list(state.evaluations) == ["code"] and state.num_rollbacks == 1
    assert reduce(state, metrics(5, 10)).step == 5 and state.status == "training"


def test_a_restart_is_no_failure_and_the_attempt_behind_it_counts_it(event, metrics) -> None:
    state = RunState()
    for record in (
        event("run_start", 0, steps=60, attempt=1),
        metrics(5, 5),
        event("failure", 5, rank=0, error="lost contact", traceback="", exit_code=1),
    ):
        state = reduce(state, record)
    assert state.status == "failed"
    state = reduce(state, event("restart", 9, step=4, number=1, of=3, reason="rank 1 was killed by SIGKILL", world=2))
    assert (state.status, state.failures, state.restarting) == ("starting", (), True)
    state = reduce(state, event("run_start", 0, steps=60, attempt=2, resumed_step=4))
    assert (state.num_restarts, state.restarting, state.step) == (1, False, 4)
    state = reduce(state, event("run_start", 0, steps=60, attempt=3, resumed_step=4))
    assert state.num_restarts == 0, "another command has started the run"


def test_a_start_that_was_stopped_before_it_began_ends_for_reasons_of_its_own(event, metrics) -> None:
    state = reduce_all(RunState(), [event("run_start", 0, steps=60), *(metrics(n, n) for n in range(1, 10))])
    for record in (
        event("control", 9, step=9, id="1", command="stop", state="accepted", detail=""),
        event("failure", 9, step=9, rank=1, error="boom", traceback="", exit_code=1),
        event("run_end", 9, step=9, status="failed", exit_code=1, seconds=9.0, loss=None),
    ):
        state = reduce(state, record)
    assert state.status == "failed" and outcome(state) == "rank 1 at step 9"
    again = reduce(state, event("run_end", 20, step=4, status="stopped", exit_code=75, seconds=None, loss=None))
    assert (again.status, again.failures, again.step, outcome(again)) == ("stopped", (), 4, "")
    assert [step for step, _ in again.history.points()] == [1, 2, 3, 4]
    fell = reduce(state, event("failure", 20, step=4, rank=None, error="the ranks were ended", traceback=""))
    assert [failure.rank for failure in fell.failures] == [None] and fell.status == "failed"


def test_what_a_launcher_does_not_know_of_earlier_starts_it_does_not_say(event) -> None:
    state = reduce(RunState(), event("run_end", 20, step=40, status="stopped", exit_code=75, seconds=None, loss=None))
    assert "no checkpoint was saved" not in going_on(state) and "from the last checkpoint" in going_on(state)


def test_of_ranks_that_only_lost_another_one_the_first_is_shown_and_a_cause_comes_before_them(event) -> None:
    state = RunState()
    shown = []
    for record in (
        event("failure", 5, rank=1, error="lost contact", lost=True),
        event("failure", 5, rank=2, error="lost contact", lost=True),
        event("failure", 5, rank=0, error="out of memory"),
    ):
        state = reduce(state, record)
        shown += [] if state.is_echo(typed(record)) else [record["rank"]]
    assert shown == [1, 0] and [failure.rank for failure in state.failures] == [0, 1, 2]


def test_counted_data_says_how_many_steps_there_are() -> None:
    def state_of(planned: int | None, **data: object) -> RunState:
        start = {"event": "run_start", "time": 1.0, "step": 0, "steps": planned, "attempt": 1}
        return reduce_all(RunState(), [start, {"event": "data", "time": 2.0, "step": 0, **data}])

    counted = state_of(None, steps=500, rows={"code": 99, "broken": "x"})
    assert counted.steps == 500 and dict(counted.rows) == {"code": 99}
    known = state_of(60, steps=500, rows=None)
    assert known.steps == 60 and not known.rows


def test_a_pause_lasts_until_the_run_goes_on(event, metrics) -> None:
    def control(command: str, state: str, at: float) -> dict:
        return event("control", at, 2, id="1", command=command, state=state, detail="")

    state = reduce_all(RunState(), [event("run_start", 0), metrics(2, 2), control("pause", "accepted", 3)])
    assert state.paused_since is None, "it is asked to wait, and still makes its step"
    began = event("any", 4)["time"]
    paused = reduce(state, control("pause", "done", 4))
    assert paused.paused_since == began
    for after in (event("paused", 9, 2, seconds=5.0), event("run_start", 9, attempt=2)):
        assert reduce(paused, after).paused_since is None
    asked = reduce_all(paused, [control("resume", "accepted", 8), control("save", "done", 8)])
    assert asked.paused_since == began, "commands are carried out meanwhile"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_streams_as_they_should_not_be(recorded, data) -> None:
    """Out of order, twice, and with holes: nothing raises, and what does not depend on order is right."""
    order = data.draw(st.permutations(range(len(recorded))))
    twice = data.draw(st.lists(st.sampled_from(range(len(recorded))), max_size=10))
    shuffled = [recorded[place] for place in (*order, *twice)]
    state = reduce_all(RunState(), shuffled)
    one_by_one = RunState()
    for record in shuffled:
        one_by_one = reduce(one_by_one, record)
    assert state == one_by_one
    assert len({step for step, _ in state.history.points()}) == len(state.history.points())
    places = data.draw(st.sets(st.sampled_from(range(len(recorded)))))
    holes = reduce_all(RunState(), [record for place, record in enumerate(recorded) if place in places])
    steps = [record["step"] for place, record in enumerate(recorded) if place in places and "event" not in record]
    assert holes.history.step == max(steps, default=None)
    repeated = [record for record in recorded for _ in range(2) if "event" not in record]
    once = [record for record in recorded if "event" not in record]
    assert reduce_all(RunState(), repeated).history.points() == reduce_all(RunState(), once).history.points()


def test_a_stream_cut_after_every_byte(recorded) -> None:
    written = [record for record in recorded if record.get("event") != "nonfinite"]  # NaN is not itself
    content = b"".join(json.dumps(record).encode() + b"\n" for record in written)
    state, taken = RunState(), 0
    for place in range(len(content) + 1):
        found, damaged = objects(content[: content[:place].rfind(b"\n") + 1])
        assert damaged == 0 and len(found) == content[:place].count(b"\n")
        state, taken = reduce_all(state, found[taken:]), len(found)
    assert state == reduce_all(RunState(), written)


def test_steps_that_are_left_out_count_for_how_far_the_run_is_and_how_fast(metrics, event) -> None:
    """A streak of steps without a loss stands still on no screen."""
    state = reduce_all(RunState(), [event("run_start", 0, steps=100), metrics(1, 1), metrics(2, 2)])
    streak = [{key: value for key, value in metrics(step, 2 * step - 2).items() if key != "loss"} for step in (3, 4, 5)]
    after = reduce_all(state, streak)
    assert (after.step, after.history.step, after.loss) == (5, 5, state.loss)
    assert after.history.seconds_per_step == pytest.approx(2.0) and after.seconds_left == pytest.approx(190)
    assert [step for step, _ in after.history.points()] == [1, 2]
    assert reduce(after, {"step": 9, "time": 99.0, "eval/web/loss": 1.0}) == after
    again = reduce(after, metrics(4, 20))
    assert again.step == 4 and [step for step, _ in again.history.points()] == [1, 2, 4]
    back = reduce(after, event("rollback", 1, step=1))
    assert back.step == 1 and back.history.last.loss is None


def test_where_logging_is_sparse_an_evaluation_tells_the_step(metrics, event) -> None:
    state = reduce_all(RunState(), [event("run_start", 0, steps=100), metrics(10, 1)])
    state = reduce(state, event("eval", 2, step=15, dataset="web", loss=1.0))
    assert state.step == 15
    assert reduce(state, event("rollback", 3, step=12)).step == 12
    assert reduce(state, event("run_start", 4, resumed_step=10, attempt=2)).step == 10


def test_a_replica_group_that_ends_is_no_end_of_the_run(metrics, event) -> None:
    """What its ranks have failed over is past when the launcher has seen it; that of another rank is not."""
    state = reduce_all(RunState(), [event("run_start", 0, steps=100), metrics(10, 1)])
    failures = [event("failure", 2, rank=rank, error="gone", lost=rank == 0) for rank in (1, 0)]
    assert reduce_all(state, failures).status == "failed"
    ended = event("replica_group", 3, group=0, state="ended", reason="rank 1 killed", ranks=[0, 1], number=1)
    assert reduce_all(state, [*failures, ended]).status == "training"
    assert reduce_all(state, [*failures, event("failure", 2, rank=2, error="too"), ended]).status == "failed"
    after = reduce(state, event("replicas", 4, taking_part=[1], joined=[], left=[0], of=2, rows=4))
    assert after.replicas is not None and after.replicas.taking_part == [1]
