"""`tick.export`: the model as a transformers folder, for any sharding.

All ranks write their shards as a checkpoint of weights alone. The first rank then exports it like `xtrain export` and
removes it. No rank ever holds the whole model in memory.
"""

import os
import time
from functools import partial
from pathlib import Path

from xtrain.plan.plan import Plan
from xtrain.records.training_events import ExportEvent
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import DataError, EnvironmentFault, StorageFailed
from xtrain.runtime.base.json_lines import EVENT_SECONDS
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.loop.checkpointing import Beginning
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.provenance import written_by
from xtrain.runtime.observe.records import Records
from xtrain.runtime.store.adapter_export import AdapterExport, plan_of, stored_names
from xtrain.runtime.store.export import Export, Exported
from xtrain.runtime.store.writing import write_tensors

SHARDS = "export" + durable.PARTIAL  # in the directory of the run


@op("tick.export")
def export(
    plan: Plan,
    begun: Beginning,
    model: ModelParts,
    rank: Rank,
    records: Records,
    node_id: str,
    to: str,
    dtype: str | None,
    most: int,
    dequantise: bool = False,
    adapter: bool = False,
    task: str | None = None,
    gguf: bool = False,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Export the current weights, or the averaged ones with `ema { publish }` once they exist. adapter: export only the
    adapter, for PEFT. task: export this task's adapter. gguf: write one file for llama.cpp.

    A failed export is a warning: training continues, and a checkpoint can be exported later.
    """
    collective = CollectiveErrors.of(rank)
    shards = records.directory / SHARDS

    if gguf:  # what the plan cannot know is refused before the first step
        whole = Export(
            plan=plan, run=records.directory, base=Path.cwd(), tensors=shards, prefix="", weights="trained", state={},
            dtype=dtype, most=most, gguf=True,
        )  # fmt: skip
        whole.check_tokens()

    def run(step: Step) -> None:
        begin, number = time.perf_counter(), begun.state.progress.step
        folder = Path(to.replace("{step}", str(number)))
        if collective.first(lambda: os.path.lexists(folder)):
            message = f"{folder} already exists and is not replaced: the model of step {number:,} is not exported"
            records.warn(message, step=number, code="X723")
            return
        reshard(model)  # parameters have the names of their shards only inside this context
        tensors, said = begun.state.weights()

        def convert() -> Exported:
            records.writer.settle(EVENT_SECONDS)  # the model card reads the loss from the metrics file
            make = partial(Export, most=most, dequantise=dequantise, gguf=gguf)
            if adapter:
                make = partial(AdapterExport, names=stored_names(plan, task))
            export = make(
                plan=plan_of(plan, task) if adapter else plan,
                run=records.directory,
                base=Path.cwd(),
                tensors=shards,
                prefix="model.",
                weights=said["weights"],
                state={**begun.state.described(), "made_by": written_by(records.directory), **records.unwritten()},
                dtype=dtype,
            )
            try:
                return export.write(folder, lambda *progress: beat.mark() if beat is not None else None)
            except (EnvironmentFault, DataError) as fault:
                raise OSError(str(fault)) from fault  # reported to all ranks

        try:
            collective.first(lambda: _begin(shards))
            write_tensors("dcp", tensors, shards, collective)
            exported = collective.first(convert)
        except StorageFailed as failure:
            message = f"the model of step {number:,} could not be exported to {folder}: {failure}"
            records.warn(message, step=number, code="X723")
            return
        finally:
            collective.first(lambda: _clear(shards))
        records.event(
            ExportEvent(
                step=number,
                node=node_id,
                path=str(folder),
                weights=said["weights"],
                formats=exported.formats,
                bytes=exported.bytes,
                seconds=time.perf_counter() - begin,
            )
        )

    return run


def _begin(shards: Path) -> None:
    _clear(shards)
    shards.mkdir()


def _clear(shards: Path) -> None:
    if shards.exists():
        durable.clear(shards)
