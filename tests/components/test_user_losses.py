"""Losses of the user's own, as a run calls them: a loss for each token, and the line of the file where it is none."""

from types import SimpleNamespace

import pytest
import torch

from xtrain.components.losses.user_part_torch import build_user_loss
from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.runtime.base.user_parts import PartFailed

HEAD = "import torch\nfrom xtrain import loss\n@loss\n"
DEF = "def own(logprob_T, gamma=2.0):\n    "


@pytest.fixture
def build(tmp_path):
    """The term that a function of this text becomes, in a run of this number format."""

    def run(text, params="fp32", reads=(), **arguments):
        (tmp_path / "parts.py").write_text(HEAD + text)
        digest = module_digest(find_module("parts.py", tmp_path))
        user = {"module": "parts.py", "function": "own", "digest": digest, "arguments": arguments}
        node = SimpleNamespace(args={"params": params})
        plan = SimpleNamespace(spec=str(tmp_path / "spec.xtrain"), nodes=(), node=lambda name: node)
        terms = []
        build_user_loss(plan, SimpleNamespace(minimise=terms.append), user, list(reads))
        (term,) = terms
        return term

    return run


@pytest.mark.parametrize("params", ["fp32", "fp64"])
def test_it_is_called_with_its_settings_and_what_it_reads(build, params):
    text = "def own(x, lse_T, *, gamma, entropy_T):\n    return -gamma * x + lse_T.square() * entropy_T"
    term = build(text, params, reads=("entropy_T", "lse_T"), gamma=3.0)
    given = [torch.tensor(values, dtype=torch.float64) for values in ([-1.0, -2.0], [0.5, 0.25], [2.0, 4.0])]
    loss_T, by, _ = term.by(dict(zip(("logprob_T", "entropy_T", "lse_T"), given, strict=True)))
    assert loss_T.tolist() == [5.0, 10.0]
    assert {name: slope_T.tolist() for name, slope_T in by.items()} == {
        "logprob_T": [-3.0, -3.0], "entropy_T": [4.0, 16.0], "lse_T": [2.0, 2.0],
    }  # fmt: skip


# (the function behind its head, part of the message, line of the file)
WRONG = [
    ("return 3.0", "loss `own` gave float, and the loss of each token is a tensor", 3),
    ("return None", "gave NoneType", 3),
    ("return -logprob_T.mean()", "shape () for tokens of shape (12,), and each has a loss: do not sum or average", 3),
    ("return -logprob_T[:, None]", "gave a tensor of shape (12, 1) for tokens of shape (12,)", 3),
    ("return -logprob_T.half()", "gave torch.float16 for torch.float32, and a loss has the number format", 3),
    ("return (logprob_T < -1).float()", "without gradient: compute it from `logprob_T`", 3),
    ("return -logprob_T.detach()", "without gradient", 3),
    ("return -(3 * logprob_T).exp().log()", "gave a loss of inf for `logprob_T` -50, which may occur", 3),
    ("return (1 - logprob_T.exp()) ** 0.5", "gave a derivative by `logprob_T` of", 3),
    ("return torch.where(logprob_T < -1, -logprob_T, torch.nan)", "gave a loss of nan for `logprob_T` 0,", 3),
    ("return -logprob_T * torch.softmax(logprob_T, 0)", "alone, and ranks hold different tokens", 3),
    ("return -logprob_T * torch.rand(logprob_T.shape)", "without random numbers", 3),
    ("return logprob_T.mul_(-1)", "loss `own`: RuntimeError", 5),
    ("return -logprob_T * wrong", "NameError: name 'wrong' is not defined", 5),
    ("raise SystemExit(0)", "SystemExit", 5),
]


@pytest.mark.parametrize(("body", "message", "line"), WRONG)
def test_what_is_no_loss_of_a_token_is_refused_before_the_first_step(build, tmp_path, body, message, line):
    with pytest.raises(PartFailed) as caught:
        build(f"{DEF}{body}\n")
    assert message in str(caught.value)
    assert caught.value.path == tmp_path / "parts.py" and caught.value.line == line


def test_what_goes_wrong_later_is_reported_with_the_line(build, tmp_path):
    term = build(f"{DEF}assert len(logprob_T) < 50, 'too many'\n    return -logprob_T\n")
    with pytest.raises(PartFailed, match="too many") as caught:
        term.by({"logprob_T": torch.zeros(50)})
    assert (caught.value.path, caught.value.line) == (tmp_path / "parts.py", 5)
