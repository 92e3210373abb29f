"""Optimizers and schedules of the user's own: chosen as built-in ones are, with their parameters as settings."""

import re
from pathlib import Path

import pytest
from state_bytes import state_bytes

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.load import load_spec
from xtrain.dsl.reference.text import own_functions
from xtrain.dsl.spec_text import spec_json
from xtrain.dsl.values import Quantity
from xtrain.plan.checkpoints import checkpoint_contents
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.page import render

PARTS = '''\
from typing import Literal
from xtrain import action, evaluation_step, hook, optimizer, schedule, source, step
import xtrain as x

raise SystemExit("this file was run")

@optimizer(state=("average", "square"), scalars="step")
def mine(groups, lr, beta: float = 0.9, *, names: list[str] = ["a"], mode: Literal["soft", "hard"] = "soft",
         weight_decay: float = 0.1, _odd=None, from_: int = 3):
    """An average of gradients."""

@x.optimizer()
def bare(groups, power: int): ...

@schedule
def triangle(step, total, up: float = 0.5): ...

@source
def documents(): ...

@hook("after_backward", changes="gradients")
def scale(context, factor: float = 0.5): ...

@hook(place="at_end")
def report(context): ...

@step
def body(context, times: int = 1): ...

@evaluation_step
def evaluated(context): ...

@action
def norms_of(context, every_other: int = 2, of: str = "", kind: bool = True):
    """Norms of parameters."""
'''
BASE = (Path(__file__).parent / "data" / "quickstart.xtrain").read_text()
BASE = re.sub(r"(optimizer|scheduler|collate) .*", "", BASE) + 'use "parts.py"\n'
GOOD = "optimizer mine { lr = 0.1, beta = 0.5 }\nscheduler triangle { up = 0.25 }\n"


@pytest.fixture
def own(load, tmp_path):
    """Load a text with a file of parts beside it."""

    def run(text, parts=PARTS, sets=()):
        (tmp_path / "parts.py").write_text(parts, encoding="utf-8")
        (tmp_path / "spec.xtrain").write_text(f"{BASE}\n{text}")
        return load_spec("spec.xtrain", sets)

    return run


def test_they_are_blocks_whose_settings_are_their_parameters(own):
    loaded = own(GOOD, sets=("optimizer.mode=hard", "optimizer._odd=[1]", "optimizer.clip=none"))
    assert loaded.spec is not None, loaded.diagnostics.render()
    chosen = loaded.spec.optimizer
    assert (chosen.kind, chosen.lr, chosen.clip, chosen.module) == ("mine", 0.1, None, "parts.py")
    arguments = {"beta": 0.5, "names": ["a"], "mode": "hard", "weight_decay": 0.1, "_odd": [1], "from_": 3}
    assert chosen.call()["arguments"] == arguments
    assert [each.name for each in chosen.state(chosen.args(), "w")] == ["average", "square"]
    assert chosen.scalars(chosen.args(), "w") == ("step",)
    assert loaded.spec.scheduler.call()["arguments"] == {"up": 0.25} and loaded.spec.scheduler.lengths() == {}
    assert spec_json(loaded.spec)["use"] == ["parts.py"]
    assert spec_json(loaded.spec)["optimizer"]["kind"] == "mine"
    text = loaded.resolved_text()
    Path("again.xtrain").write_text(text)
    again = load_spec("again.xtrain")
    assert not again.diagnostics, again.diagnostics.render()
    assert again.spec == loaded.spec and again.resolved_text() == text


