"""Tiny models of types of transformers on two gloo ranks with FSDP, against one process (`code_models.py --fsdp`)."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attrs import evolve
from code_models import SINGLE, built, make, rows
from code_table import EXACT
from forked_ranks import ForkedRanks, RanksFailed
from torch.overrides import TorchFunctionMode
from trials import Laboratory, gaps

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.inspect import code_layouts
from xtrain.runtime.inspect import model_code as model_code_description

SPEC = """experiment sharded {{ seed = 3, budget = 2 steps }}
model "{folder}" {{ code = transformers{settings} }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl") }}
batch {{ sequence = 64, rows = 4 }}
optimizer adamw {{ lr = 1e-2, eps = 1e-3 }}
precision {{ params = {params} }}
launch {{ device = cpu }}
{more}
"""
ALONE, TWO = ("batch.micro=4",), ("parallel.fsdp=2", "batch.micro=1")


class _Narrowed(TorchFunctionMode):
    """Notes functions that give differentiable fp32 tensors, which a model of fp64 parameters has only by casts."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32 and result.requires_grad:
            self.functions.add(func.__name__)
        return result


def narrowed(plan: Plan) -> list[str]:
    """Functions of a model in fp64 whose results are fp32 tensors on the way to the loss."""
    model = built(plan).whole
    with _Narrowed() as mode:
        model(None, rows(plan.architecture.vocab, (20,)))
    return sorted(mode.functions)


def plans(folder: Path, work: Path, params: str) -> tuple[Plan, Plan]:
    """The plans of one process and of two ranks; with one document a row, or without losses of routers, where the code
    needs that."""
    settings = more = problem = ""
    for _ in range(3):
        spec = work / "sharded.xtrain"
        spec.write_text(SPEC.format(folder=folder, params=params, settings=settings, more=more))
        one, two = (plan_from_spec(spec, ("workspace.root=runs", *sets)) for sets in (ALONE, TWO))
        if one.plan is not None and two.plan is not None:
            return one.plan, two.plan
        problem = one.diagnostics.render() + two.diagnostics.render()
        more = SINGLE if "pack(single)" in problem else more
        settings = ", router_aux_loss = 0" if "router_aux_loss" in problem else settings
    raise AssertionError(problem)


def largest(lab: Laboratory, kind: str, plan: Plan, other: Plan) -> float:
    """The largest difference of losses, gradient norms and parameters over two steps."""
    found = [lab.ranks.run(each, lab.folder, name=f"{kind} {n}", timeout=240) for n, each in enumerate((other, plan))]
    names = {each.name for each in plan.parameters.tensors}
    one, two = (evolve(each, whole=[{n: own[n] for n in own.keys() & names} for own in each.whole]) for each in found)
    assert one.tensors.keys() == names
    apart = gaps(two, one)
    return max(apart.loss, apart.norm, apart.worst_tensor)


def sharded(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Yield `fsdp` of each type, the largest difference of two ranks from one process in fp64, None where they do not
    run, and the functions of transformers' code that give fp32 tensors where the difference exceeds 1e-10."""
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = stack.enter_context(ForkedRanks())
        lab = Laboratory.open(work, ranks)
        # Other layouts and costs are not needed.
        stack.enter_context(patch.object(code_layouts, "shows", lambda *_, **__: False))
        stack.enter_context(patch.object(model_code_description, "confirmed_cuts", lambda *_, **__: None))
        stack.enter_context(patch.object(model_code_description, "computes_spread", lambda *_, **__: False))
        for kind in kinds:
            row: dict[str, Any] = {"type": kind, "fsdp": None}
            with tempfile.TemporaryDirectory() as path:
                os.environ["XDG_CACHE_HOME"] = path
                try:
                    make(kind, Path(path) / "model")
                    one, two = plans(Path(path) / "model", work, "fp64")
                    try:
                        row["fsdp"] = largest(lab, kind, two, one)
                    except RanksFailed:  # code that has no fp64
                        one, two = plans(Path(path) / "model", work, "fp32")
                        row["fsdp"] = largest(lab, f"{kind} in fp32", two, one)
                    row["narrowed"] = narrowed(one) if row["fsdp"] >= EXACT else []
                except (AssertionError, RanksFailed) as error:
                    row["refused"] = str(error).strip()[-600:]
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            yield row
