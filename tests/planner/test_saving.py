"""What `checkpoint { … }` puts into a plan, and what is said of settings that do not go together."""

import pytest

from xtrain.dsl.values import MeasuredNumber
from xtrain.planner.costs.run import disk_of
from xtrain.planner.rules.validate import check_spec
from xtrain.text.units import bytes_text

SAVING = ("setup.checkpoint", "tick.checkpoint", "tick.model", "step.await_copy", "step.put_off_save")
EVERY = "every 10 steps eval code\nevery 20 steps checkpoint"


def ops(plan) -> set[str]:
    return {node.op for node in plan.nodes}


def must(plan) -> dict[str, bool]:
    return {node.id: node.args["must"] for node in plan.nodes if node.op == "tick.checkpoint"}


def test_a_run_that_saves_nothing_still_reads(make_plan):
    plan = make_plan(
        every=f"{EVERY}\nevery 50 steps checkpoint then stop\non sigterm checkpoint then stop",
        checkpoint="checkpoint { enabled = false }",
    )
    assert not ops(plan) & {*SAVING} and "setup.resume" in ops(plan)
    assert [(tick.nodes, tick.stop) for tick in plan.timeline.ticks] == [
        (("tick.eval.code",), False), ((), True), (("tick.log",), False),
    ]  # fmt: skip
    ends = {trigger.event: (trigger.nodes, trigger.stop) for trigger in plan.timeline.triggers}
    stops = ("sigint", "sigterm", "sigusr1", "nan")
    assert ends == {"finish": ((), False), **dict.fromkeys(stops, ((), True))}
    assert "save" not in [command.name for command in plan.timeline.commands]
    assert plan.timeline.commands[0].nodes == ()


def test_what_a_run_ends_with_has_to_be_saved(make_plan):
    plan = make_plan(every="every 10 steps checkpoint\nevery 30 min checkpoint then stop")
    assert must(plan) == {
        "tick.checkpoint": False,
        "tick.checkpoint.2": True,
        "event.finish.checkpoint": True,
        "event.sigterm.checkpoint": True,
        "event.sigint.checkpoint": True,
        "event.sigusr1.checkpoint": True,
        "event.control.checkpoint": True,
    }


def test_nodes_of_saving_beside_training_are_there_where_something_is(make_plan):
    assert not ops(make_plan()) & {"step.await_copy", "step.put_off_save"}
    beside = make_plan(checkpoint="checkpoint { mode = async }")
    assert "step.await_copy" in ops(beside) and "step.put_off_save" not in ops(beside)
    order = [node.op for node in make_plan(checkpoint="checkpoint { mode = async, overlap = latest }").of_kind("step")]
    assert order.index("step.agree") + 1 == order.index("step.put_off_save")
    assert order.index("step.await_copy") + 1 == order.index("step.optimizer")
    ending = make_plan(every="every 50 steps checkpoint then stop", checkpoint="checkpoint { mode = async }")
    assert "step.await_copy" not in ops(ending)  # nothing is written beside anything


def test_weights_are_read_where_they_are_drawn_and_a_full_state_takes_their_place(make_plan):
    plan = make_plan(checkpoint='checkpoint { pretrained = "runs//a" }')
    assert plan.node("setup.pretrained").args == {"path": "runs/a"}
    ids = [node.id for node in plan.nodes]
    assert ids.index("setup.weights") + 1 == ids.index("setup.pretrained")
    both = make_plan(checkpoint='checkpoint { from = "runs/b", pretrained = "runs/a" }')
    assert "setup.pretrained" not in ops(both) and both.node("setup.resume").args["origin"] == "runs/b"


def test_of_two_beginnings_one_changes_nothing(compiled):
    said = compiled(checkpoint='checkpoint { from = "a", pretrained = "b" }').diagnostics
    assert [d.code for d in said] == ["W501", "W401"]  # there is no `a` yet
    assert "pretrained has no effect" in said.render()