# (text, code, part of the message, part of the hint)
CALLS = [
    ("optimizer mien { lr = 1 }", "X305", "no kind `mien`", "`mine`"),
    ("optimizer mine { beta = 1 }", "X204", "needs `lr`", "lr = 3e-4"),
    ("optimizer mine { lr = 1, bet = 1 }", "X203", "unknown setting `bet`", "`beta`"),
    ("optimizer mine { lr = 1, eps = 1 }", "X203", "unknown setting `eps`", "settings of `optimizer`: lr, clip, beta"),
    ('optimizer mine { lr = 1, beta = "x" }', "X301", "`beta` must be a number", None),
    ("optimizer mine { lr = 1, beta = 10% }", "X302", "plain number", "0.1"),
    ("optimizer mine { lr = 1, mode = sofd }", "X305", "cannot be `sofd`", "`soft`"),
    ("optimizer mine { lr = 1, _odd = word }", "X202", "`word` is not defined", None),
    ("optimizer mine { lr = -1 }", "X304", "`lr` must be above 0", None),
    ("optimizer bare { lr = 1 }", "X204", "needs `power`", None),
    ("optimizer triangle { lr = 1 }", "X219", "`triangle` is a schedule", "scheduler NAME"),
    ("optimizer documents { lr = 1 }", "X219", "`documents` is a source", "the `source` of"),
    ("optimizer mine { lr = 1 }\nhook scal { x = 1 }", "X219", "there is no function `scal` with `@hook`", "`scale`"),
    ("optimizer mine { lr = 1 }\nhook mine {}", "X219", "`mine` is an optimizer", "optimizer NAME"),
    ("optimizer mine { lr = 1 }\nhook scale { facto = 1 }", "X203", "unknown setting `facto`", "`factor`"),
    ("optimizer mine { lr = 1 }\nevery 2 steps norm_of", "X214", "no action `norm_of`", "`norms_of`"),
    ("optimizer mine { lr = 1 }\nevery 2 steps norms_of { off = 1 }", "X203", "unknown setting `off`", "`of`"),
    ("optimizer mine { lr = 1 }\nevery 2 steps norms_of { of = 1 }", "X301", "`of` must be a string", None),
    ("optimizer mine { lr = 1 }\nevery 2 steps norms_of(3)", "X226", "takes no parentheses", "`norms_of`"),
    ("optimizer mine { lr = 1 }\nstep bdy", "X219", "there is no function `bdy` with `@step`", "`body`"),
    ("optimizer mine { lr = 1 }\nstep evaluated", "X219", "`evaluated` is an evaluation_step", "evaluation_step NAME"),
    ("optimizer mine { lr = 1 }\nstep body { tims = 1 }", "X203", "unknown setting `tims`", "`times`"),
    ("optimizer mine { lr = 1 }\nhook {}", "X207", "a `hook` needs a name", "hook watch"),
]


@pytest.mark.parametrize(("text", "code", "message", "hint"), CALLS)
def test_their_settings_are_checked(own, text, code, message, hint):
    (found,) = own(text).diagnostics
    assert found.code == code
    assert message in found.message
    assert hint is None or hint in f"{found.hint} {[note for note, _ in found.all_notes]}"


def test_lengths_of_built_in_schedules_are_none_of_theirs(own):
    (found,) = own("optimizer mine { lr = 1 }\nscheduler triangle { warmup = 10 steps }").diagnostics
    assert (found.code, found.hint) == ("X203", None)
    (found,) = own("optimizer mine { lr = 1 }", sets=("optimizer.bta=1",)).diagnostics
    assert (found.code, found.hint) == ("X217", "did you mean `beta`?")
    loaded = own("optimizer mine { lr = 1 }\nscheduler cosine { warmup = 10 steps }")
    assert loaded.spec.scheduler.warmup == Quantity(10, "steps")


