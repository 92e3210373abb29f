"""`README.md` of an exported model: what it is, what it was trained on, and how it did."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...planner.plan import Plan
from ...planner.units import bytes_text, count_text
from ...records.lines import object_of
from ...records.paths import METRICS_FILE

# Nodes whose line in the plan says how a model was trained.
HOW = ("setup.read_weights", "setup.pretrained", "setup.loader", "setup.optimizer", "setup.scheduler", "setup.ema")


def model_card(
    plan: Plan, state: Mapping[str, Any], weights: str, formats: Mapping[str, int], loss: float | None
) -> str:
    """The text. state: what the checkpoint says of itself. weights: `trained` or `averaged`. formats: number format →
    bytes of weights in it. loss: of the last step that was recorded."""
    arch = plan.architecture
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["xtrain", arch.family]}
    size = f"{count_text(plan.parameters.total)} parameters"
    if plan.parameters.active != plan.parameters.total:
        size += f", {count_text(plan.parameters.active)} active"
    made_by = state.get("made_by") or {}
    facts = {
        "parameters": f"{plan.parameters.total:,}",
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
        f"A {arch.family} of {size}, trained with xtrain.",
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
        *_table(("figure", "value"), _figures(state, loss)),
    ]
    return "\n".join(lines) + "\n"


def last_loss(directory: Path, step: int) -> float | None:
    """The loss that was recorded last until a step of a run; None if none was."""
    found: float | None = None
    try:
        with (directory / METRICS_FILE).open("rb") as file:
            for line in file:
                record = object_of(line) or {}
                if isinstance(at := record.get("step"), int) and at <= step:
                    found = record.get("loss", found)
    except OSError:
        return None
    return found if isinstance(found, int | float) else None


def _figures(state: Mapping[str, Any], loss: float | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if (tokens := state.get("tokens")) is not None:
        found["tokens"] = f"{tokens:,}"
    if (epochs := state.get("epoch")) is not None:
        found["epochs"] = f"{epochs:.4g}"
    if loss is not None:
        found["loss in training"] = f"{loss:.4f} nats a token"
    return found | {f"`{name}`": f"{value:.4f}" for name, value in (state.get("metrics") or {}).items()}


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
