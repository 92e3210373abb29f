"""Models with an adapter in this process, and the same in PEFT, whose names these are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from small_runs import make_run, plan_of, read, save
from torch import Tensor, nn

from xtrain.plan.architecture import buffers
from xtrain.plan.peft import assign_peft
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import stored_names
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout, ModelBatch
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.nn.loss import Head
from xtrain.runtime.nn.transformer import StageSpan, Transformer
from xtrain.runtime.store.base_weights import BaseWeights
from xtrain.runtime.store.beginning import planned_adapter
from xtrain.runtime.store.stored_weights import WeightReader


def adapted(folder: Path, settings: str, params: str = "fp64") -> tuple[Plan, dict[str, Tensor]]:
    """A plan with an adapter of the model of a folder; its weights, those of the adapter random."""
    plan = plan_of(f'"{folder}"', params=params, more=f"adapter lora {{ {settings} }}")
    sizes = {each.name: each.adapter for each in plan.parameters.tensors}
    tensors = read(plan)
    return plan, {name: each * 0.1 if sizes.get(name) else each for name, each in tensors.items()}


def model_of(plan: Plan, tensors: dict[str, Tensor]) -> Transformer:
    arch = plan.architecture
    head = Head(vocabulary=arch.vocab, z_weight=0.0, chunk_bytes=2**20, cap=arch.ends.logit_cap)
    span = StageSpan(0, arch.layers - 1, embeds=True, predicts=True)
    model = Transformer(arch, span, axes=Axes(), kernel="documents", head=head, rows=1)
    model.to(DTYPES[plan.node("setup.build_model").args["params"]]).load_state_dict(tensors)
    trained = {each.name for each in plan.parameters.tensors if each.trained}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


def loss_of(model: Transformer, ids_BS: Tensor) -> Tensor:
    """The mean cross-entropy of the next tokens of rows that are one document each."""
    inputs_BS = ids_BS[:, :-1]
    rows, positions = inputs_BS.shape
    ends = torch.arange(0, rows * positions + 1, positions, dtype=torch.int32)
    batch = ModelBatch(
        input_ids_BS=inputs_BS,
        labels_BS=ids_BS[:, 1:].contiguous(),
        positions_BS=torch.arange(positions).expand(rows, positions),
        real_BS=torch.ones(rows, positions, dtype=torch.bool),
        packing=DocumentLayout.from_lengths(ends, rows, positions, ids_BS.device),
    )
    model.eval()
    return model(None, batch).sum() / (rows * positions)


# Adapters of PEFT in runs ---------------------------------------------------------------------------------------------


def plan_on(folder: Path, more: str = "", model: str = "", params: str = "fp32") -> Plan:
    """A plan that begins with the model in `base` and the adapter in `adapter` of a folder."""
    adapter = f'adapter lora {{ from = "{folder / "adapter"}" }}\n{more}'
    return plan_of(f'"{folder / "base"}" {model}', more=adapter, params=params)


def begun_with(plan: Plan) -> dict[str, Tensor]:
    """The trained tensors of a plan, read from the files of its adapter."""
    trained = tuple(each for each in plan.parameters.tensors if each.trained)
    found = {each.name: torch.empty(each.shape) for each in trained}
    files = planned_adapter(plan, **plan.node("setup.read_adapter").args).files
    with WeightReader(files, assign_peft(plan.architecture, trained, files), lambda done: None) as reader:
        reader.read(found.items())
    return found


def run_of(plan: Plan, folder: Path, trained: dict[str, Tensor] | None = None) -> Path:
    """A run with a checkpoint of an adapter. trained: the adapter; otherwise that which it has begun with."""
    found = begun_with(plan) if trained is None else trained
    directory = make_run(plan, folder / "run", folder)
    with BaseWeights.of(plan, folder, torch.device("cpu")) as base:
        digest = base.digest
    stored = load_file(folder / "base" / "model.safetensors")
    names = stored_names(plan.architecture)
    found |= {each.name: stored[names.of(each)[0][0].name] for each in buffers(plan.architecture)}
    save(plan, directory, found, base_content=digest)
    return directory


# Names ----------------------------------------------------------------------------------------------------------------


def its_name(name: str) -> str:
    """What PEFT calls a factor in memory."""
    inside = "" if name.startswith("lm_head.") else "model."
    return f"base_model.model.{inside}{name.removesuffix('.weight')}.default.weight"


def its_factors(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What PEFT has of a factor: its name in memory, and the values. Of a stack of experts one for each, with both
    dims turned."""
    if ".experts." not in name:
        yield its_name(name), value
        return
    module, _, own = name.rpartition(".")
    matrix, _, factor = own.partition("_lora_")
    for expert, each in enumerate(value):
        yield its_name(f"{module}.{expert}.{matrix}.lora_{factor}"), each.t() if each.dim() > 1 else each


# Experts as modules, one by one, as transformers had them before version 5 --------------------------------------------


class SingleExpert(nn.Module):
    """silu(x · gateᵀ) · (x · upᵀ) · downᵀ."""

    def __init__(self, gate_up_FD: Tensor, down_DF: Tensor) -> None:
        super().__init__()
        gate_FD, up_FD = gate_up_FD.chunk(2)
        for name, matrix in (("gate_proj", gate_FD), ("up_proj", up_FD), ("down_proj", down_DF)):
            linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
            linear.weight = nn.Parameter(matrix.detach().clone())
            self.add_module(name, linear)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))


class SingleExperts(nn.ModuleList):
    """In the place of the stacked experts of a model of transformers."""

    def forward(self, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self):
            token_N, place_N = torch.where(chosen_TK == number)
            rows_ND = expert(x_TD[token_N]) * weights_TK[token_N, place_N, None]
            out_TD = out_TD.index_add(0, token_N, rows_ND)
        return out_TD


def with_single_experts(model: Any) -> Any:
    """The model with its experts one by one."""
    for module in list(model.modules()):
        stacked = getattr(module, "experts", None)
        if stacked is not None:
            pairs = zip(stacked.gate_up_proj, stacked.down_proj, strict=True)
            module.experts = SingleExperts(SingleExpert(*pair) for pair in pairs)
    model.config.model_type = "single_experts"  # of one that it knows PEFT takes the names for those of stacks
    return model
