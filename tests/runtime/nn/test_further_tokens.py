"""Modules that predict further tokens, against the equations of DeepSeek-V3 (arXiv 2412.19437, 21 to 25) written out
for each document by itself."""

# shapes: L positions of a document, D dim, H heads, A head width

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forking import ForkedCommand
from projects import Project
from safetensors.torch import load_file
from torch import Tensor

from xtrain.cli.main import main
from xtrain.components.collators.pack_torch import pack
from xtrain.dsl.schema.losses import LATER, LATER_LABELS
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.runtime.feed.microbatch import Sample, Samples
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.sampling.trained_run import alone, whole_model

DIM, HEADS, WIDTH, LAYERS, MODULES, WEIGHT, THETA = 24, 2, 6, 2, 2, 0.7, 500.0
SPEC = f"""experiment small {{{{ seed = 1, budget = 3 steps }}}}
model qwen3 {{{{
  dim = {DIM}, layers = {LAYERS}, heads = {HEADS}, head_dim = {WIDTH}, ffn = 40, rope_theta = {THETA}, norm_eps = 1e-5
  mtp = {MODULES}, mtp_weight = {WEIGHT}, tie_embeddings = {{tied}}
}}}}
tokenizer bytes
dataset made {{{{ source = synthetic(documents = 60, length = 30), holdout = 20% }}}}
batch {{{{ sequence = 32, rows = 2 }}}}
optimizer adamw {{{{ lr = 1e-2 }}}}
precision {{{{ params = fp64 }}}}
every 1 step log
"""
# Tokens, and whether each is predicted: a document that is too short for one module or for both, and an answer.
DOCUMENTS = (
    ([256, 7, 30, 5, 9, 11, 3, 257], [1] * 8),
    ([256, 40, 257], [1] * 3),
    ([256, 257], [1] * 2),
    ([256, 8, 9, 10, 60, 61, 62, 257], [0, 0, 0, 0, 1, 1, 0, 1]),
)


