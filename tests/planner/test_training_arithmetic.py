"""Rows, tokens, steps, the learning rate's lengths, ticks and their defaults."""

import pytest


def batch_of(plan):
    args = plan.node("setup.loader").args
    return {name: args[name] for name in ("micro", "accumulate", "rows")}


def test_rows_follow_from_micro_and_accumulate(make_plan):
    plan = make_plan(
        parallel="parallel { fsdp 2 { replicate = 3 } }", batch="batch { sequence = 128, micro = 2, accumulate = 5 }"
    )
    assert batch_of(plan) == {"micro": 2, "accumulate": 5, "rows": 60}
    assert plan.estimates.tokens_per_step == 60 * 128


def test_accumulate_follows_from_rows(make_plan):
    plan = make_plan(parallel="parallel { fsdp 4 }", batch="batch { sequence = 128, micro = 2, rows = 48 }")
    assert batch_of(plan)["accumulate"] == 6
    assert batch_of(make_plan(batch="batch { sequence = 128 }")) == {"micro": 1, "accumulate": 1, "rows": 1}


def test_all_three_may_be_given_if_they_agree(make_plan):
    plan = make_plan(
        parallel="parallel { fsdp 2 }", batch="batch { sequence = 128, micro = 3, accumulate = 2, rows = 12 }"
    )
    assert batch_of(plan)["rows"] == 12


def test_context_and_tensor_ranks_read_the_same_rows(make_plan):
    plan = make_plan(parallel="parallel { fsdp 2, tp 2, cp 2 }")
    assert plan.mesh.data_ranks == 2
    assert batch_of(plan)["rows"] == 8


@pytest.mark.parametrize(
    ("budget", "steps"), [("100 steps", 100), ("1 step", 1), ("10240 tokens", 10), ("10241 tokens", 11)]
)
def test_budget_in_steps_and_tokens(make_plan, budget, steps):
    plan = make_plan(experiment=f"experiment tiny {{ budget = {budget} }}")  # 4 rows of 256
    assert plan.timeline.steps == steps
    assert plan.timeline.tokens == steps * 1024
    assert plan.node("setup.loader").args["steps"] == steps


def test_epochs_leave_the_steps_open(make_plan):
    plan = make_plan(
        experiment="experiment tiny { budget = 2 epochs }",
        scheduler="scheduler cosine { warmup = 5% }",
        every="every 10 steps eval code",
    )
    assert plan.timeline.steps is None and plan.timeline.tokens is None and plan.timeline.epochs == 2
    assert plan.node("setup.scheduler").args["warmup"] == {"fraction": 0.05}
    assert plan.node("tick.eval.code").args["rows"] is None
    assert [(t.steps, t.seconds, t.count) for t in plan.timeline.ticks] == [
        (10, None, None),
        (None, None, None),
        (None, None, None),
        (None, None, None),
    ]
    assert [tick.fraction for tick in plan.timeline.ticks] == [None, 0.01, None, 0.05]
    assert plan.timeline.ticks[2].epochs == 1  # saves after each epoch
    unknown = {check.id for check in plan.checks if check.status == "unknown"}
    assert unknown == {"schedule.budget", "schedule.every.0.every"}


def test_lengths_of_the_learning_rate(make_plan):
    args = (make_plan(
        scheduler="scheduler wsd { warmup = 5%, decay = 20 steps, shape = sqrt, floor = 1% }",
    ) .node("setup.scheduler") .args)  # fmt: skip
    assert args == {
        "kind": "wsd", "lr": 1e-3, "steps": 100, "warmup": {"steps": 5}, "floor": 0.01, "decay": {"steps": 20},
        "shape": "sqrt",
    }  # fmt: skip
    assert make_plan().node("setup.scheduler").args == {
        "kind": "constant", "lr": 1e-3, "steps": 100, "warmup": {"steps": 0},
    }  # fmt: skip
    assert "decay" not in make_plan(scheduler="scheduler cosine { floor = 10% }").node("setup.scheduler").args


