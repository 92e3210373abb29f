"""Components of the user's own compute on layouts what they compute in one process, and go on as if never stopped."""

import pytest
from projects import records, worst

from xtrain.planner.load import plan_from_path

PARTS = '''
import torch
from xtrain import action, evaluation_step, hook, loss, optimizer, schedule, step

class Average(torch.optim.Optimizer):
    def __init__(self, groups, lr, beta):
        super().__init__(groups, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"], state["step"] = torch.zeros_like(p), torch.tensor(0.0)
                state["step"] += 1
                state["average"].lerp_(p.grad, 1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(state["average"] / (1 - group["beta"] ** state["step"].item()), alpha=group["lr"])

@optimizer(state=("average",), scalars=("step",))
def averaged(groups, lr, beta: float = 0.9, weight_decay: float = 0.1):
    """Descent by an average of gradients."""
    return Average(groups, lr, beta)

@schedule
def triangle(step, total, top: int = 1):
    """Up in a straight line, then down."""
    return (step + 1) / top if step < top else (total - step) / (total - top)

@loss
def focal(logprob_T, gamma: float = 2.0):
    """Less weight on tokens that are predicted well already."""
    return -((1 - logprob_T.exp()) ** gamma) * logprob_T

@hook("after_backward", changes="gradients")
def weaken(context, factor: float = 0.5):
    """Smaller gradients of matrices, by the number of the step."""
    for name, p in context.model.named_parameters():
        if p.ndim > 1:
            p.grad.mul_(factor ** (context.step / 4))
    return {"factor": factor ** (context.step / 4)}

@step
def one_by_one(context):
    """The forward and backward as xtrain has them."""
    for batch in context.batches:
        (context.forward(batch) * context.scale).backward()

@evaluation_step
def in_turn(context, factor: float = 1.0):
    return sum(float(context.forward(batch)) for batch in context.batches) * factor

@action
def position(context, of: int):
    """Where the run is."""
    return {"left": of - context.step, "rate": context.lr}
'''
SPEC = """
use "parts.py"
experiment own { seed = 3, budget = 4 steps }
model llama { dim = 32, layers = 2, heads = 4, kv_heads = 4, ffn = 48, init_std = 0.2 }
tokenizer bytes
dataset made { source = synthetic(documents = 100), holdout = 10% }
batch { sequence = 64, micro = 2, rows = 8 }
optimizer averaged { lr = 0.1, beta = 0.8 }
scheduler triangle { top = 2 }
loss focal { gamma = 1.5 }
hook weaken { factor = 0.25 }
precision { params = fp64 }
every 1 step log
every 2 steps position { of = 4 }
on finish eval made
"""
LAYOUTS = {"fsdp 2": "parallel.fsdp=2", "tp 2": "parallel.tp=2", "pp 2": "parallel.pp=2"}


@pytest.fixture(scope="module")
def train(lab, tmp_path_factory):
    """Train under `--set` texts as the job `name`."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "parts.py").write_text(PARTS)
    (folder / "own.xtrain").write_text(SPEC)

    def run(name, *sets):
        compiled = plan_from_path(folder / "own.xtrain", sets)
        assert compiled.plan is not None, compiled.diagnostics.render()
        return lab.ranks.run(compiled.plan, folder, name=name)

    return run


@pytest.fixture(scope="module")
def alone(train):
    return train("alone")


@pytest.mark.matrix  # by default on two ranks
def test_a_run_in_one_process_goes_on_exactly(train, alone):
    train("parts", "experiment.budget=2 steps")
    found = train("parts")
    assert found.curve == alone.curve and len(alone.curve) == 4
    assert found.evals[-1]["loss"] == alone.evals[-1]["loss"]
    ours, theirs = (records(each.directory, "metrics") for each in (found, alone))
    for key in ("action/position/left", "action/position/rate", "hook/weaken/factor"):
        assert [r.get(key) for r in ours] == [r.get(key) for r in theirs]
    assert [r.get("action/position/left") for r in ours] == [None, 2.0, None, 0.0]


@pytest.mark.slow
def test_a_body_that_does_what_the_built_in_one_does_changes_nothing(train, alone):
    found = train("body", "step=one_by_one", "evaluation_step=in_turn")
    assert found.curve == alone.curve and found.evals[-1]["loss"] == alone.evals[-1]["loss"]
    assert found.evals[-1]["bits_per_byte"] == alone.evals[-1]["bits_per_byte"]
    halved = train("halved", "evaluation_step=in_turn", "evaluation_step.factor=0.5")
    assert halved.evals[-1]["loss"] == pytest.approx(alone.evals[-1]["loss"] / 2, rel=1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2"])
def test_a_body_works_on_layouts_without_stages(train, alone, layout):
    name = f"body-{layout.replace(' ', '')}"
    found = train(name, LAYOUTS[layout], "step=one_by_one", "evaluation_step=in_turn")
    assert max(worst(found.curve, alone.curve)) < 1e-10
    assert found.evals[-1]["loss"] == pytest.approx(alone.evals[-1]["loss"], rel=1e-10)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.matrix if name != "tp 2" else ()) for name in LAYOUTS]
)
def test_a_layout_learns_the_same_and_goes_on(train, alone, layout):
    name = layout.replace(" ", "")
    train(name, LAYOUTS[layout], "experiment.budget=2 steps")
    found = train(name, LAYOUTS[layout])
    assert max(worst(found.curve, alone.curve)) < 1e-10
    assert found.evals[-1]["loss"] == pytest.approx(alone.evals[-1]["loss"], rel=1e-10)
