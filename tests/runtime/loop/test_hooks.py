"""Hooks: called at their places, in the order of the spec, and held to what they say they change."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from projects import Project
from torch import nn

from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.dsl.user_parts.kinds import PLACES
from xtrain.runtime.base.part_decorators import hook
from xtrain.runtime.base.state import Progress
from xtrain.runtime.base.user_parts import PartFailed
from xtrain.runtime.loop.hooks import event_hook, user_body
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.store.checkpoints import CheckpointFolder

HEAD = "import torch\nfrom xtrain import hook\n"
SPEC = """
use "hooks.py"
experiment tiny { seed = 3, budget = 4 steps }
model llama { dim = 16, layers = 1, heads = 2, ffn = 16 }
tokenizer bytes
dataset made { source = synthetic(documents = 50), holdout = 10% }
batch { sequence = 32, rows = 2, accumulate = 2 }
optimizer adamw { lr = 1e-2 }
phase late { from = 50% }
every 2 steps log
every 2 steps eval made
"""
SMOOTHED = "loss cross_entropy { label_smoothing = 0.1 }\n"


def test_every_place_is_called_in_its_order(tmp_path):
    """Metrics of a step come before the hooks of its end, and these before what recurs."""
    project = Project(tmp_path)
    functions = [
        f'@hook("{place}")\ndef at_{place}(context, word="x"):\n'
        "    say(context)\n    objective = context.objective or 0\n"
        "    if context.place in ('before_init', 'after_init', 'before_train'): return\n"
        '    return {"rows": len(context.rows), "step": context.step, "objective": objective, "lr": context.lr}\n'
        for place in PLACES
    ]
    say = 'def say(c):\n    with open("said", "a") as file: print(c.place, c.step, c.phase, c.loss > 0, file=file)\n'
    (project.folder / "hooks.py").write_text(HEAD + say + "\n".join(functions))
    blocks = "".join(f"hook at_{place}\n" for place in reversed(PLACES))
    second = '@hook("after_step")\ndef second(c): open("said", "a").write("second\\n")\n'
    (project.folder / "more.py").write_text(HEAD + second)
    (project.folder / "own.xtrain").write_text(SPEC + SMOOTHED + 'use "more.py"\n' + blocks + "hook second\n")
    found = project.run("own.xtrain")
    step = ["before_step {0} {1} False", "before_backward {0} {1} False"]
    step += ["before_loss {0} {1} False", "after_loss {0} {1} True"] * 2
    step += ["after_backward {0} {1} False"]
    step += ["before_optimizer {0} {1} True", "after_optimizer {0} {1} True", "after_step {0} {1} True", "second"]
    evaluated = ["before_evaluation {0} {1} True", "after_evaluation {0} {1} True"]
    saved = ["before_checkpoint {0} {1} True", "after_checkpoint {0} {1} True"]
    expected = ["before_init 0  False", "after_init 0 train False", "before_train 0 train False"]
    expected += ["before_epoch 1 train False", "before_phase 1 train False"]
    for number, phase in ((1, "train"), (2, "train"), (3, "late"), (4, "late")):
        if number == 3:
            expected += ["after_phase 2 train False", "before_phase 3 late False"]
        recurring = [*step, *(evaluated if number % 2 == 0 else ()), *saved]
        expected += [each.format(number, phase) for each in recurring]
    expected += [f"after_{what} 4 late True" for what in ("phase", "epoch", "train")]
    expected += ["at_end 4 late True"]  # the end has nothing to save: the tick of the same step has
    assert (project.folder / "said").read_text().splitlines() == expected
    records = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r["hook/at_after_step/step"] for r in records] == [1, 2, 3, 4]
    for place in ("before_step", "after_backward", "after_optimizer"):  # also before the optimizer has it
        assert [r[f"hook/at_{place}/lr"] for r in (records[1], records[3])] == [records[1]["lr"], records[3]["lr"]]
    assert all(r["hook/at_after_step/objective"] == r["objective"] for r in (records[1], records[3]))
    assert records[1]["hook/at_before_step/rows"] == 2 and records[1]["eval/made/loss"] and records[1]["loss"]
    saved = json.loads((CheckpointFolder(found / "checkpoints").latest().path / "state.json").read_text())
    # Metrics of the step whose state is saved, by which `checkpoint.best` chooses.
    assert {f"hook/at_{place}/rows" for place in ("before_step", "after_loss", "after_step")} <= saved["metrics"].keys()


@pytest.mark.slow
def test_hooks_around_the_loss_see_one_microbatch(tmp_path):
    """Its loss is the mean over its tokens; weighted by them, the losses of a step are the loss of the step."""
    project = Project(tmp_path)
    text = 'seen = []\n@hook("after_loss")\ndef each(c):\n    (rows,) = c.rows\n'
    text += "    seen.append((c.loss * rows.num_valid, rows.num_valid))\n"
    text += '@hook("after_step")\ndef whole(c):\n    sums = [sum(x) for x in zip(*seen)]\n    seen.clear()\n'
    text += '    return {"loss": sums[0] / sums[1], "count": sums[1]}\n'
    (project.folder / "hooks.py").write_text(HEAD + text)
    (project.folder / "own.xtrain").write_text(
        SPEC.replace("every 2 steps log", "every 1 step log") + "hook each\nhook whole\n"
    )
    found = project.run("own.xtrain")
    for line in (found / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["hook/whole/loss"] == pytest.approx(record["loss"], rel=1e-5)
        assert record["hook/whole/count"] == record["valid_tokens"]


EPOCHS = """
from xtrain import hook, source

