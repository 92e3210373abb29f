"""Losses of the user's own: chosen as the built-in one is, with their parameters as settings, and seen in the plan."""

import re
from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.resumable import resumable

PARTS = '''\
from xtrain import loss, schedule

raise SystemExit("this file was run")

@loss
def focal(logprob_T, gamma: float = 2.0):
    """Tokens that are predicted well count less."""

@loss()
def sure(lse_T, entropy_T, *, weight: float, mean_logprob_T): ...

@schedule
def triangle(step, total): ...
'''
BASE = (Path(__file__).parent / "data" / "quickstart.xtrain").read_text()
BASE = re.sub(r"(loss|collate) .*", "", BASE) + 'use "parts.py"\n'


@pytest.fixture
def own(load, tmp_path):
    """Load a text with a file of parts beside it."""

    def run(text, parts=PARTS, sets=()):
        (tmp_path / "parts.py").write_text(parts, encoding="utf-8")
        (tmp_path / "spec.xtrain").write_text(f"{BASE}\n{text}")
        return load_spec("spec.xtrain", sets)

    return run


@pytest.fixture
def planned(own, tmp_path):
    def run(text, parts=PARTS):
        own(text, parts)
        found = plan_from_path(tmp_path / "spec.xtrain")
        assert found.plan is not None, found.diagnostics.render()
        return found.plan

    return run


def test_it_is_a_block_whose_settings_are_its_parameters(own):
    loaded = own("loss focal { gamma = 1.5, z_loss = 1e-4, chunk = 1 MiB }", sets=("loss.gamma=3",))
    assert loaded.spec is not None, loaded.diagnostics.render()
    chosen = loaded.spec.loss
    assert (chosen.kind, chosen.z_loss, chosen.chunk.value, chosen.plain) == ("focal", 1e-4, 2**20, False)
    assert chosen.args()["user"]["arguments"] == {"gamma": 3} and chosen.reads(chosen.args()) == ()
    text = loaded.resolved_text()
    Path("again.xtrain").write_text(text)
    again = load_spec("again.xtrain")
    assert not again.diagnostics and again.spec == loaded.spec and again.resolved_text() == text


def test_what_it_reads_are_the_names_of_its_parameters(own):
    """The first one is the log-probability of the label, however it is called."""
    chosen = own("loss sure { weight = 1 }").spec.loss
    assert chosen.reads(chosen.args()) == ("mean_logprob_T", "entropy_T")
    assert chosen.call()["arguments"] == {"weight": 1}


UNITS = """
from xtrain import collator, loss

@collator(takes="labelled samples")
def halves(samples): ...

@loss(unit="pair", columns=("ref_logprobs",), values=("margin",))
def own(logprob_U, ref_logprobs, margin, tokens_U, beta: float = 0.1): ...

@loss(columns=["advantages"])
def tokens(logprob_T, advantages, low: float = 0.5): ...

@loss(values=["margin"])
def wrong(logprob_T, margin): ...
"""


def test_a_loss_of_pairs_reads_sums_of_columns_and_values(own):
    chosen = own("loss own { beta = 0.2 }", UNITS).spec.loss
    assert (chosen.unit, chosen.columns, chosen.values, chosen.across) == ("pair", ("ref_logprobs",), ("margin",), True)
    args = chosen.args()
    assert args["unit"] == "pair" and args["reads"] == [] and args["columns"] == ["ref_logprobs"]
    assert args["user"]["arguments"] == {"beta": 0.2} and chosen.z_loss == 0
    found = own("loss own { z_loss = 0.1 }", UNITS).diagnostics.errors
    assert [each.code for each in found] == ["X203"]
    chosen = own("loss tokens { z_loss = 0.1 }", UNITS).spec.loss
    assert (chosen.unit, chosen.columns, chosen.across) == ("token", ("advantages",), False)
    assert "unit" not in chosen.args() and chosen.args()["user"]["arguments"] == {"low": 0.5}


