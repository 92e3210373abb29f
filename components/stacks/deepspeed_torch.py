"""`setup.parallel.deepspeed`: the model and its optimizer under DeepSpeed's engine."""

import json
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.stacks.deepspeed_files_torch import WeightsInFiles, check_room, drop_at_exit, in_folder_of_run
from xtrain.components.stacks.deepspeed_pieces_torch import (
    EngineOptimizer,
    ExactPieces,
    PiecesOptimizer,
    WeightsInPieces,
)
from xtrain.components.stacks.deepspeed_run import check_files
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import PlanMismatch, op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.optimizer import LocalOptimizer
from xtrain.runtime.nn.pipeline import WrappedModel
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.records import Records

FILE = "deepspeed.json"


@op("setup.parallel.deepspeed", gives="wrapped")
def wrap(
    model: ModelParts,
    optimizer: Optimizer,
    rank: Rank,
    stage: int,
    config: dict[str, Any],
    offload_optimizer: str = "none",
    offload_param: str = "none",
    files: dict[str, Any] | None = None,
    records: Records | None = None,
) -> WrappedModel:
    """Wrap the model in DeepSpeed's engine. files: `folder`, set by `setting`, in which a rank keeps `bytes`. Raises
    EnvironmentFault if the package is missing or cannot be imported (X715), and if the disk has no room for the
    files (X730). Raises PlanMismatch in a trace, which has no ranks to share state with."""
    if records is None:
        raise PlanMismatch("the engine of DeepSpeed works only on real ranks; a trace shows stack parallel instead")
    config = in_folder_of_run(config, records.directory.name)
    if rank.is_first:
        durable.write(records.directory / FILE, json.dumps(config, indent=2) + "\n")
    names = {parameter: name for name, parameter in model.trained()}
    in_bf16 = config["bf16"]["enabled"]
    exact = {name: parameter.detach().clone() for parameter, name in names.items()} if in_bf16 else {}
    assert stage == config["zero_optimization"]["stage"]
    if files is not None:
        check_room(config, rank, **files)
    engine = _engine(model, optimizer, rank, config, files=files is not None)
    if stage == 0:
        updates = EngineOptimizer(engine, optimizer)
        return WrappedModel(engine, engine.set_gradient_accumulation_boundary, _backward(engine), optimizer=updates)
    assert isinstance(optimizer, LocalOptimizer)
    kind = WeightsInPieces if stage == 3 else ExactPieces if in_bf16 else PiecesOptimizer
    kind = WeightsInFiles if offload_optimizer == "nvme" else kind
    pieces = kind(engine, optimizer, names, rank, offloads=offload_optimizer != "none")
    times = rank.world_size if stage == 3 else 1
    pieces.begin_from(exact)
    return WrappedModel(
        engine, engine.set_gradient_accumulation_boundary, _backward(engine, times), pieces.gradients, optimizer=pieces
    )


def _engine(model: ModelParts, optimizer: Optimizer, rank: Rank, config: dict[str, Any], *, files: bool) -> Any:
    os.environ["DS_ACCELERATOR"] = rank.device.type
    os.environ.setdefault("LOCAL_RANK", str(rank.local_rank))  # a single rank does not get it
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    try:
        deepspeed: Any = import_module("deepspeed")  # untyped, and an optional dependency
        import_module("deepspeed.ops")
    except Exception as error:
        message = f"stack deepspeed needs the package deepspeed ({type(error).__name__}: {error}); install it with "
        raise EnvironmentFault("X715", message + "`pip install 'xtrain[deepspeed]'`, or use stack parallel") from error
    deepspeed.utils.logger.setLevel("WARNING")
    # On a CPU it would compile its own shared-memory sums. That takes minutes, and if it is killed meanwhile it leaves
    # a lock that every later start waits for. torch's process group computes the sums instead.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if files:
        check_files()
        drop_at_exit(config, rank)
    engine, *_ = deepspeed.initialize(
        model=model.whole, optimizer=optimizer, config=config, dist_init_required=False, model_parameters=None
    )
    return engine


def _backward(engine: Any, times: int = 1) -> Callable[[Tensor], None]:
    """Return the backward call. The loss is already divided by the tokens of the whole step, so microbatches are not
    averaged. times: factor by which the engine divides gradients, because stage 3 does not sum over ranks."""
    return lambda loss: engine.backward(loss * times, scale_wrt_gas=False)
