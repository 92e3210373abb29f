"""`notify("…")`: an action whose command stands in brackets."""

import pytest

from xtrain.components.actions.checkpoint import CheckpointAction
from xtrain.components.actions.notify import Notify
from xtrain.dsl.diagnostics.suggest import Fix
from xtrain.dsl.load import load_spec
from xtrain.dsl.spec_text import resolved_text, spec_json


@pytest.mark.parametrize(("written", "command"), [
    ('notify("./page.sh \\"now\\"")', './page.sh "now"'),
    ('notify(\n  "./page.sh",\n)', "./page.sh"),
    ("notify(who)", "./page.sh me"),
    ('notify(env("NO_SUCH_HOOK", "true"))', "true"),
])  # fmt: skip
def test_a_command_is_a_text(good, written, command):
    let = 'let who = "./page.sh me"\n' if "who" in written else ""
    spec = good(f"{let}on loss_spike {written} then checkpoint")
    assert spec.events[-1].actions == (Notify(command), CheckpointAction())


def test_it_may_stand_behind_every(good):
    assert good('every 10 steps log then notify("a")').ticks[-1].actions[1:] == (Notify("a"),)


def test_the_resolved_spec_says_the_same(good, tmp_path):
    spec = good('on disk notify("say \\"x\\"\\n") then stop')
    text = resolved_text(spec)
    assert 'on disk notify("say \\"x\\"\\n") then stop' in text
    (tmp_path / "again.xtrain").write_text(text)
    assert load_spec(tmp_path / "again.xtrain").spec == spec
    assert {"event": "disk", "actions": [{"notify": {"command": 'say "x"\n'}}, {"stop": {}}]} in spec_json(spec)["on"]


@pytest.mark.parametrize(("written", "code"), [
    ("on finish notify", "X226"),
    ('on finish notify "./page.sh"', "X226"),
    ("on finish notify()", "X226"),
    ('on finish notify("a", "b")', "X226"),
    ('on finish notify(command = "a")', "X226"),
    ("on finish notify(3)", "X301"),
    ("on finish notify([1])", "X301"),
    ('on finish notify(" ")', "X304"),
    ('on finish notify("a") { limit = 3 s }', "X203"),
    ('on finish eval("library")', "X226"),
    ('every 3 steps log("a")', "X226"),
])  # fmt: skip
def test_what_is_wrong_is_said(codes, written, code):
    assert codes(written) == [code]


def test_brackets_are_put_around_a_command_that_has_none(load):
    text = 'on finish notify "./page.sh"'
    (found,) = load(text).diagnostics
    assert isinstance(found.fix, Fix) and found.fix.text == 'notify("./page.sh")'


def test_a_word_is_not_a_command(codes):
    assert codes("on finish notify(page)") != []