def plan_of(tied: bool) -> Plan:
    compiled = plan_from_text(SPEC.format(tied=str(tied).lower()), "small.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


class Written:
    """The model, from its weights by name."""

    def __init__(self, weights: dict[str, Tensor], tied: bool) -> None:
        self.weights = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        self.head = self.weights["embed_tokens.weight" if tied else "lm_head.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def turned(self, x_LHA: Tensor) -> Tensor:
        angle_LA = torch.arange(len(x_LHA))[:, None] * THETA ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
        cos, sin = angle_LA.cos()[:, None], angle_LA.sin()[:, None]
        left, right = x_LHA[..., : WIDTH // 2], x_LHA[..., WIDTH // 2 :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def block(self, x_LD: Tensor, name: str) -> Tensor:
        y_LD, at = self.norm(x_LD, f"{name}.input_layernorm"), f"{name}.self_attn"
        q, k, v = (self.linear(y_LD, f"{at}.{each}_proj").unflatten(-1, (HEADS, WIDTH)) for each in "qkv")
        q, k = self.turned(self.norm(q, f"{at}.q_norm")), self.turned(self.norm(k, f"{at}.k_norm"))
        scores = torch.einsum("iha,jha->hij", q, k) / WIDTH**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        heads = torch.einsum("hij,jha->iha", scores.softmax(-1), v).flatten(1)
        x_LD = x_LD + self.linear(heads, f"{at}.o_proj")
        y_LD, at = self.norm(x_LD, f"{name}.post_attention_layernorm"), f"{name}.mlp"
        hidden = F.silu(self.linear(y_LD, f"{at}.gate_proj")) * self.linear(y_LD, f"{at}.up_proj")
        return x_LD + self.linear(hidden, f"{at}.down_proj")

    def losses(self, tokens: list[int], predicted: list[int]) -> list[Tensor]:
        """Sums of the cross-entropies of the next token, and of those that each module predicts."""
        ids = torch.tensor(tokens)
        x_LD = self.weights["embed_tokens.weight"][ids[:-1]]
        for layer in range(LAYERS):
            x_LD = self.block(x_LD, f"layers.{layer}")
        h_LD = self.norm(x_LD, "norm")
        found = [self.sum_of(h_LD, ids[1:], predicted[1:])]
        for depth in range(1, MODULES + 1):
            name, count = f"layers.{LAYERS + depth - 1}", len(tokens) - 1 - depth
            if count < 1:
                found.append(torch.zeros((), dtype=torch.float64))
                continue
            later = self.weights["embed_tokens.weight"][ids[depth:-1]]
            both = torch.cat(
                (self.norm(later, f"{name}.join.enorm"), self.norm(h_LD[:count], f"{name}.join.hnorm")), -1
            )
            h_LD = self.norm(self.block(self.linear(both, f"{name}.join.eh_proj"), name), f"{name}.norm")
            found.append(self.sum_of(h_LD, ids[depth + 1 :], predicted[depth + 1 :]))
        return found

    def sum_of(self, h_LD: Tensor, labels_L: Tensor, predicted: list[int]) -> Tensor:
        each_L = F.cross_entropy(h_LD @ self.head.T, labels_L, reduction="none")
        return (each_L * torch.tensor(predicted)).sum()


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_are_those_of_the_equations(tied: bool):
    plan = plan_of(tied)
    model = whole_model(plan, alone(torch.device("cpu")))
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(p.shape, generator=random).double() * 0.3 for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.whole.further_weight = WEIGHT
    samples = []
    for tokens, predicted in DOCUMENTS:
        ids, mask = torch.tensor(tokens), torch.tensor(predicted).bool()
        samples.append(Sample(row=0, tokens=ids[:-1], labels=torch.where(mask[1:], ids[1:], -100)))
    rows = pack(capacity=32, align=2, later=MODULES).function(Samples(num_rows=1, samples=tuple(samples)))
    batch = ModelBatch.of(rows, torch.device("cpu"))
    objective = model.whole(None, batch)
    objective.sum().backward()

    reference = Written(weights, tied)
    main_loss, *further = map(sum, zip(*(reference.losses(*each) for each in DOCUMENTS), strict=True))
    expected = main_loss + WEIGHT * sum(further) / MODULES
    expected.backward()
    assert batch.recorded is not None
    found = [objective.item(), *batch.sums.tolist()]
    wanted = [each.item() for each in (expected, main_loss, expected, *further)]
    assert found == pytest.approx(wanted, rel=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, reference.weights[name].grad, rtol=1e-10, atol=1e-12)

    with torch.no_grad():  # as in evaluation, which has no later tokens
        plain = pack(capacity=32, align=2).function(Samples(num_rows=1, samples=tuple(samples)))
        assert model.whole(None, ModelBatch.of(plain, torch.device("cpu"))).item() == pytest.approx(main_loss.item())


def test_later_tokens_are_those_of_the_same_document():
    ids = torch.arange(10, 16)
    first = Sample(row=0, tokens=ids[:-1], labels=ids[1:])
    second = Sample(row=0, tokens=ids[:1] + 50, labels=ids[1:2] + 50)
    rows = pack(capacity=10, align=2, later=2).function(Samples(num_rows=1, samples=(first, second)))
    found = {name: column.tolist()[0] for name, column in rows.columns.items()}
    assert found == {
        f"{LATER}/1": [11, 12, 13, 14, 0, 0, 0, 0, 0, 0],
        f"{LATER_LABELS}/1": [12, 13, 14, 15, -100, -100, -100, -100, -100, -100],
        f"{LATER}/2": [12, 13, 14, 0, 0, 0, 0, 0, 0, 0],
        f"{LATER_LABELS}/2": [13, 14, 15, -100, -100, -100, -100, -100, -100, -100],
    }


def test_a_run_measures_each_module_and_goes_on_and_its_model_is_without_them(tmp_path: Path, monkeypatch):
    """Evaluations count the next token alone; what is exported is the model that transformers knows."""
    monkeypatch.chdir(tmp_path)
    text = (
        SPEC.format(tied="false")
        + "every 1 step eval made\nevery 1 step checkpoint\nphase late { from = 2 steps, mtp_weight = 0.1 }\n"
    )
    Path("small.xtrain").write_text(text)
    arguments = ["run", "small.xtrain", "--world", "1", "--set", "workspace.root=runs"]
    command = ForkedCommand(arguments, tmp_path, Project(tmp_path).environment)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, out + err
    (directory,) = (path.parent for path in Path("runs").rglob("plan.json"))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "objective" in line]
    assert len(steps) == 3
    for line, weight in zip(steps, (WEIGHT, WEIGHT, 0.1), strict=True):
        assert line["objective"] == pytest.approx(line["loss"] + weight * (line["mtp/1"] + line["mtp/2"]) / 2)
    assert steps[-1]["mtp/1"] < steps[0]["mtp/1"]
    assert main(["generate", str(directory), "--prompt", "a", "--tokens", "3"]) == 0
    assert main(["export", str(directory), "--to", "out"]) == 0
    plain = plan_from_text(
        text.replace("phase late { from = 2 steps, mtp_weight = 0.1 }", "").replace(
            f"mtp = {MODULES}, mtp_weight = {WEIGHT}, ", ""
        ),
        "small.xtrain",
    ).plan
    assert plain is not None
    exported = load_file("out/model.safetensors")
    assert {name.removeprefix("model.") for name in exported} == {each.name for each in plain.parameters.tensors}
    assert json.loads(Path("out/config.json").read_text())["num_hidden_layers"] == LAYERS
