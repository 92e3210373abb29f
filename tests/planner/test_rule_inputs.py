"""What a rule is said to rest on is all that can change its verdict: one setting after the other is changed."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from attrs import define, field
from every_setting import alternatives, at, places, replaced

from xtrain.dsl.load import load_spec
from xtrain.dsl.spec import Spec
from xtrain.plan import findings, graph
from xtrain.planner.rules.validate import validate

from .test_every_setting import ALONE, COPIES, FREE, STATED
from .test_tasks import BLOCKS as TASKS

SPECS = Path(__file__).parents[2] / "specs"

# How paths of a spec's tree begin, and those of its origins.
BLOCKS = {
    "datasets": "dataset", "phases": "phase", "groups": "group", "ticks": "every", "events": "on", "hooks": "hook",
    "tasks": "task",
}  # fmt: skip
NAMED = ("datasets.", "tasks.", "groups.")  # a name cannot be changed alone
EXEMPT = {"origins", "uses", "path", "model.folder"}
QUIET = {"pass", "unknown"}

Statuses = dict[str, list[str]]


def spelled(path: str) -> str:
    """As rules name a setting."""
    block, dot, rest = path.partition(".")
    return f"{BLOCKS.get(block, block)}{dot}{rest}".removesuffix("_")


def verdicts(spec: Spec) -> Statuses:
    found, statuses = findings.Findings(spec), defaultdict[str, list[str]](list)
    validate(spec, None, found)
    for check in found.checks:
        statuses[check.id].append(check.status)
    return dict(statuses)


def changed(before: Statuses, after: Statuses) -> Iterator[str]:
    """The rules with another verdict; not those that have nothing to say of one of both."""
    for rule in {**before, **after}:
        one, other = before.get(rule, ["pass"]), after.get(rule, ["pass"])
        if one != other and not ({*one, *other} <= QUIET):
            yield rule


def rests_on(rule: str, path: str, spec: Spec) -> bool:
    """Whether the setting, or a block that it is in, is among the inputs of a rule."""
    parts = path.split(".")
    around = [frozenset({".".join(parts[:count])}) for count in range(1, len(parts) + 1)]
    inputs = list(findings.rule_inputs(rule, spec))
    return any(findings.is_unknown(each, paths) for each in inputs for paths in around)


@define
class Found:
    """A line for each change of a verdict that no input of the rule explains; rules without inputs that fail; and the
    rules whose verdicts have changed at all."""

    unexplained: list[str] = field(factory=list)
    without_inputs: set[str] = field(factory=set)
    rules: set[str] = field(factory=set)

    def walk(self, spec: Spec, most: int, begins: str = "") -> None:
        """most: values of each setting. begins: of the settings whose paths begin so."""
        base = verdicts(spec)
        for path, attribute in places(spec, exempt=EXEMPT):
            value = at(spec, path)
            if not path.startswith(begins) or (path.startswith(NAMED) and attribute.name == "name"):
                continue
            for new in list(alternatives(value, attribute.type))[:most]:
                variant = replaced(spec, path, new)
                after = verdicts(variant)
                for rule in changed(base, after):
                    self.judge(rule, spelled(path), variant, after.get(rule, []))

    def judge(self, rule: str, path: str, spec: Spec, statuses: list[str]) -> None:
        self.rules.add(rule)
        if not any(fnmatchcase(rule, pattern) for pattern in findings.INPUTS):
            self.without_inputs |= {rule} if "fail" in statuses else set()
        elif not rests_on(rule, path, spec):
            self.unexplained.append(f"{rule} is {statuses} by {path}")


def test_verdicts_change_by_their_inputs_alone(load: Callable[..., Spec]):
    found = Found()
    found.walk(load(**FREE), 1)
    found.walk(load(**TASKS), 1, "tasks.")
    found.walk(load_spec(SPECS / "serve_cpu.xtrain").require(), 1, "serve.")
    assert found.unexplained == [] and found.without_inputs == set()
    assert len(found.rules) > 60


@pytest.mark.parametrize("axes", ["tp 2", "cp 2"])
def test_verdicts_of_layouts_change_by_the_heads_of_every_layer(load: Callable[..., Spec], axes: str):
    heads = "heads = 8, kv_heads = 4, full_kv_heads = 1, head_dim = 8"
    model = f"model gemma4 {{ dim = 32, layers = 2, {heads}, window = 8, full_layers = [1] }}"
    found = Found()
    found.walk(load(model=model, parallel=f"parallel {{ {axes} }}"), 1, "model.")
    assert found.unexplained == [] and found.without_inputs == set()


@pytest.mark.slow
def test_verdicts_change_by_their_inputs_alone_whatever_the_value(load: Callable[..., Spec]):
    found = Found()
    for blocks in (FREE, STATED, COPIES, ALONE):
        found.walk(load(**blocks), 100)
    found.walk(load(**TASKS), 100)
    for name in ("grpo_cpu", "dpo_cpu", "reward_cpu", "serve_cpu", "moe_cpu"):
        found.walk(load_spec(SPECS / f"{name}.xtrain").require(), 100)
    assert found.unexplained == [] and found.without_inputs == set()
    assert len(found.rules) > 120


def test_an_input_that_is_not_listed_would_be_found(load: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch):
    """Forget one on purpose, and a whole rule."""
    spec, found = load(**FREE), Found()
    found.walk(spec, 1, "datasets.code.")
    assert "data.form.code" in found.rules and found.unexplained == []
    others = [path for path in findings.rule_inputs("data.form.code", spec) if "chosen" not in path]
    monkeypatch.setitem(findings.INPUTS, "data.form.*", " ".join(others))
    found.walk(spec, 1, "datasets.code.")
    assert found.unexplained == ["data.form.code is ['fail'] by dataset.code.chosen"]
    monkeypatch.delitem(findings.INPUTS, "data.form.*")
    found.walk(spec, 1, "datasets.code.")
    assert found.without_inputs == {"data.form.code"}


@pytest.mark.parametrize(("declare", "table"), [
    (lambda: findings.checks("made.up", reads="batch.rows"), findings.INPUTS),
    (lambda: graph.resumes("made.up"), graph.RESUMED),
])  # fmt: skip
def test_a_module_that_is_imported_again_declares_its_rules_again(monkeypatch, declare, table):
    """The module of a package is, if its first import failed as what it needs was being imported."""
    monkeypatch.setattr(findings, "_DECLARED", {})
    monkeypatch.setattr(graph, "_DECLARED", {})
    monkeypatch.setitem(table, "made.up", None)

    def check() -> None: ...

    def other() -> None: ...

    other.__module__ = "another"
    declare()(check)
    declare()(check)
    with pytest.raises(AssertionError, match="are declared twice"):
        declare()(other)
