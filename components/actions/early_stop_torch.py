"""`tick.early_stop`: finish the run when a metric no longer improves."""

from math import isfinite

from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop.checkpointing import Beginning
from xtrain.runtime.nn.batch import Step, StepCall


@op("tick.early_stop")
def stop_early(
    node_id: str, progress: Progress, begun: Beginning, metric: str, patience: int, least: float, highest: bool
) -> StepCall:
    """Count measurements without improvement. Every rank knows the values, so all finish after the same step.

    The counters are `progress.kept[node_id]`: `metric`, its `best` value, and the number of measurements since then,
    `waited`; counts for another metric or run are dropped. A value that is not finite is no improvement.
    """

    def judge() -> None:
        kept = progress.kept.get(node_id)
        if kept is not None and kept["waited"] >= patience:
            times = f"{kept['waited']} measurements in a row" if kept["waited"] > 1 else "the last measurement"
            best = "no finite value" if kept["best"] is None else f"its best value is {kept['best']:.6g}"
            progress.over = f"{metric} has not improved in {times}; {best}"

    def run(step: Step) -> None:
        at, value = progress.measured.get(metric, (-1, 0.0))
        if at != progress.step:
            return
        kept = progress.kept.get(node_id, {})
        best, waited = kept.get("best"), kept.get("waited", 0)
        gain = 0.0 if best is None else value - best if highest else best - value
        if isfinite(value) and (best is None or gain > least):
            best, waited = value, 0
        else:
            waited += 1
        progress.kept[node_id] = {"metric": metric, "best": best, "waited": waited}
        judge()

    if not begun.start.own or progress.kept.get(node_id, {}).get("metric") != metric:
        progress.kept.pop(node_id, None)
    judge()
    return run
