"""Tiny models of every type of transformers, as folders, and what xtrain computes of them against transformers itself.

python tests/support/code_models.py TYPE…    a line for each type (all types without arguments)
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from one_rank import one_rank
from safetensors.torch import load_file
from small_runs import make_run, plan_of, read, save

from xtrain.dsl.checking import model_code
from xtrain.plan.architecture import Architecture
from xtrain.plan.plan import Plan
from xtrain.runtime.feed.microbatch import IGNORE_INDEX
from xtrain.runtime.inspect.model_code import describe, small
from xtrain.runtime.nn.batch import DocumentLayout, ModelBatch
from xtrain.runtime.nn.build import build_model
from xtrain.runtime.nn.model_code import CodeModel, UnknownCode, build, config_of
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import initialise
from xtrain.runtime.store.adapter_export import export_of

LENGTHS = (20, 27, 17)  # documents of a row
SINGLE = "collate = to_tensor -> flatten -> shift_tokens -> pack(single)"


def make(kind: str, folder: Path, **keys: Any) -> Any:
    """Save a random model of a type, with the default config made small. keys: of the config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = {**CONFIG_MAPPING[kind]().to_dict(), **keys}
    with torch.device("meta"):
        model = build(config_of(content))
    code = small(content, model)
    assert code is not None, "no small model"
    code.model.save_pretrained(folder)
    return code.model


def built(plan: Plan) -> ModelParts:
    """The model of a plan on one rank, with the weights of its folder."""
    args = plan.node("setup.build_model").args
    rank = one_rank()
    model = build_model(plan, rank, **{**args, "architecture": Architecture.from_values(args["architecture"])})
    initialise(plan, model, rank, offload=False)
    values = read(plan)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in values:
                tensor.copy_(values[name])
    return model


def rows(vocab: int, documents: tuple[int, ...] = LENGTHS) -> ModelBatch:
    """A microbatch of one row."""
    count = sum(documents)
    ids_BS = (torch.arange(count)[None] * 37 + 11) % min(vocab, 250)
    labels = ids_BS.roll(-1, 1).clone()
    bounds = torch.tensor([0, *torch.tensor(documents).cumsum(0)], dtype=torch.int32)
    labels[0, bounds[1:].long() - 1] = IGNORE_INDEX
    places = torch.cat([torch.arange(each) for each in documents])[None]
    packing = DocumentLayout.from_lengths(bounds, 1, count, torch.device("cpu"))
    real = torch.ones_like(ids_BS, dtype=torch.bool)
    return ModelBatch(input_ids_BS=ids_BS, labels_BS=labels, positions_BS=places, real_BS=real, packing=packing)


def theirs(reference: Any, batch: ModelBatch) -> torch.Tensor:
    """The sum of the cross-entropies as transformers computes them, each document alone."""
    total = torch.zeros(())
    for _, first, length in batch.packing.segments:
        assert batch.input_ids_BS is not None and batch.labels_BS is not None
        ids, labels = (each[:, first : first + length] for each in (batch.input_ids_BS, batch.labels_BS))
        logits = reference(input_ids=ids, use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, labels[0], ignore_index=IGNORE_INDEX, reduction="sum")
    return total


def plan_for(folder: Path, **more: Any) -> Plan:
    """The plan of a folder; with one document a row where its code needs that."""
    try:
        return plan_of(f'"{folder}" {{ code = transformers }}', **more)
    except AssertionError as error:
        if "pack(single)" not in str(error):
            raise
        return plan_of(f'"{folder}" {{ code = transformers }}', more=SINGLE)


def differences(folder: Path, reference: Any) -> dict[str, float]:
    """The largest differences of loss and gradients, relative to the largest gradient."""
    plan = plan_for(folder)
    model = built(plan)
    code = plan.architecture.own["code"]
    batch = rows(plan.architecture.vocab, LENGTHS if code["packs"] else LENGTHS[:1])
    reference.eval().zero_grad()
    loss = theirs(reference, batch)
    loss.backward()
    ours = model.whole(None, batch)
    ours.sum().backward()
    names = CodeModel(reference).names
    gradients = {
        names[name]: p.grad for name, p in reference.named_parameters() if p.grad is not None and name in names
    }
    largest = max(float(each.abs().max()) for each in gradients.values())
    apart = 0.0
    for name, parameter in model.named_parameters():
        mine, other = parameter.grad, gradients.get(name)
        mine = torch.zeros_like(parameter) if mine is None else mine
        other = torch.zeros_like(parameter) if other is None else other
        apart = max(apart, float((mine - other).abs().max()))
    return {"loss": abs(float((ours.sum() - loss).detach())) / abs(float(loss.detach())), "gradients": apart / largest}


def round_trip(folder: Path, base: Path) -> list[str]:
    """Tensors that an export without training changes."""
    plan = plan_for(folder)
    directory = make_run(plan, base / "run", base)
    save(plan, directory, read(plan))
    export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=10**9).write(
        base / "out", lambda *_: None
    )
    before, after = (
        {n: t for f in path.glob("*.safetensors") for n, t in load_file(f).items()} for path in (folder, base / "out")
    )
    return [
        n
        for n in before.keys() | after.keys()
        if n not in before or n not in after or not torch.equal(before[n], after[n])
    ]


def inspect_here() -> None:
    """Inspect models in this process, which has imported transformers, instead of in one of their own."""

    def inspected(config: str, versions: Any) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(describe(json.loads(config))))
        except UnknownCode as problem:
            raise model_code.CodeUnusable(str(problem), problem.hint) from problem

    model_code._inspected = inspected  # type: ignore[assignment]


def table(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each type."""
    for kind in kinds:
        row: dict[str, Any] = {"type": kind}
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path) / "model"
            try:
                reference = make(kind, folder)
                plan = plan_for(folder)
                row["packs"] = plan.architecture.own["code"]["packs"]
                row |= differences(folder, reference)
                row["changed"] = round_trip(folder, Path(path))
            except AssertionError as error:
                row["refused"] = str(error).strip()[:600]
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                row["at"] = traceback.format_exc().splitlines()[-3].strip()
        yield row


if __name__ == "__main__":
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inspect_here()
    for row in table(sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        print(json.dumps(row), flush=True)