@source
def lines(count=12):
    for number in range(count):
        yield f"line {number} ".ljust(30, "x")

@hook("before_epoch")
def begins(c): said("begins", c.step)

@hook("after_epoch")
def ends(c): said("ends", c.step)

def said(*words):
    with open("said", "a") as file:
        print(*words, file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "expected"), [
    ("8 steps", "begins 1 ends 3 begins 4 ends 6 begins 7 ends 8"),
    ("2 epochs", "begins 1 ends 3 begins 4 ends 6"),
])  # fmt: skip
def test_epochs_begin_and_end_with_the_data(tmp_path, budget, expected):
    project = Project(tmp_path)
    (project.folder / "hooks.py").write_text(EPOCHS)
    spec = SPEC.replace("4 steps", budget).replace("synthetic(documents = 50), holdout = 10%", "lines()")
    spec = re.sub("phase late .*\nevery 2 steps log\nevery .*\n", "", spec).replace(
        "rows = 2, accumulate = 2", "rows = 4"
    )
    (project.folder / "own.xtrain").write_text(spec + "hook ends\nhook begins\n")
    project.run("own.xtrain")
    assert (project.folder / "said").read_text().split() == expected.split()


@pytest.mark.slow
@pytest.mark.parametrize(("place", "code", "message"), [
    ("before_init", "c.model", "RuntimeError: there is no model before_init"),
    ("after_init", "return {'here': 1}", "returned metrics after_init, where no step has a record yet"),
])  # fmt: skip
def test_what_is_not_there_before_the_first_step_is_said(tmp_path, place, code, message):
    project = Project(tmp_path)
    (project.folder / "hooks.py").write_text(HEAD + f'@hook("{place}")\ndef early(c): {code}\n')
    (project.folder / "own.xtrain").write_text(SPEC + "hook early\n")
    command = project.start("own.xtrain", "--ui", "plain")
    said = "".join(command.communicate(timeout=120))
    assert command.returncode == 1
    assert re.search(rf"\[X512\] hooks.py:[34]: hook `early`:? {re.escape(message)}", said), said


def test_a_hook_is_called_at_a_failure(tmp_path):
    project = Project(tmp_path)
    text = '@hook("at_failure")\ndef last(c): open("said", "w").write(f"{c.step} {c.failure}")\n'
    text += '@hook("after_step")\ndef breaks(c):\n    if c.step == 2:\n        inner()\n'
    text += 'def inner():\n    raise ValueError("on purpose")\n'
    (project.folder / "hooks.py").write_text(HEAD + text)
    (project.folder / "own.xtrain").write_text(SPEC + "hook last\nhook breaks\n")
    command = project.start("own.xtrain", "--ui", "plain")
    said = "".join(command.communicate(timeout=120))
    assert command.returncode == 1
    assert re.search(r"X512\] hooks\.py:10: hook `breaks`: ValueError: on purpose", said), said
    (failure,) = failures(project)
    lines = failure["traceback"].splitlines()
    assert [line.rpartition(" ")[2] for line in lines if line.startswith("  File")] == ["breaks", "inner"]
    assert lines[-1] == "ValueError: on purpose" and failure["exit_code"] == 1
    logs = [path.read_text(encoding="utf-8") for path in project.folder.glob("runs/*/*/logs/**/*") if path.is_file()]
    assert any(failure["traceback"] in log for log in logs)
    assert "on purpose" in (project.folder / "said").read_text()


