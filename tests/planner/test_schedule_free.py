"""`optimizer schedule_free` in a plan: where weights move, what it keeps, and what it cannot be combined with."""

import pytest

MODEL = "model qwen3 { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 64, tie_embeddings = false }"
BLOCK = "optimizer schedule_free { lr = 1e-3 }"
CONSTANT = "scheduler constant { warmup = 5 steps }"


def test_weights_move_before_the_forward(make_plan):
    plan = make_plan(model=MODEL, optimizer=BLOCK, scheduler=CONSTANT)
    steps = [node.op for node in plan.nodes if node.kind == "step"]
    assert steps.index("step.training_point") < steps.index("step.forward_backward") < steps.index("step.optimizer")
    (only,) = plan.estimates.classes
    assert only.memory.optimizer == 2 * 4 * plan.parameters.total
    adamw = make_plan(model=MODEL, optimizer="optimizer adamw { lr = 1e-3 }", scheduler=CONSTANT)
    assert not [node for node in adamw.nodes if node.op == "step.training_point"]


def test_a_state_that_is_being_copied_is_not_moved(make_plan):
    blocks = {"checkpoint": "checkpoint { mode = async }", "every": "every 10 steps checkpoint"}
    plan = make_plan(model=MODEL, optimizer=BLOCK, scheduler=CONSTANT, **blocks)
    steps = [node.op for node in plan.nodes if node.kind == "step"]
    assert steps.count("step.await_copy") == 1
    assert steps.index("step.await_copy") < steps.index("step.training_point")


def test_a_run_that_goes_back_at_once_leaves_no_step_out(compiled):
    blocks = {"model": MODEL, "optimizer": BLOCK, "scheduler": CONSTANT, "checkpoint": "checkpoint {}"}
    (error,) = compiled(**blocks, every="every 10 steps checkpoint\non nan(2) rollback").diagnostics.errors
    assert error.code == "X437" and "write `on nan rollback`" in error.hint
    plan = compiled(**blocks, every="every 10 steps checkpoint\non nan rollback").plan
    assert plan.node("event.nan.rollback").op == "event.rollback"


@pytest.mark.parametrize(
    "scheduler",
    ["cosine { floor = 100% }", "linear { floor = 100% }", "polynomial { floor = 100% }", "wsd { decay = 0 steps }"],
)
def test_a_schedule_that_falls_to_where_it_was_is_no_fall(compiled, scheduler: str):
    plan = compiled(model=MODEL, optimizer=BLOCK, scheduler=f"scheduler {scheduler}").plan
    assert plan.node("setup.scheduler").args["kind"] == scheduler.partition(" ")[0]


@pytest.mark.parametrize(("blocks", "message"), [
    ({"scheduler": "scheduler cosine {}"}, "as cosine does"),
    ({"scheduler": CONSTANT, "precision": "precision { params = bf16 }"}, "bf16 rounds away"),
    ({"scheduler": CONSTANT, "optimizer": BLOCK.replace("1e-3", "1e-3, betas = [0, 0.9]")}, "the average"),
    ({"scheduler": CONSTANT, "every": "every 10 steps log\non nan(3) skip"}, "a skipped step"),
])  # fmt: skip
def test_what_it_cannot_be_combined_with_is_named(compiled, blocks: dict[str, str], message: str):
    (error,) = compiled(**{"model": MODEL, "optimizer": BLOCK, **blocks}).diagnostics.errors
    assert error.code == "X437" and message in error.message
