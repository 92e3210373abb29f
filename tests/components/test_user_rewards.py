"""Rewards of the user's own in a run: what they may give, and what is said of all else."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.ops import op_of
from xtrain.runtime.base.user_parts import PartFailed
from xtrain.runtime.nn.batch import Completion, Prompt, SampledGroup
from xtrain.runtime.sampling.trained_run import alone

SPEC = """use "mine.py"
experiment scored { seed = 1, budget = 4 steps }
model llama { dim = 32, layers = 1, heads = 4, ffn = 48 }
tokenizer bytes
dataset sums { source = jsonl("sums.jsonl"), prompt = "q", response = "a", template = "plain", oversized = skip }
batch { sequence = 256, rows = 4, micro = 2 }
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
loss grpo { }
rollout { group = 4, max_tokens = 20 }
reward own { }
optimizer adamw { lr = 1e-3 }
"""


def scored(result: str, folder: Path) -> list[float]:
    """The rewards of a group by a function that gives `result`."""
    text = (
        f"import numpy as np\nfrom xtrain import reward\n@reward\ndef own(prompt, completion, record):\n    {result}\n"
    )
    (folder / "mine.py").write_text(text)
    (folder / "scored.xtrain").write_text(SPEC)
    plan = plan_from_spec(folder / "scored.xtrain").plan
    assert plan is not None
    ids = np.array([256, 5])
    prompt = Prompt(ids=ids, text="1+1=", answer="2", rest=ids[:0], values={"weight": 3.0}, dataset=0, place=0)
    completions = [Completion(tokens=[7], logprobs=[0.0], text=each, cut=False) for each in ("2", "é")]
    group, rank = SampledGroup(prompt, completions), alone(torch.device("cpu"))
    resources = {"plan": plan, "rank": rank, "meshes": SimpleNamespace(has=lambda axis: False)}
    op_of(plan.node("rollout.score")).bind(plan.node("rollout.score"), resources)()(SimpleNamespace(groups=[[group]]))
    return group.rewards.tolist()


@pytest.mark.parametrize(
    ("result", "rewards"),
    [("return completion == record['answer']", [1.0, 0.0]), ("return np.float32(record['weight'])", [3.0, 3.0]),
        ("return len(completion.encode())", [1.0, 2.0])],
)  # fmt: skip
def test_a_reward_is_a_number(result, rewards, tmp_path: Path):
    assert scored(result, tmp_path) == rewards


@pytest.mark.parametrize(("result", "said"), [
    ("return 1 / 0", "ZeroDivisionError: division by zero"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("return record['nothing']", "KeyError: 'nothing'"),
    ("return None", "gave None for the completion '2' of '1+1=', and a reward is a number"),
    ("return 'good'", "gave 'good' for"),
    ("return float('nan')", "gave nan for"),
    ("return 10 ** 400", "and a reward is a number"),
    ("return 10 ** 5000", "gave a number that is too large for"),
    ("return [1.0]", "gave [1.0] for"),
])  # fmt: skip
def test_all_else_is_said_with_its_line(result, said, tmp_path: Path):
    with pytest.raises(PartFailed, match=r"mine\.py") as failed:
        scored(result, tmp_path)
    assert said in str(failed.value)
