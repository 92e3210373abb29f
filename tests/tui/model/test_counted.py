"""A plan in epochs, once its run has counted: what comes next is known in steps."""

from read_records import reduce_all

from xtrain.records.lines import read
from xtrain.records.training_events import HorizonEvent
from xtrain.tui.model.board import next_step, num_times
from xtrain.tui.model.planned import StepTokens, counted, planned
from xtrain.tui.state import RunState

CONTENT = {
    "graph": {},
    "timeline": {"steps": None, "epochs": 2.0,
        "phases": [{"name": "train", "first": 0}, {"name": "late", "first": None, "epochs": 1.5}],
        "ticks": [{"nodes": ["tick.log"], "epochs": 0.5}, {"nodes": ["tick.eval"], "fraction": 0.25},
            {"nodes": ["tick.health"], "steps": 7}]},
}  # fmt: skip
HORIZON = {
    "event": "horizon",
    "step": 0,
    "steps": 17,
    "epoch_rows": 33.0,
    "stop_at": 13,
    "stop_after": None,
    "phases": {"train": 0, "late": 13},
    "ticks": [{"steps": None, "tokens": 1056.0}, {"steps": 5, "tokens": None}],
}
METRICS = {"step": 5, "time": 1.0, "tokens": 1280, "loss": 3.0, "epoch": 0.606061}


def test_ticks_phases_and_stops_are_those_of_the_run():
    plan = planned(CONTENT)
    assert plan is not None and [next_step(tick, StepTokens.alike(256), 0) for tick in plan.ticks] == [None, None, 7]
    known = counted(plan, read(HorizonEvent, HORIZON))
    assert (known.steps, known.stop_at, known.stop_after) == (17, 13, None)
    assert [phase.first for phase in known.phases] == [0, 13]
    assert [next_step(tick, StepTokens.alike(256), 0) for tick in known.ticks] == [5, 5, 7]
    assert [num_times(tick, StepTokens.alike(256), 0, 17) for tick in known.ticks] == [4, 3, 2]
    # A run that says nothing that can be used leaves the plan as it was.
    assert counted(plan, read(HorizonEvent, {"event": "horizon", "ticks": 3, "phases": None})) == plan


def test_how_far_a_run_is_in_its_data_is_said_where_its_plan_speaks_of_epochs():
    data = {"event": "data", "step": 0, "steps": 17, "rows": {"a": 33}, "epochs": 2.0}
    assert reduce_all(RunState(), (data, METRICS)).epoch == ""
    assert reduce_all(RunState(), (data, HORIZON, METRICS)).epoch == "0.61/2"
    assert reduce_all(RunState(), ({**data, "epochs": None}, HORIZON, METRICS)).epoch == "0.61"