def failures(project):
    (events,) = project.folder.glob("runs/*/*/events.jsonl")
    records = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["event"] == "failure"]


def test_an_evaluation_step_of_the_users_own_keeps_bits_per_byte(tmp_path):
    """If each batch has its forward before the next one is taken; of batches that are taken first nothing is known."""
    found = {}
    bodies = {"plain": "", "each": "for b in context.batches", "taken": "for b in list(context.batches)"}
    for name, taken in bodies.items():
        (tmp_path / name).mkdir()
        project = Project(tmp_path / name)
        own = "from xtrain import evaluation_step\n@evaluation_step\ndef body(context):\n"
        own += f"    return sum(float(context.forward(b)) {taken})\n"
        (project.folder / "own.py").write_text(own)
        used = 'use "own.py"\nevaluation_step body\n' if taken else ""
        spec = SPEC.replace('use "hooks.py"\n', used)
        (project.folder / "own.xtrain").write_text(spec)
        path = project.run("own.xtrain") / "events.jsonl"
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[name] = next(event for event in events if event["event"] == "eval")
    plain, each, taken = (found[name] for name in bodies)
    assert plain["loss"] == each["loss"] == taken["loss"]
    assert plain["bits_per_byte"] == each["bits_per_byte"] > 0 and plain["bytes"] == each["bytes"]
    assert taken.get("bits_per_byte") is None


def test_a_run_restarts_after_an_exception_of_a_hook(tmp_path):
    """Exit code 3 would mean that a restart fails in the same way."""
    project = Project(tmp_path)
    text = '@hook("after_step")\ndef once(c):\n    from pathlib import Path\n    if not Path("seen").exists():\n'
    text += '        Path("seen").touch()\n        raise ValueError("on purpose")\n'
    (project.folder / "hooks.py").write_text(HEAD + text)
    (project.folder / "own.xtrain").write_text(SPEC + "hook once\nfault_tolerance { restarts = 1 }\n")
    command = project.start("own.xtrain", "--ui", "plain")
    said = "".join(command.communicate(timeout=120))
    assert command.returncode == 0, said
    assert [each["code"] for each in failures(project)] == ["X512"]


@pytest.mark.parametrize(
    ("code", "message"),
    [("pass", "called `context.forward` of 0 of 1 microbatches; a step must use all"),
        ("return [context.forward(b).backward() for b in context.batches]", "returned list; metrics must be a dict"),
        ("next(context.batches).missing", "step `f`: AttributeError")],
)  # fmt: skip
def test_a_body_takes_all_microbatches(tmp_path, code, message):
    (tmp_path / "parts.py").write_text(f"from xtrain import step\n@step\ndef f(context):\n    {code}\n")
    weight = nn.Parameter(torch.ones(1))

    def whole(_, batch):
        batch.cross_entropy = weight.sum()
        return weight

    model = SimpleNamespace(whole=whole, parameters=lambda: [weight])
    feed = SimpleNamespace(steps=4, epoch=lambda step: None, phase=lambda index: SimpleNamespace(name="train"))
    plan = SimpleNamespace(spec=str(tmp_path / "s.xtrain"))
    rank = SimpleNamespace(device="cpu")
    resources = {"model": model, "optimizer": None, "feed": feed, "rank": rank, "progress": Progress()}
    resources["records"] = SimpleNamespace(measured=lambda found: None)
    digest = module_digest(find_module("parts.py", tmp_path))
    user = {"module": "parts.py", "function": "f", "digest": digest, "arguments": {}}
    call = user_body(plan, user, model, rank, accumulate=1, sync="step", resources=resources)
    row = SimpleNamespace(
        input_ids_BS=None, labels_BS=None, positions_BS=torch.zeros(1, 4, dtype=torch.int64), dataset_B=None,
        real_BS=torch.ones(1, 4, dtype=torch.bool), cumulative_lengths=torch.tensor([0, 4]), sequence=4, text_BS=None,
        columns={}, units=None, in_row_BS=None, place_B=None,
    )  # fmt: skip
    with pytest.raises(PartFailed) as caught:
        call(Step(index=0, microbatches=[row], valid_tokens=4, units=4))
    assert message in str(caught.value)
    assert caught.value.path == tmp_path / "parts.py" and caught.value.line