@pytest.mark.parametrize(("every", "block", "code", "words"), [
    (EVERY, "best = eval.coed.loss", "X620", ("there is no such dataset", "did you mean `code`?")),
    ("", "best = eval.code.loss", "X620", ("no tick evaluates it", "every 500 steps eval code")),
    ("every 9 steps eval code\nevery 20 steps checkpoint", "best = eval.code.loss", "W602", ("never evaluated",)),
    ("every 9 steps eval code\nevery 20 steps checkpoint\non finish eval code { batches = none }",
     "best = eval.code.loss", "W602", ("never evaluated",)),
    (EVERY, "best = eval.code.acc", "X620", ("measure loss, bits_per_byte", "write `best = eval.code.loss`")),
    (EVERY, "best = eval.code.lss, best_is = lowest", "X620", ("did you mean `loss`?",)),
    (EVERY, "best = hook.quality.score, best_is = highest", "X620", ("there is no such hook", "hooks: none")),
    ("", "overlap = latest", "W401", ("overlap has no effect",)),
    ("", "enabled = false, keep = 1", "W401", ("keep has no effect",)),
])  # fmt: skip
def test_what_is_said(compiled, every, block, code, words):
    said = compiled(every=every, checkpoint=f"checkpoint {{ {block} }}").diagnostics
    assert [d.code for d in said] == [code]
    text = said.render()
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("every", "curves"), [
    ("every 9 steps eval code\non finish eval code", {}),
    ("every 9 steps eval code\non finish eval code { batches = none }", {"event.finish.eval.code": "final"}),
    ("on finish eval code { batches = none }\nevery 9 steps eval code", {"event.finish.eval.code": "final"}),
    ("on finish eval code { batches = none }", {}),
    ("every 9 steps eval code { batches = 5 }\non finish eval code", {}),  # a twentieth of 100 steps
    ("every 9 steps eval code { batches = 2 }\nevery 30 steps eval code { batches = 8 }",
     {"tick.eval.code.2": "eval_8"}),
    ("every 9 steps eval code { batches = 2 }\nevery 30 steps eval code { batches = none }\non finish eval code",
     {"tick.eval.code.2": "eval_all", "event.finish.eval.code": "final"}),
])  # fmt: skip
def test_an_evaluation_on_other_rows_is_another_curve(make_plan, every, curves):
    plan = make_plan(every=every)
    found = {node.id: node.args["curve"] for node in plan.nodes if "curve" in node.args}
    assert found == curves
    assert all(f"as {curve}/code" in plan.node(id).does for id, curve in curves.items())


@pytest.mark.parametrize("every", [
    EVERY,
    "every 9 steps eval code\nevery 5 min checkpoint",
    "every 10% eval code",
    "every 9 steps eval code then checkpoint",
    "every 25 steps eval code\nevery 30 steps checkpoint",  # at the end of the run
    "every 9 steps eval code\nevery 30 steps checkpoint\non finish eval code",
])  # fmt: skip
def test_nothing_is_said_where_they_meet(compiled, every):
    found = compiled(every=every, checkpoint="checkpoint { best = eval.code.loss }")
    assert not list(found.diagnostics), found.diagnostics.render()
    assert found.plan.node("setup.checkpoint").args["best"] == "eval/code/loss"


@pytest.mark.parametrize(
    ("settings", "key", "highest"),
    [("best = eval.code.loss", "eval/code/loss", False),
        ("best = eval.code.bits_per_byte", "eval/code/bits_per_byte", False),
        ("best = eval.code.loss, best_is = highest", "eval/code/loss", True)],
)  # fmt: skip
def test_the_better_value_is_known_by_the_metric_or_said(make_plan, settings, key, highest):
    node = make_plan(every=EVERY, checkpoint=f"checkpoint {{ {settings} }}").node("setup.checkpoint")
    assert (node.args["best"], node.args.get("highest", False)) == (key, highest)
    assert f"the one with the {'highest' if highest else 'lowest'} eval.code" in node.does


@pytest.mark.parametrize(("text", "parts", "better"), [
    ("eval.arc.acc", ("arc", None, "acc"), "highest"),
    ("eval.a.b.loss", ("a.b", None, "loss"), "lowest"),
    ("eval.prefs.rewards.accuracy", ("prefs", None, "rewards/accuracy"), "highest"),
    ("eval.prefs.rewards/margin", ("prefs", None, "rewards/margin"), "highest"),
    ("eval.prompts.reward", ("prompts", None, "reward"), "highest"),
    ("eval.prompts.policy/kl", ("prompts", None, "policy/kl"), None),
    ("hook.quality.reward", (None, "quality", "reward"), None),
])  # fmt: skip
def test_a_metric_says_what_it_is_of_and_which_value_is_better(text, parts, better):
    found = MeasuredNumber.read(text)
    assert found is not None and (found.dataset, found.hook, found.what) == parts and found.better == better
    assert found.key == text.replace(".rewards.", "/rewards/").replace(".", "/").replace("a/b", "a.b")


def done_in(plan, step: int) -> list[str]:
    """The nodes of the ticks that are due behind a step, in the order in which they run."""
    due = [tick for tick in plan.timeline.ticks if tick.steps and step % tick.steps == 0]
    return [node.removeprefix("tick.") for tick in due for node in tick.nodes]


@pytest.mark.parametrize(("every", "order"), [
    ("every 2 steps checkpoint then eval code", "log eval.code checkpoint"),
    ("every 2 steps checkpoint then log then eval code", "log eval.code checkpoint"),
    ('every 2 steps checkpoint then notify("x") then eval code', "log eval.code checkpoint notify"),
    ("every 4 steps checkpoint\nevery 2 steps eval code", "eval.code log checkpoint"),
    # Of several that save in one step the first save is the one that counts.
    ("every 2 steps log then checkpoint\nevery 4 steps eval code then checkpoint",
        "eval.code log checkpoint checkpoint"),
    ("every 2 steps checkpoint\nevery 4 steps stop then checkpoint then eval code",
        "eval.code log checkpoint checkpoint.2"),
    ('every 2 steps checkpoint\nevery 4 steps notify("x") then checkpoint then notify("x")',
        "notify log checkpoint checkpoint notify"),
])  # fmt: skip
def test_in_a_step_a_state_is_measured_before_it_is_saved(make_plan, every, order):
    plan = make_plan(every=every)
    assert done_in(plan, 4) == order.split()
    assert any(tick.stop for tick in plan.timeline.ticks) == ("stop" in every)