@pytest.mark.parametrize(
    ("steps", "log", "save"),
    [(100, 1, 25), (7, 1, 2), (101, 2, 26), (397, 4, 100), (1000, 10, 100), (2000, 20, 100), (2001, 21, 101)],
)
def test_a_run_logs_and_saves_by_default(make_plan, steps, log, save):
    plan = make_plan(experiment=f"experiment tiny {{ budget = {steps} steps }}")
    assert [(tick.nodes, tick.steps, tick.count) for tick in plan.timeline.ticks] == [
        (("tick.log",), log, steps // log),
        (("tick.checkpoint",), save, steps // save),
    ]
    shown = {entry.path: (entry.value, entry.origin) for entry in plan.provenance}
    assert shown["every.log"] == (f"{log} step{'s' * (log > 1)}", "default")


def test_a_tick_of_the_user_replaces_the_default(make_plan):
    plan = make_plan(every="every 20 steps log then checkpoint")
    (tick,) = plan.timeline.ticks
    assert tick.nodes == ("tick.log", "tick.checkpoint") and tick.count == 5
    assert not any(entry.path.startswith(("every.log", "every.checkpoint")) for entry in plan.provenance)


def triggers(plan):
    return {trigger.event: (trigger.nodes, trigger.stop) for trigger in plan.timeline.triggers}


def test_triggers_save_by_default(make_plan):
    assert triggers(make_plan()) == {
        "finish": (("event.finish.checkpoint", "event.finish.model"), False),
        "sigterm": (("event.sigterm.checkpoint",), True),
        "sigint": (("event.sigint.checkpoint",), True),
        "sigusr1": (("event.sigusr1.checkpoint",), True),
        "nan": ((), True),
    }


def test_triggers_of_the_user(make_plan):
    plan = make_plan(more='on finish generate { prompts = ["a"] }\non sigterm stop')
    found = triggers(plan)
    assert found["finish"][0] == ("event.finish.checkpoint", "event.finish.generate", "event.finish.model")
    assert found["sigterm"] == ((), True)
    own = triggers(make_plan(more="on finish eval code then checkpoint"))
    assert own["finish"][0] == ("event.finish.eval.code", "event.finish.checkpoint", "event.finish.model")


@pytest.mark.parametrize(("steps", "batches"), [(10, 1), (100, 5), (1000, 50)])
def test_evaluation_takes_a_twentieth_of_the_steps(make_plan, steps, batches):
    plan = make_plan(experiment=f"experiment tiny {{ budget = {steps} steps }}", every="every 5 steps eval code")
    rows = batches * plan.node("setup.loader").args["rows"]
    assert plan.node("tick.eval.code").args == {"dataset": "code", "rows": rows}


def test_equal_actions_share_a_node_and_others_get_a_number(make_plan):
    plan = make_plan(
        every="every 10 steps eval code { batches = 2 } then log\n"
        "every 20 steps eval code { batches = 2 }\nevery 50 steps eval code { batches = none }"
    )
    assert [tick.nodes for tick in plan.timeline.ticks[:3]] == [
        ("tick.eval.code",),
        ("tick.eval.code.2",),
        ("tick.eval.code", "tick.log"),
    ]
    assert plan.node("tick.eval.code.2").args["rows"] is None


def test_a_tick_can_stop_the_run(make_plan):
    plan = make_plan(every="every 50 steps checkpoint then stop")
    assert plan.timeline.ticks[-1].stop is True
    assert plan.timeline.ticks[-1].nodes == ("tick.checkpoint",)


def test_in_a_step_evaluations_come_before_the_log_and_checkpoints_after_it(make_plan):
    plan = make_plan(every="every 10 steps checkpoint\nevery 10 steps log\nevery 10 steps eval code")
    assert [tick.nodes for tick in plan.timeline.ticks] == [("tick.eval.code",), ("tick.log",), ("tick.checkpoint",)]


@pytest.mark.parametrize(("quantity", "expected"), [
    ((10240, "tokens"), {"tokens": 10240, "count": 10}),
    ((100, "tokens"), {"tokens": 100, "count": 100}),
    ((60, "seconds"), {"seconds": 60.0, "count": None}),
    ((10, "%"), {"steps": 10, "count": 10}),
])  # fmt: skip
def test_ticks_in_other_units(load, quantity, expected):
    """The planner lays out every unit, whichever the language offers."""
    from attrs import evolve

    from xtrain.dsl.values import Quantity
    from xtrain.planner.compile import compile_plan

    spec = load(every="every 10 steps eval code")
    spec = evolve(spec, ticks=(evolve(spec.ticks[0], every=Quantity(*quantity)),))
    compiled = compile_plan(spec).plan
    assert compiled is not None
    tick = compiled.timeline.ticks[0]
    assert {name: getattr(tick, name) for name in expected} == expected


@pytest.mark.parametrize(("every", "name", "value"), [("10%", "fraction", 0.1), ("1 epoch", "epochs", 1.0)])
def test_what_waits_for_the_data_stays_as_it_was_declared(make_plan, every, name, value):
    plan = make_plan(every=f"every {every} log", experiment="experiment tiny { budget = 2 epochs }")
    tick = plan.timeline.ticks[0]
    assert (tick.steps, tick.tokens, tick.count, getattr(tick, name)) == (None, None, None, value)


@pytest.mark.parametrize(("share", "steps"), [("7%", 7), ("14%", 14), ("0.5%", 1), ("33.4%", 34)])
def test_a_share_is_that_of_its_digits_and_not_of_the_nearest_binary_number(make_plan, share, steps):
    assert make_plan(every=f"every {share} log").timeline.ticks[0].steps == steps