@pytest.fixture
def call(tmp_path):
    """A hook with this text, called with a model of one parameter; its metrics."""

    def run(text, place="after_backward", changes="nothing"):
        (tmp_path / "parts.py").write_text(f"{HEAD}@hook({place!r}, changes={changes!r})\n{text}\n")
        digest = module_digest(find_module("parts.py", tmp_path))
        user = {"module": "parts.py", "function": "f", "digest": digest, "arguments": {}}
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        feed = SimpleNamespace(steps=4, epoch=lambda step: None, phase=lambda index: SimpleNamespace(name="train"))
        plan = SimpleNamespace(spec=str(tmp_path / "s.xtrain"))
        found: dict[str, float] = {}
        resources = {
            "model": SimpleNamespace(parameters=lambda: [weight]), "optimizer": None, "feed": feed, "rank": None,
            "records": SimpleNamespace(measured=found.update), "progress": Progress(),
        }  # fmt: skip
        event_hook(plan, "hook.f", user, place, changes, resources)(Step(index=0))
        return found

    return run


def test_metrics_have_a_prefix_of_their_own(call):
    assert call("def f(c): return {'a': 1, 'b': torch.tensor(2.0)}") == {"hook/f/a": 1.0, "hook/f/b": 2.0}
    assert call("def f(c): c.resources") == {}


EACH = "def f(c):\n    for p in c.model.parameters(): "
WRONG = [
    ("def f(c): return 3", "nothing", "returned int; metrics must be a dict"),
    ("def f(c): return {'a': 'b'}", "nothing", "gave str as the metric `a`"),
    (f"{EACH}p.grad.mul_(2)", "nothing", "changed gradients after_backward, but its declaration says that it changes"),
    (f"{EACH}p.grad = None", "nothing", "changed gradients"),
    (f"{EACH}p.detach().zero_()", "nothing", "changed parameters"),
    (f"{EACH}p.detach().zero_()", "gradients", "says that it changes gradients"),
]


@pytest.mark.parametrize(("text", "changes", "message"), WRONG)
def test_what_a_hook_does_against_its_declaration_is_refused(call, tmp_path, text, changes, message):
    with pytest.raises(PartFailed) as caught:
        call(text, changes=changes)
    assert message in str(caught.value)
    assert caught.value.path == tmp_path / "parts.py" and caught.value.line


def test_declared_changes_are_made(call):
    assert call(f"{EACH}p.grad.mul_(2)", changes="gradients") == {}
    assert call(f"{EACH}p.detach().zero_()", "after_optimizer", "parameters") == {}


def test_places_that_there_are_not(call):
    for arguments in (("between",), ("after_step", "gradients"), ("after_step", "everything")):
        with pytest.raises(ValueError, match=r"place|change"):
            hook(*arguments)


def test_a_metric_of_a_hook_can_decide_about_the_best_checkpoint(tmp_path):
    project = Project(tmp_path)
    code = (
        '@hook("after_evaluation")\ndef quality(c):\n    return {"score": {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.9}[c.step]}\n'
    )
    (project.folder / "hooks.py").write_text(HEAD + code)
    more = "checkpoint { keep = 1, best = hook.quality.score, best_is = highest }\nhook quality\n"
    (project.folder / "own.xtrain").write_text(SPEC + more)
    found = project.run("own.xtrain")
    assert (found / "checkpoints/best").read_text().strip() == "ckpt-s000000000002"
    assert sorted(path.name for path in (found / "checkpoints").glob("ckpt-s*")) == [
        "ckpt-s000000000002",
        "ckpt-s000000000004",
    ]
