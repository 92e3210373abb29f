"""Optimizers and schedules of the user's own, as a run calls them: as they declare, with the lines of their file."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from xtrain.components.optimizers.user_part_torch import build_user_optimizer
from xtrain.components.schedules.user_part_torch import build_user_schedule
from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.step_sizes import StepSizes
from xtrain.runtime.base.user_parts import PartChanged, PartFailed

HEAD = "import torch\nfrom xtrain import optimizer, schedule\n"
MOMENTUM = """
class Momentum(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"], state["step"] = {average}, {step}
                p.data.sub_(p.grad, alpha=group["lr"])
                {more}
@optimizer(state="average", scalars=("step",))
def mine(groups, lr, weight_decay=0.0):
    {check}
    return Momentum({groups}, lr=lr)
"""
GOOD = {"average": "torch.zeros_like(p)", "step": "torch.tensor(0.0)", "more": "", "check": "", "groups": "groups"}


@pytest.fixture
def call(tmp_path):
    """The argument `user` of a node for a function of a file with this text; and the plan."""

    def write(function, text, **arguments):
        (tmp_path / "parts.py").write_text(HEAD + text)
        digest = module_digest(find_module("parts.py", tmp_path))
        user = {"module": "parts.py", "function": function, "digest": digest, "arguments": arguments}
        tensors = [SimpleNamespace(name="w", decays=True), SimpleNamespace(name="b", decays=False)]
        spec = str(tmp_path / "spec.xtrain")
        node = SimpleNamespace(op="setup.optimizer", args={})
        parameters = SimpleNamespace(tensors=tensors)
        return user, SimpleNamespace(spec=spec, parameters=parameters, nodes=[node], node=lambda op: node)

    return write


def built(call):
    weights = {"w": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.ones(2))}
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    user, plan = call
    named = list(weights.items())
    model = SimpleNamespace(named_parameters=lambda: named, trained=lambda: named, group="")
    return build_user_optimizer(plan, model, 0.5, user, ["average"], ["step"]), weights


def test_groups_come_with_their_rate_and_decay(call):
    optimizer, weights = built(call("mine", MOMENTUM.format(**GOOD), weight_decay=0.3))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.3), (0.5, 0.0)]
    optimizer.step()
    optimizer.step()
    assert weights["b"].tolist() == [0.0, 0.0]


# (what is other than in GOOD, part of the message)
WRONG = [
    ({"average": "torch.zeros(6)"}, "keeps `average` of w, which is (6,) in torch.float32, and (2, 3)"),
    ({"average": "torch.zeros_like(p).double()"}, "which is (2, 3) in torch.float64"),
    ({"average": "None"}, "which is NoneType"),
    ({"step": "0"}, "keeps `step` of w, which is int"),
    ({"step": "torch.zeros(1)"}, "which is (1,) in torch.float32, and a tensor without dimensions"),
    ({"more": "state['more'] = 1"}, "keeps `more` of w, which its `state` and `scalars` do not name"),
    ({"more": "del state['step']"}, "keeps no `step` of w"),
    ({"more": "raise OSError('x')"}, "optimizer `mine`: OSError: x"),
    ({"check": "return 3"}, "returned int, and an optimizer is a torch.optim.Optimizer"),
    ({"groups": "groups[:1]"}, "returned an optimizer without `b`"),
    ({"groups": "[*groups, {'params': [torch.zeros(1)]}]"}, "not among the groups"),
    ({"check": "raise SystemExit(0)"}, "SystemExit"),
]


@pytest.mark.parametrize(("other", "message"), WRONG)
def test_what_it_does_against_its_declaration_is_refused(call, tmp_path, other, message):
    with pytest.raises(PartFailed) as caught:
        built(call("mine", MOMENTUM.format(**(GOOD | other))))[0].step()
    assert message in str(caught.value)
    assert caught.value.path == tmp_path / "parts.py" and caught.value.line


def test_what_it_keeps_later_is_refused_too(call):
    optimizer, _ = built(call("mine", MOMENTUM.format(**GOOD)))
    optimizer.step()
    next(iter(optimizer.state.values()))["late"] = 1
    with pytest.raises(PartFailed, match="keeps `late`"):
        optimizer.step()


def test_changed_code_is_refused(call, tmp_path):
    given = call("mine", MOMENTUM.format(**GOOD))
    (tmp_path / "parts.py").write_text(HEAD)
    with pytest.raises(PartChanged):
        built(given)


def rates(call, text, steps=4, scale=1.0, batch=None, **arguments):
    user, plan = call("f", f"@schedule\n{text}\n", **arguments)
    feed = SimpleNamespace(steps=steps, phases=[SimpleNamespace(first=0, lr_scale=scale)], batch=batch)
    return build_user_schedule(plan, feed, 0.5, steps, user)


def test_a_schedule_gives_a_factor_of_the_peak(call):
    rate = rates(call, "def f(step, total, up=1): return up * (total - step) / total", up=2)
    assert [rate(index) for index in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert rates(call, "def f(s, t): return torch.tensor(1.0)")(3) == 0.5


def test_a_schedule_of_step_by_total_is_continuous_where_the_batch_changes(call):
    """16 rows of one token: 8 steps of 2 up to step 4, then of 4."""
    batch = Arithmetic(micro=4, accumulate=1, rows=4, sequence=1, budget_tokens=16).resumed(StepSizes(2), 4, 8)
    assert batch.steps == 6
    rate = rates(call, "def f(step, total): return 2 * (step + 1) / total", steps=6, batch=batch)
    assert [rate(index) for index in (4, 5)] == [0.75, 1.0]


@pytest.mark.parametrize(("body", "message"), [
    ("-0.5", "gave -0.5 for step 2 of 4, and a factor is finite and not negative"),
    ("float('nan')", "gave nan for step 2"),
    ("float('inf')", "gave inf for step 2"),
    ("None", "gave None for step 2 of 4, and a factor is a number"),
    ("1 / 0", "schedule `f`: ZeroDivisionError"),
])  # fmt: skip
def test_what_is_no_factor_is_refused(call, tmp_path, body, message):
    with pytest.raises(PartFailed) as caught:
        rates(call, f"def f(step, total): return {body}")(2)
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.line) == (tmp_path / "parts.py", 4 if "/" in body else 3)
