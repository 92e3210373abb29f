"""`task NAME { … }` in a plan: what each trains on what, what that costs, and what is said of tasks that do not fit."""

import json

import numpy as np
import pytest
from agreement import hold_against_the_trace
from safetensors.numpy import save_file
from topologies import SCHEDULES, Topology
from traces import plan_of

from xtrain.dsl.load import load_spec
from xtrain.plan.checkpoints import checkpoint_contents, mismatches
from xtrain.plan.serialise import dumps, from_json, to_json
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

from .conftest import spec_text

MODEL = "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, ffn = 192 }"
MOE = """model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 4, expert_ffn = 32
router { aux_loss = 1e-3 } }"""
DATA = """dataset sql { source = synthetic(seed = 1) }
dataset chat { source = synthetic(seed = 2) }
mixture { sql = 3, chat = 1, exact = true }"""
BATCH = "batch { sequence = 64, micro = 2, rows = 8 }"
SQL = "task sql { adapter lora { rank = 8 } }"
CHAT = 'task chat { adapter lora { rank = 4, targets = ["v_proj"] }, optimizer sgd { lr = 0.1, clip = none } }'
BLOCKS = {"model": MODEL, "dataset": DATA, "batch": BATCH, "sql": SQL, "chat": CHAT}


def test_the_plan_shows_each_task_and_the_model_once(make_plan):
    plan = make_plan(**BLOCKS)
    own = {task: [each for each in plan.parameters.tensors if each.task == task] for task in ("sql", "chat")}
    assert len(own["sql"]) == 2 * 28 and len(own["chat"]) == 2 * 4
    assert "layers.0.self_attn.v_proj.tasks.chat.lora_A.weight" in {each.name for each in own["chat"]}
    alone = {task: make_plan(model=MODEL, adapter=text) for task, text in (
        ("sql", "adapter lora { rank = 8 }"), ("chat", 'adapter lora { rank = 4, targets = ["v_proj"] }'))}  # fmt: skip
    trained = {task: each.parameters.trained for task, each in alone.items()}
    assert {task: sum(each.size for each in tensors) for task, tensors in own.items()} == trained
    assert plan.parameters.trained == sum(trained.values())
    assert plan.parameters.total - plan.parameters.trained == make_plan(model=MODEL).parameters.total
    assert plan.node("step.task_gradients").args["tasks"] == {
        "sql": {"datasets": ["sql"], "max_norm": 1.0},
        "chat": {"datasets": ["chat"]},
    }
    groups = [node for node in plan.nodes if node.op == "setup.group"]
    assert [(node.args["task"], node.args["own"]["kind"]) for node in groups] == [("sql", "adamw"), ("chat", "sgd")]
    text = render(plan)
    assert "8 tensors, 1.54k parameters, on chat: sgd" in text and "sql on sql; chat on chat" in text
    assert from_json(to_json(plan)) == plan and '"task": "chat"' in dumps(plan)


def test_other_tasks_are_another_experiment(make_plan):
    base = make_plan(**BLOCKS)
    other = [
        {"chat": CHAT.replace("lr = 0.1", "lr = 0.2")},
        {"chat": CHAT.replace("rank = 4", "rank = 5")},
        {"sql": SQL.replace("task sql {", 'task sql { datasets = ["chat"],'),
         "chat": CHAT.replace("task chat {", 'task chat { datasets = ["sql"],')},
    ]  # fmt: skip
    found = {make_plan(**{**BLOCKS, **blocks}).config_id for blocks in other}
    assert len(found | {base.config_id}) == 4


def test_a_run_goes_on_with_the_same_tasks(make_plan):
    base = make_plan(**BLOCKS)

    def wrong(**blocks: str) -> list[str]:
        before, after = (checkpoint_contents(each) for each in (base, make_plan(**{**BLOCKS, **blocks})))
        return [each.path for each in mismatches(before, after)]

    assert not wrong(sql=SQL.replace("rank = 8", "rank = 8, init = gaussian"))
    assert wrong(sql=SQL.replace("rank = 8", "rank = 8, alpha = 9")) == ["task.sql.adapter.alpha"]
    assert wrong(sql=SQL.replace("rank = 8", "rank = 9, alpha = 8")) == ["task.sql.adapter.rank"]
    learns = make_plan(**{**BLOCKS, "chat": CHAT.replace("clip = none", "clip = 2")})
    (reason,) = resumable(base, learns).reasons
    assert reason.path == "task" and reason.effect == "learning"