# (what stands behind the imports, code, part of the message, text of the line that it points at)
DECLARED = [
    ("@optimizer(state=NAMES)\ndef f(groups): ...", "X223", "`state` is read without running", "NAMES"),
    ('@optimizer(state=("a", "a"))\ndef f(groups): ...', "X223", "each once", "state="),
    ('@optimizer(state="two words")\ndef f(groups): ...', "X223", "must list names", "state="),
    ('@optimizer(keeps=("a",))\ndef f(groups): ...', "X223", "are `state` and `scalars`", "keeps"),
    ("@optimizer()\ndef f(): ...", "X223", "no parameter for its input", "def f"),
    ("@optimizer()\ndef f(groups, clip=1): ...", "X223", "cannot be named `clip`", "def f"),
    ("@optimizer()\ndef f(groups, kind=1): ...", "X223", "cannot be named `kind`", "def f"),
    ("@optimizer()\ndef f(groups, a=len('x')): ...", "X223", "known only when the code is run", "def f"),
    ("@optimizer()\ndef adamw(groups): ...", "X224", "already a word", "def adamw"),
    ("@hook\ndef f(context): ...", "X223", "`@hook` of `f` lacks `place`", "@hook"),
    ('@hook("after_step", "gradients")\ndef f(c): ...', "X223", "cannot change gradients after_step", "@hook"),
    ('@hook("afer_step")\ndef f(c): ...', "X223", "no place `afer_step`", "@hook"),
    ('@hook("at_end")\ndef f(c, name): ...', "X223", "cannot be named `name`", "def f"),
    ("@action(3)\ndef f(context): ...", "X223", "takes no arguments", "@action"),
    ("@action\ndef tokens(context): ...", "X224", "already a word", "def tokens"),
    ("@action\ndef eval(context): ...", "X224", "already a word", "def eval"),
    ("@schedule\ndef f(step): ...", "X223", "no parameter for `step` and `total`", "def f"),
    ("@schedule(1)\ndef f(step, total): ...", "X223", "takes no arguments", "@schedule"),
    ("@schedule\ndef cosine(step, total): ...", "X224", "already a word", "def cosine"),
    ("@loss\ndef f(): ...", "X223", "no parameter for its input", "def f"),
    ("@loss\ndef f(logprob_T, chunk=1): ...", "X223", "cannot be named `chunk`", "def f"),
    ("@loss\ndef f(logprob_T, *more): ...", "X223", "accepts any argument", "def f"),
    ("@loss(1)\ndef f(logprob_T): ...", "X223", "`unit` is read without running", "@loss"),
    ("@loss\ndef cross_entropy(logprob_T): ...", "X224", "already a word", "def cross_entropy"),
]


@pytest.mark.parametrize(("parts", "code", "message", "line"), DECLARED)
def test_declarations_are_checked_in_the_users_file(own, parts, code, message, line):
    head = "from xtrain import action, hook, loss, optimizer, schedule\n@optimizer()\ndef used(groups): ...\n"
    (found,) = own("optimizer used { lr = 1 }", f"{head}{parts}\n").diagnostics
    assert found.code == code
    assert message in found.message
    assert found.span.source.path == "parts.py" and line in found.span.source.line(found.span.line)


def test_hooks_are_blocks_in_the_order_of_the_spec(own):
    loaded = own(f"{GOOD}hook report\nhook scale {{ factor = 3 }}\n", sets=("hook.scale.factor=4",))
    assert loaded.spec is not None, loaded.diagnostics.render()
    assert list(loaded.spec.hooks) == ["report", "scale"]
    found = loaded.spec.hooks["scale"].args()
    assert found["place"] == "after_backward" and found["changes"] == "gradients"
    assert found["user"]["arguments"] == {"factor": 4.0}
    text = loaded.resolved_text()
    Path("again.xtrain").write_text(text)
    again = load_spec("again.xtrain")
    assert again.spec == loaded.spec and again.resolved_text() == text
    assert spec_json(loaded.spec)["hook"] == {"report": {}, "scale": {"factor": 4.0}}


def test_actions_follow_every_and_on(own):
    text = GOOD + "every 2 steps norms_of { every_other = 1 } then checkpoint\non finish norms_of\n"
    loaded = own(text, sets=("every.norms_of=3 steps", "on.finish.norms_of.of=layers"))
    assert loaded.spec is not None, loaded.diagnostics.render()
    tick, event = loaded.spec.ticks[-1], loaded.spec.events[-1]
    assert tick.every == Quantity(3, "steps") and tick.actions[0].call()["arguments"]["every_other"] == 1
    assert event.actions[0].call()["arguments"] == {"every_other": 2, "of": "layers", "kind": True}
    Path("again.xtrain").write_text(loaded.resolved_text())
    again = load_spec("again.xtrain")
    assert again.spec == loaded.spec, again.diagnostics.render()
    found = spec_json(loaded.spec)["on"][-1]["actions"]
    assert found == [{"norms_of": {"every_other": 2, "of": "layers", "kind": True}}]
    plan = plan_from_path("spec.xtrain").plan
    assert plan.node("tick.norms_of").op == "tick.user" and plan.node("event.finish.norms_of").kind == "event"
    shown = next(line for line in render(plan).splitlines() if "norms_of" in line)
    assert "every 2 steps" in shown and "300 times" in shown


