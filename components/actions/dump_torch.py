"""`step.dump` and `tick.dump`: the last microbatches and the memory of a failed rank, without other ranks."""

from collections import deque
from typing import Any

import torch
from attrs import fields

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank, Resources
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.loop.memory_report import file_of, write_memory, write_whole
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.records import Records

# Name of the resource with (step, microbatches) of the last steps.
HELD = "held_rows"


@op("step.dump", traced=False)
def hold_rows(resources: Resources, batches: int) -> StepCall:
    """Hold the microbatches of the last `batches` steps, which stay in host memory."""
    held: deque[tuple[int, list[Microbatch]]] = deque(maxlen=batches)
    resources[HELD] = held

    def hold(step: Step) -> None:
        if held and held[-1][0] == step.index + 1:  # a step that is repeated
            held.pop()
        held.append((step.index + 1, list(step.microbatches)))

    return hold


@op("tick.dump")
def dump(
    plan: Plan, rank: Rank, records: Records, progress: Progress, resources: Resources, node_id: str, batches: int
) -> StepCall:
    """Write the files of this rank; what cannot be written is a warning."""

    def write(step: Step) -> None:
        folder = records.directory / "logs" / f"dump-{records.attempts()}"
        failure = str(resources.get("failure", ""))
        write_memory(folder, resources, failure, node_id)
        held = list(resources.get(HELD, ()))[-batches:] if batches else []
        content = {
            "rank": rank.rank,
            "failure": failure,
            "steps": [{"step": number, "microbatches": [_tensors(each) for each in rows]} for number, rows in held],
        }
        write_whole(file_of(folder, rank.rank, "pt"), lambda beside: torch.save(content, beside))
        records.warn(f"the failed rank wrote its memory and rows into {folder}", step=progress.step, every_rank=True)

    return write


def _tensors(batch: Microbatch) -> dict[str, Any]:
    """Return the tensors and numbers of a microbatch by name, which `torch.load` reads without xtrain."""
    values = {attribute.name: getattr(batch, attribute.name) for attribute in fields(Microbatch)}
    return {name: value for name, value in values.items() if name != "units" and value is not None}