WRONG = {
    "a shared mixture": ({"dataset": DATA.replace(", exact = true", "")}, "mixture", "need the same number of rows",
        "exact = true"),
    "one alone": ({"chat": ""}, "task.sql", "`sql` is the only task", "`adapter` of the spec"),
    "no adapter": ({"chat": "task chat { optimizer sgd { lr = 0.1 } }"}, "task.chat", "has no adapter", "adapter lora"),
    "an adapter beside": ({"adapter": "adapter lora {\n rank = 4 }"}, "adapter",
        "in addition to the tasks' adapters", "remove the"),
    "an unknown dataset": ({"chat": CHAT.replace("task chat {", 'task chat { datasets = ["chats"],')},
        "task.chat.datasets", "reads the unknown dataset `chats`", "did you mean `chat`?"),
    "a dataset of two": ({"chat": CHAT.replace("task chat {", 'task chat { datasets = ["chat", "sql"],')},
        "task.chat.datasets", "`sql` is read by task sql and by task chat", "to one task"),
    "a dataset of none": ({"sql": "", "more": SQL.replace("task sql {", 'task other { datasets = ["chat"],'),
            "chat": CHAT.replace("task chat", 'task late').replace("adapter", 'datasets = ["web"], adapter', 1),
            "dataset": "dataset web { source = synthetic() }\n" + DATA.replace("sql = 3", "sql = 2, web = 1")},
        "dataset.sql", "no task reads them", "name it in the `datasets` of a task"),
    "a dataset held out": ({"dataset": DATA.replace("mixture { sql = 3, chat = 1", "mixture { sql = 3, chat = 0")},
        "task.chat", "is not trained on", "a weight in `mixture`"),
    "trained in full": ({"sql": SQL.replace("rank = 8", 'rank = 8, train = ["norm"]')}, "task.sql.adapter.train",
        "all tasks share the model", "leave it out"),
    "a part of the model": ({"sql": SQL.replace("rank = 8", "rank = 8, init = pissa")}, "task.sql.adapter.init",
        "each task would leave a different rest", "use another init"),
    "what is dropped": ({"sql": SQL.replace("rank = 8", "rank = 8, dropout = 0.1")}, "task.sql.adapter.dropout",
        "dropout depends on row numbers", "leave it out"),
    "pieces": ({"activation": "activation none { tile_mlp = 4 }"}, "activation.tile_mlp", "the tasks of", "tile_mlp 1"),
    "groups": ({"group": "group layers { lr_scale = 0.5 }"}, "group.layers", "by their tasks", "remove the group"),
    "spikes": ({"optimizer": "optimizer adamw { lr = 1e-3, clip_spikes = 2.5 }"}, "optimizer.clip_spikes",
        "each task has its own", "use clip alone"),
    "averages": ({"ema": "ema { decay = 0.9 }"}, "ema", "that a task skips", "remove it"),
    "compiled": ({"compile": "compile { mode = default }"}, "compile.mode", "fixed rows for each task", "mode none"),
    "a router's loss": ({"model": MOE}, "model.router.aux_loss", "routers are not trained", "use aux_loss 0"),
    "another mixture later": ({"phase": "phase late { from = 50%, mix = { chat: 3 } }"}, "phase.late.mix",
        "from the first step", "leave it"),
    "texts of none": ({"every": 'on finish generate { prompts = ["a"] }'}, "on.0.actions.0", "of several tasks",
        "name one: chat, sql"),
    "texts of another": ({"every": 'on finish generate { prompts = ["a"], task = "sqll" }'}, "on.0.actions.0.task",
        "no task `sqll`", "did you mean `sql`?"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said_at_its_place(case, load, compiled):
    blocks, path, message, hint = case
    blocks = {**BLOCKS, **blocks}
    (error, *more) = compiled(**blocks).diagnostics.errors
    origin = load(**blocks).origins[path]
    assert error.code == "X440" and not more, [each.message for each in more]
    assert message in error.message and hint in (error.hint or ""), (error.message, error.hint)
    assert error.span is not None and origin.span is not None
    assert (error.span.start, error.span.end) == (origin.span.start, origin.span.end)


def saved_adapter(folder, inputs: int = 64, **config) -> None:
    """What PEFT has saved of v_proj of MODEL."""
    folder.mkdir()
    tensors = {}
    for layer in range(4):
        before = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors |= {
            f"{before}.lora_A.weight": np.ones((4, inputs), "f4"),
            f"{before}.lora_B.weight": np.ones((32, 4), "f4"),
        }
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["v_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def test_an_adapter_of_a_task_is_that_of_a_folder(make_plan, compiled, tmp_path):
    saved_adapter(tmp_path / "good")
    read = f'adapter lora {{ from = "{tmp_path / "good"}" }}'
    chat = f"task chat {{ {read}, optimizer sgd {{ lr = 0.1, clip = none }} }}"
    plan = make_plan(**{**BLOCKS, "chat": chat})
    own, alone = (each.architecture.adapter for each in (plan, make_plan(model=MODEL, adapter=read)))
    assert own.tasks["chat"] == alone and (alone.rank, alone.alpha, alone.targets) == (4, 6, ("self_attn.v_proj",))
    node = plan.node("setup.adapter.chat")
    assert node.op == "setup.read_adapter" and node.args["task"] == "chat" and plan.node("setup.adapter.sql")
    same = 'adapter lora { rank = 4, alpha = 6, targets = ["v_proj"] }'
    drawn = make_plan(**{**BLOCKS, "chat": chat.replace(read, same)})
    assert not mismatches(checkpoint_contents(drawn), checkpoint_contents(plan))

    def wrong(**config: object) -> tuple[str, str, str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        if config:
            saved_adapter(folder, **config)
        (error,) = compiled(**{**BLOCKS, "chat": chat.replace(str(tmp_path / "good"), str(folder))}).diagnostics.errors
        return error.code, error.message, error.hint or ""

    code, message, hint = wrong(lora_dropout=0.1)
    assert code == "X440" and message.startswith("`dropout` of this") and hint == "set another `dropout` next to it"
    assert wrong(inputs=32)[0] == "X524" and wrong(lora_bias=True)[0] == "X522"
    assert "adapter_config.json" in wrong()[1]


def test_a_loss_of_pairs_is_not_of_tasks(compiled):
    errors = compiled(**BLOCKS, loss="loss dpo { beta = 0.2 }").diagnostics.errors
    assert [each.message for each in errors if each.code == "X440"] == [
        "the loss is divided by its pairs, but a task's loss by its tokens"
    ]


def test_a_name_is_a_part_of_names(tmp_path):
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(**{**BLOCKS, "sql": SQL.replace("task sql {", 'task "my.sql" { datasets = ["sql"],')}))
    (error,) = load_spec(path).diagnostics.errors
    assert error.code == "X304" and "letters, digits and `_`" in error.message


TASKS = """dataset others { source = jsonl("data.jsonl") }
mixture { lines = 1, others = 1, exact = true }
task lines { adapter lora { rank = 3, targets = ["v_proj"] } }
task others { adapter lora { rank = 4, alpha = 8 } }"""
EXPERTS = TASKS.replace('["v_proj"]', '["layers.0.mlp.experts"]').replace(
    "alpha = 8", 'targets = ["experts", "o_proj"]'
)
HEADS = TASKS.replace('["v_proj"]', '["v_proj", "lm_head"]').replace(
    "alpha = 8", 'alpha = 8, targets = ["all_linear", "lm_head"]'
)
DORA = TASKS.replace("alpha = 8", "alpha = 8, dora = true")
DORA_EXPERTS = EXPERTS.replace("rank = 4", "rank = 4, dora = true")
ROUTER = ("model.router.aux_loss=0", "model.router.z_loss=0")
FEW = [
    (Topology(tp=2, note="dense"), TASKS),
]
MORE = [
    (Topology(fsdp=2, ep=2, model="moe", shared=ROUTER, note="experts"), EXPERTS),
    (Topology(fsdp=2, note="dense"), TASKS),
    (Topology(pp=2, note="dense"), TASKS),
    (Topology(pp=4, note="dense"), TASKS),
    (Topology(pp=2, sets=SCHEDULES["zero_bubble"], note="dense"), TASKS),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="dense"), TASKS),
    (Topology(tp=2, ep=2, model="moe", shared=ROUTER, note="experts"), EXPERTS),
    (Topology(tp=2, note="dora"), DORA),
    (Topology(tp=2, note="heads"), HEADS),
    (Topology(fsdp=2, ep=2, model="moe", shared=ROUTER, note="dora, experts"), DORA_EXPERTS),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("topology", "tasks", "shallow"),
    [*(pytest.param(*each, True, id=each[0].name) for each in FEW),
        *(pytest.param(*each, False, id=f"{each[0].name}, deep", marks=pytest.mark.matrix) for each in FEW),
        *(pytest.param(*each, False, id=each[0].name, marks=pytest.mark.matrix) for each in MORE)],
)  # fmt: skip
def test_tasks_cost_what_the_plan_says(topology, tasks, shallow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(tmp_path, topology, params="fp32", more=tasks, shallow=shallow))
