"""`setup.log.…`: whoever takes the records of the run besides its own files begins to, on the first rank."""

from typing import Any

from ...planner.plan import Plan
from ..ops import op
from ..provenance.metadata import typed_value
from ..state import Progress, Rank
from .records import Records
from .sink import RecordSink, RecordWriter
from .tensorboard_writer import TensorBoardWriter
from .wandb_writer import WandbWriter


@op("setup.log.tensorboard")
def log_to_tensorboard(plan: Plan, rank: Rank, records: Records, progress: Progress, folder: str) -> None:
    """Write event files into a folder of the run."""
    if rank.is_first:
        texts = {"spec": lambda: plan.spec_text, "plan": lambda: _page(plan)}
        writer = TensorBoardWriter(folder=records.directory / folder, step=progress.step, texts=texts)
        _begin(writer, records, progress)


@op("setup.log.wandb")
def log_to_wandb(
    plan: Plan,
    rank: Rank,
    records: Records,
    progress: Progress,
    project: str,
    entity: str | None,
    name: str | None,
    group: str | None,
    tags: list[str],
    notes: str | None,
    mode: str,
) -> None:
    """Hand records to Weights & Biases, as the run that this one has been from its beginning."""
    if rank.is_first:
        chosen = {"project": project, "entity": entity, "name": name, "group": group, "tags": tags, "notes": notes}
        writer = WandbWriter(
            directory=records.directory,
            mode=mode,
            chosen=chosen,
            config=config_of_plan(plan),
            rolled_back=sum(before - after for before, after in progress.bad.went_back),
            warn=lambda message: records.warn(message, step=progress.step),
        )
        _begin(writer, records, progress)


def config_of_plan(plan: Plan) -> dict[str, Any]:
    """Every resolved setting as nested maps: `{"optimizer": {"lr": 0.0003, …}, …}`, and what the plan is known by."""
    found: dict[str, Any] = {"plan_id": plan.id, "config_id": plan.config_id}
    for entry in plan.provenance:
        *blocks, name = entry.path.split(".")
        inner = found
        for block in blocks:
            before = inner.get(block, {})
            inner[block] = (
                before if isinstance(before, dict) else {"kind": before}
            )  # as of a source, which has settings
            inner = inner[block]
        inner[name] = typed_value(entry.value)
    found.setdefault("experiment", {}).setdefault("name", plan.name)
    return found


def _begin(writer: RecordWriter, records: Records, progress: Progress) -> None:
    sink = RecordSink(writer, lambda message: records.warn(message, step=progress.step))
    records.sinks.append(sink)
    sink.begin()


def _page(plan: Plan) -> str:
    from ...planner.report.render import render

    return render(plan)
