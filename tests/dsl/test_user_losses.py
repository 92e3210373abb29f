"""Losses of the user's own: chosen as the built-in one is, with their parameters as settings, and seen in the plan."""

import re
from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.planner.compare.resumable import resumable
from xtrain.planner.load import plan_from_path

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


# (text, code, part of the message, part of the hint)
CALLS = [
    ("loss foca {}", "X305", "no kind called `foca`", "`focal`"),
    ("loss focal { gama = 1 }", "X203", "unknown setting `gama`", "`gamma`"),
    ("loss focal { label_smoothing = 0.1 }", "X203", "unknown setting `label_smoothing`", "z_loss, chunk, gamma"),
    ('loss focal { gamma = "x" }', "X301", "`gamma` must be a number", None),
    ("loss sure", "X204", "needs `weight`", None),
    ("loss sure { weight = 1, entropy_T = 2 }", "X203", "unknown setting `entropy_T`", None),
    ("loss triangle", "X219", "`triangle` is a schedule", "scheduler NAME"),
    ("loss cross_entropy { gamma = 1 }", "X203", "unknown setting `gamma`", None),
]


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
    assert reason.text == "cross_entropy → focal: another loss is minimised from here on"
    (reason,) = resumable(two, three).reasons
    assert (reason.kind, reason.effect) == ("safe", "learning")
    assert "gamma = 2" in reason.text and "gamma = 3" in reason.text and "other code, or the same" in reason.text