def test_the_plan_of_a_loss_of_pairs_shows_what_is_read(planned):
    plan = planned(
        "collate = to_tensor -> flatten -> shift_tokens -> halves() -> pack(sequential)\n"
        "loss own { reference = precomputed }",
        UNITS,
    )
    assert plan.node("collate.pack").args["unit"] == "pair" and plan.node("step.agree").args["unit"] == "pair"
    assert plan.node("collate.pack").args["columns"] == ["ref_logprobs"]
    assert "for each pair" in plan.node("setup.loss").does and "pairs of the whole step" in (
        plan.node("step.forward_backward").does
    )


def test_values_are_not_for_a_loss_of_tokens(own, tmp_path):
    own("collate = to_tensor -> flatten -> shift_tokens -> halves() -> pack(sequential)\nloss wrong", UNITS)
    (error,) = plan_from_path(tmp_path / "spec.xtrain").diagnostics.errors
    assert error.code == "X439" and "`margin`" in error.message and 'unit="sequence"' in error.hint


@pytest.mark.parametrize(("decorator", "message"), [
    ('@loss(unit="row")', "there is no unit `row`"),
    ("@loss(unit=KIND)", "read without running the code"),
    ('@loss(columns="a b")', "must list names"),
    ('@loss(unit="pair", reads=["x"])', "are `unit` and `columns` and `values`"),
])  # fmt: skip
def test_a_decorator_that_cannot_be_read_is_reported(own, decorator, message):
    found = own("loss own", f"from xtrain import loss\n{decorator}\ndef own(x): ...\n").diagnostics
    assert any(each.code == "X223" and message in each.message for each in found)


# (text, code, part of the message, part of the hint)
CALLS = [
    ("loss foca {}", "X305", "no kind `foca`", "`focal`"),
    ("loss focal { gama = 1 }", "X203", "unknown setting `gama`", "`gamma`"),
    ("loss focal { label_smoothing = 0.1 }", "X203", "unknown setting `label_smoothing`",
        "z_loss, reference, chunk, gamma"),
    ('loss focal { gamma = "x" }', "X301", "`gamma` must be a number", None),
    ("loss sure", "X204", "needs `weight`", None),
    ("loss sure { weight = 1, entropy_T = 2 }", "X203", "unknown setting `entropy_T`", None),
    ("loss triangle", "X219", "`triangle` is a schedule", "scheduler NAME"),
    ("loss cross_entropy { gamma = 1 }", "X208", "`gamma`", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "message", "hint"), CALLS)
def test_its_settings_are_checked(own, text, code, message, hint):
    found = next(each for each in own(text).diagnostics if each.severity == "error")
    assert found.code == code
    assert message in found.message
    assert hint is None or hint in f"{found.hint} {[note for note, _ in found.all_notes]}"


def test_the_plan_shows_a_node_and_other_code_is_another_plan(planned):
    plan = planned("loss sure { weight = 1 }")
    node = plan.node("setup.loss")
    assert node.args["reads"] == ["mean_logprob_T", "entropy_T"] and node.args["user"]["function"] == "sure"
    assert "sure of parts.py" in node.does and "`entropy_T`" in node.does
    other = planned("loss sure { weight = 1 }", PARTS + "# changed\n")
    assert (other.id, other.config_id) != (plan.id, plan.config_id)


def test_what_becomes_of_a_checkpoint_under_another_loss_is_said(planned):
    plain, two, three = (planned(f"loss {loss}") for loss in ("cross_entropy", "focal", "focal { gamma = 3 }"))
    (reason,) = resumable(plain, two).reasons
    assert (reason.kind, reason.effect, reason.path) == ("safe", "learning", "loss.kind")
    assert reason.text == "cross_entropy → focal: another loss is minimized from here on"
    (reason,) = resumable(two, three).reasons
    assert (reason.kind, reason.effect) == ("safe", "learning")
    assert "gamma = 2" in reason.text and "gamma = 3" in reason.text and "other code, or the same" in reason.text
