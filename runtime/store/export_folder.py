"""Folder of an exported model, written under a temporary name and renamed, and its model card.

The folder appears complete or not at all.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from xtrain.plan.parameters import count_parameters
from xtrain.plan.plan import Plan
from xtrain.records.lines import object_of
from xtrain.records.names import METRICS_FILE
from xtrain.regular_files import open_regular, reason_of
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ExportFailed
from xtrain.text.units import bytes_text, count_text

# Held by the writer: a folder whose lock is free was left by a killed export.
LOCK: Final = ".export.lock"


def check_free(to: Path) -> None:
    """Raise ExportFailed if the path exists."""
    if os.path.lexists(to):
        raise ExportFailed(f"{to} already exists, and an export never overwrites anything; choose another folder")


@contextmanager
def exporting(to: Path) -> Iterator[None]:
    """Raise ExportFailed if `to` exists, and for every OSError inside the block."""
    check_free(to)
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ExportFailed(f"{where}{reason_of(error)}; nothing is left at {to}") from error


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; when the block ends, it is synced and renamed to `to`.

    If the block raises, the folder is removed. Raises ExportFailed if `to` exists or another process is writing it, and
    OSError.
    """
    check_free(to)
    partial = to.with_name(to.name + durable.PARTIAL)
    to.parent.mkdir(parents=True, exist_ok=True)
    lock = _begin(partial)
    try:
        yield partial
        check_free(to)
        durable.forget(partial / LOCK)  # also syncs the folder
        durable.rename(partial, to)
    except BaseException:
        with suppress(OSError):
            durable.clear(partial)
        raise
    finally:
        os.close(lock)


def _begin(partial: Path) -> int:
    """Make the folder, without leftovers of a killed export; return its lock."""
    try:
        partial.mkdir()
    except FileExistsError:
        if not (partial / LOCK).is_file():
            raise ExportFailed(f"{partial} is in the way: an export is written there first; remove it") from None
        left = _locked(partial)
        durable.clear(partial)
        os.close(left)
        partial.mkdir()
    try:
        return _locked(partial)
    except OSError:
        with suppress(OSError):
            durable.clear(partial)
        raise


def _locked(partial: Path) -> int:
    fd = durable.create(partial / LOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ExportFailed(f"another process is writing {partial}; wait until it ends") from None
    return fd


# Nodes whose text in the plan describes how a model was trained.
HOW = (
    "setup.read_weights", "setup.pretrained", "setup.read_adapter", "setup.loader", "setup.optimizer",
    "setup.scheduler", "setup.ema",
)  # fmt: skip


def model_card(
    plan: Plan,
    state: Mapping[str, Any],
    weights: str,
    formats: Mapping[str, int],
    loss: float | None,
    *,
    adapter_alone: bool = False,
) -> str:
    """Return the text of the card. state: the checkpoint's description. weights: `trained` or `averaged`. formats:
    number format → bytes of weights in it. loss: of the last recorded step. adapter_alone: the folder has only an
    adapter; else an adapter of the plan has been merged."""
    arch, adapter = plan.architecture, plan.architecture.adapter
    source = plan.args("setup.read_weights")
    base = {"base_model": source["repo"]} if "repo" in source else {}
    tags = ["xtrain", arch.family, *([adapter.kind] if adapter is not None else [])]
    library = "peft" if adapter_alone else "transformers"
    does = "text-generation" if arch.has_logits else "text-classification"
    head = {"library_name": library, **base, "pipeline_tag": does, "tags": tags}
    model = count_parameters(arch.base) if adapter is not None else plan.parameters
    size = f"{count_text(model.total)} parameters"
    if model.active != model.total:
        size += f", {count_text(model.active)} active"
    rewards = "" if arch.has_logits else " with a head of rewards"
    what, written = f"A {arch.family} of {size}{rewards}", model.total
    if adapter is not None and adapter_alone:
        written = plan.parameters.trained
        what = f"{adapter.title()}, {count_text(written)} parameters in addition to a {arch.family} of {size}"
    elif adapter is not None:
        what += f", into which {adapter.title()} has been merged"
    made_by = state.get("made_by") or {}
    facts = {
        "parameters": f"{written:,}",
        "weights": f"{weights}, {' and '.join(f'{bytes_text(size)} of {name}' for name, size in formats.items())}",
        "step": f"{state['step']:,} of {state['steps']:,}" if "steps" in state else f"{state['step']:,}",
        "plan": f"`{state.get('plan_id', plan.id)}`",
        "experiment": f"`{state.get('config_id', plan.config_id)}`",
        "made by": ", ".join(f"{name} {made_by[name]}" for name in ("xtrain", "torch", "python") if name in made_by),
    }
    data = [f"* `{node.args['dataset']}`: {node.does}" for node in plan.nodes if node.op == "setup.data"]
    how = [f"* {node.does}" for node in plan.nodes if node.op in HOW]
    lines = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in head.items()),
        "---",
        "",
        f"# {plan.name}",
        "",
        f"{what}, trained with xtrain.",
        "",
        *_table(("", ""), {name: value for name, value in facts.items() if value}),
        "",
        "## Data",
        "",
        *data,
        "",
        "## Training",
        "",
        *how,
        "",
        "## Figures",
        "",
        *_table(("figure", "value"), _figures(state, loss, of_tokens=arch.has_logits)),
    ]
    return "\n".join(lines) + "\n"


def last_loss(directory: Path, state: Mapping[str, Any]) -> float | None:
    """Return the last loss recorded up to the checkpoint, from its state or the run's metrics; None if there is none.

    state: the checkpoint's description.
    """
    loss: float | None = (state.get("record") or {}).get("loss")
    if isinstance(loss, int | float):
        return loss
    try:
        with open_regular(directory / METRICS_FILE) as file:
            for line in file:
                record = object_of(line) or {}
                if isinstance(at := record.get("step"), int) and at <= state["step"]:
                    loss = record.get("loss", loss)
    except OSError:
        return None
    return loss if isinstance(loss, int | float) else None


def _figures(state: Mapping[str, Any], loss: float | None, *, of_tokens: bool) -> dict[str, str]:
    figures: dict[str, str] = {}
    if (tokens := state.get("tokens")) is not None:
        figures["tokens"] = f"{tokens:,}"
    if (epochs := state.get("epoch")) is not None:
        figures["epochs"] = f"{epochs:.4g}"
    if loss is not None:
        figures["loss in training"] = f"{loss:.4f}{' nats a token' if of_tokens else ''}"
    return figures | {f"`{name}`": f"{value:.4f}" for name, value in (state.get("metrics") or {}).items()}


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