def test_the_bodies_of_steps_and_evaluations_are_blocks(own):
    loaded = own(f"{GOOD}evaluation_step evaluated\n", sets=("step=body", "step.times=3"))
    assert loaded.spec is not None, loaded.diagnostics.render()
    assert loaded.spec.step.call()["arguments"] == {"times": 3} and loaded.spec.evaluation_step.name == "evaluated"
    Path("again.xtrain").write_text(loaded.resolved_text())
    again = load_spec("again.xtrain")
    assert again.spec == loaded.spec, again.diagnostics.render()
    assert spec_json(loaded.spec)["step"] == {"name": "body", "times": 3}
    plan = plan_from_path("spec.xtrain", ("step=body",)).plan
    assert plan.node("step.forward_backward").op == "step.body"
    assert plan.node("tick.eval.stdlib").args["user"]["function"] == "evaluated"
    plain = plan_from_path("spec.xtrain").plan
    assert plain.node("step.forward_backward").op == "step.forward_backward" and plain.config_id != plan.config_id
    (found, *rest) = plan_from_path("spec.xtrain", ("step=body", "parallel.pp=2"), world=2).diagnostics
    assert (found.code, len(rest)) == ("X431", 1) and rest[0].code == "X431"


def test_docs_say_what_a_file_declares(own, tmp_path):
    own("")
    wrong = Diagnostics()
    text = own_functions("parts.py", wrong)
    assert not wrong
    first = text.split("\n\nbare")[0].splitlines()
    assert (
        first[0] == "mine  optimizer, of parts.py:8" and "  an optimizer is chosen by `optimizer mine { … }`" in first
    )
    assert "  state = average, square" in first and '  mode  `soft` or `hard`; default "soft"' in first
    assert "power  whole number; required" in text and "scale  hook, of parts.py:" in text
    Path("parts.py").write_text("from xtrain import hook\n@hook()\ndef f(c): ...\n")
    assert "nothing that a spec can use" not in own_functions("parts.py", wrong) and wrong.has_errors


def test_an_unused_one_is_a_warning(own):
    (found,) = own("optimizer adamw { lr = 1 }").diagnostics
    assert (found.code, found.severity) == ("W204", "warning")


def test_the_plan_says_what_is_called_and_what_it_keeps(own, tmp_path):
    def compiled(text, parts=PARTS):
        own(text, parts)
        found = plan_from_path(tmp_path / "spec.xtrain")
        assert found.plan is not None, found.diagnostics.render()
        return found.plan

    plan = compiled(GOOD)
    args = plan.node("setup.optimizer").args
    assert args["user"]["function"] == "mine" and args["state"] == ["average", "square"] and args["scalars"] == ["step"]
    assert checkpoint_contents(plan)["optimizer"] == "mine with average, square, step"
    like = compiled("optimizer adamw { lr = 0.1 }\nscheduler cosine {}")
    assert state_bytes(plan, 0) == state_bytes(like, 0)
    assert plan.estimates.checkpoint_bytes == like.estimates.checkpoint_bytes
    assert "by triangle of parts.py" in render(plan)
    hooked = compiled(f"{GOOD}hook report\nhook scale")
    assert hooked.config_id != plan.config_id == compiled(f"{GOOD}hook report").config_id
    order = [node.id for node in hooked.nodes if node.kind == "step"]
    assert order[order.index("hook.scale") + 1] == "step.clip" and hooked.node("hook.report").kind == "event"
    assert not {node.id for node in plan.nodes} & {"hook.scale", "hook.report", "step.let_go"}
    other = compiled(GOOD, PARTS + "# changed\n")
    assert (other.id, other.config_id) != (plan.id, plan.config_id)