@pytest.mark.parametrize(("settings", "copies"), [
    ("", 0),
    ("mode = async", 1),
    ("mode = async, backend = file", 3),
    ("mode = async, backend = file, overlap = latest", 2),
    ("mode = async, backend = file, overlap = latest, best = eval.code.loss", 4),
])  # fmt: skip
def test_a_plan_says_how_many_copies_of_the_state_there_can_be(make_plan, settings, copies):
    plan = make_plan(every=EVERY, checkpoint=f"checkpoint {{ {settings} }}")
    node = plan.node("setup.checkpoint")
    assert node.args["copies"] == copies
    if "file" in settings:  # copied before the next step begins, and kept in a queue
        assert not ops(plan) & {"step.await_copy", "step.put_off_save"}
        assert f"at most {copies} copies in host memory" in node.does and "latest.pt" in node.does


def test_one_file_has_one_writer(compiled):
    found = compiled(world=2, parallel="parallel { fsdp 2 }", checkpoint="checkpoint { backend = file }")
    assert [d.code for d in found.diagnostics] == ["X621"] and found.plan is None
    assert "this run has 2 ranks" in found.diagnostics.render()
    nothing_written = "checkpoint { backend = file, enabled = false }"
    quiet = compiled(world=2, parallel="parallel { fsdp 2 }", checkpoint=nothing_written)
    assert quiet.plan is not None and [d.code for d in quiet.diagnostics] == ["W401"]


def test_a_best_of_a_dataset_whose_name_is_unknown_is_not_judged(load):
    spec = load(every=EVERY, checkpoint="checkpoint { best = eval.coed.loss }")
    assert [d.code for d in check_spec(spec)] == ["X620"]
    assert not list(check_spec(spec, unknown_settings=frozenset({"dataset.code.name"})))


@pytest.mark.parametrize(("settings", "saves", "rest", "most"), [
    ("keep = 3", None, 3, 4),
    ("keep = 1", 20, 1, 2),
    ("keep = 1, best = eval.code.loss", 20, 2, 3),
    ("keep = 3, best = eval.code.loss", 2, 2, 2),
    ("keep = none", 20, 20, 20),
])  # fmt: skip
def test_how_many_checkpoints_lie_on_the_disk_at_once(make_plan, settings, saves, rest, most):
    """The newest, the best and the one that is being written, beside the weights alone."""
    plan = make_plan(every=EVERY, checkpoint=f"checkpoint {{ {settings} }}")
    found, bare = (
        disk_of(plan, saves),
        disk_of(make_plan(checkpoint=f"checkpoint {{ {settings}, model = false }}", every=EVERY), saves),
    )
    assert found is not None and bare is not None and bare.weights == 0 and found.full == bare.full
    assert (bare.rest, bare.most) == (rest * bare.full, most * bare.full)
    assert (found.rest - bare.rest, found.most - bare.most) == (found.weights, found.weights)
    assert 1 < found.full / plan.estimates.checkpoint_bytes < 1.25  # a small model: 2 KB for each of its tensors


def test_averages_are_on_the_disk_twice_where_they_are_published(make_plan):
    bf16 = {"precision": "precision { params = bf16 }", "ema": "ema { publish = true }"}
    unpublished, published = (
        disk_of(make_plan(**{**bf16, "ema": f"ema {{ publish = {word} }}"}), 1) for word in ("false", "true")
    )
    assert unpublished is not None and published is not None and unpublished.full == published.full
    assert 1.5 < published.weights / unpublished.weights < 2  # in fp32


def test_where_nothing_is_saved_or_nobody_knows_how_often_nothing_is_said_of_the_disk(make_plan):
    assert disk_of(make_plan(checkpoint="checkpoint { keep = none }"), None) is None
    assert disk_of(make_plan(checkpoint="checkpoint { enabled = false }"), 0) is None


def test_a_rank_copies_what_it_holds(make_plan):
    """A replica has all of the state, which is written once."""
    size = make_plan().estimates.copy_bytes
    assert size == make_plan().estimates.checkpoint_bytes
    assert make_plan(parallel="parallel { fsdp 2 }").estimates.copy_bytes == pytest.approx(size / 2, rel=0.01)
    copies = make_plan(parallel="parallel { fsdp 1 { replicate = 2 } }", checkpoint="checkpoint { mode = async }")
    assert copies.estimates.copy_bytes == size
    assert f"about {bytes_text(size)} a rank" in copies.node("setup.checkpoint").does
