"""The finished runs below some folders, as a law is fitted to them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from xtrain.dsl.metric import Metric
from xtrain.planner.load import load_plan
from xtrain.planner.plan import Plan
from xtrain.planner.serialise import PlanError
from xtrain.records.end_status import EndStatus
from xtrain.records.lines import objects_since
from xtrain.records.paths import METRICS_FILE
from xtrain.runtime.law.fit import RunLoss, Unfittable
from xtrain.runtime.run_directory.ends import last_end


def finished_runs(paths: Iterable[Path]) -> list[tuple[Path, Plan]]:
    """The runs at some paths or below them that were trained to their end, each once, with their plans."""
    found: dict[Path, tuple[Path, Plan]] = {}
    for path in paths:
        plans = [path / "plan.json"] if (path / "plan.json").is_file() else sorted(path.rglob("plan.json"))
        for file in plans:
            end = last_end(file.parent)
            if end is None or end.status not in (EndStatus.DONE, EndStatus.COMPLETE):
                continue
            try:
                found.setdefault(file.parent.resolve(), (file.parent, load_plan(file)))
            except PlanError:
                continue  # of another version, or damaged: no run that can be compared
    return list(found.values())


def measured_runs(runs: Sequence[tuple[Path, Plan]], metric: str | None) -> tuple[str, list[tuple[Path, RunLoss]]]:
    """The metric, and the runs that have measured it.

    metric: `eval.DATASET.loss`; None: that of the one dataset that all runs evaluate. Raises Unfittable.
    """
    if not runs:
        raise Unfittable("there is no finished run")
    lines = {path: objects_since(path / METRICS_FILE) for path, _ in runs}
    name = _shared_metric(lines.values()) if metric is None else metric
    read = Metric.read(name)
    if read is None:
        raise Unfittable(f"`{name}` is no metric; write for instance --metric eval.web.loss")
    key = read.key
    found = []
    for path, plan in runs:
        values = [(row[key], row) for row in lines[path] if isinstance(row.get(key), int | float)]
        tokens = [row["tokens"] for row in lines[path] if row.get("tokens")]
        if values and not (math.isfinite(values[-1][0]) and values[-1][0] > 0):
            raise Unfittable(f"{path} ended with {name} {values[-1][0]}, which is no loss above 0; leave the run out")
        if values and tokens:
            found.append((path, RunLoss(float(plan.parameters.active), float(tokens[-1]), float(values[-1][0]))))
    if not found:
        raise Unfittable(f"no run has measured {name}")
    return name, found


def _shared_metric(runs: Iterable[Sequence[dict]]) -> str:
    """The loss that all runs measure. Raises Unfittable where there are none or several."""
    shared = set.intersection(*({key for row in rows for key in row if _is_loss(key)} for rows in runs))
    names = sorted(key.replace("/", ".") for key in shared)
    if len(names) != 1:
        raise Unfittable(f"name a loss with --metric; all runs measure: {', '.join(names) or 'none'}")
    return names[0]


def _is_loss(key: str) -> bool:
    return key.startswith("eval/") and key.endswith("/loss")
