"""Screens of `xtrain run specs/quickstart.xtrain` (docs/screens): the plan is made now, and a made run is drawn.

    python tests/support/capture_quickstart.py           # write them

Its times, losses and samples are about those of a run on two cores.
"""

import io
import re
from collections.abc import Iterator
from contextlib import chdir
from math import cos, pi
from pathlib import Path
from typing import Any

from read_records import typed
from rich.console import Console

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.page import render_summary
from xtrain.runtime.loop.node_calls import topological
from xtrain.tui.lines.lasting import progress_line
from xtrain.tui.lines.view import ConsoleView
from xtrain.tui.state import RunState, reduce

ROOT = Path(__file__).parents[2]
SPEC, WIDTH, START = "specs/quickstart.xtrain", 100, 1_700_000_000.0
MIDDLE = 201
SETUP_SECONDS = {"setup.build_model": 0.2, "setup.weights": 0.1, "setup.data.stdlib": 0.67, "setup.loader": 4.4}
STEP_SECONDS = 0.26
EVALUATED = {100: 2.2973, 200: 1.9323, 300: 1.7808}
SAMPLES = (
    ("def ", "def head, os.flow.pred,\n        sys.\n\n    def prosed_expath__funct, lobals):\n        else:"),
    ("import ", "import may the to\n        if read names error: instance loat othe resocket."),
)


def records(plan: Plan, directory: Path) -> Iterator[dict[str, Any]]:
    """Yield what the run writes, in order."""
    now = START

    def event(kind: str, step: int = 0, **fields: Any) -> dict[str, Any]:
        return {"time": now, "step": step, "event": kind, **fields}

    known = {"run_id": directory.name, "plan_id": plan.id, "name": plan.name, "directory": str(directory)}
    yield event("run_start", world_size=1, device="cpu", steps=300, attempt=1, resumed_step=None, **known)
    yield event("device", device="cpu", threads=2, matmul="medium", torch="2.13.0+cpu")
    for node in topological(plan):
        if node.kind in ("setup", "collate"):
            seconds = SETUP_SECONDS.get(node.id, 0.01)
            now += seconds
            yield event("setup_begin", node=node.id)
            yield event("setup", node=node.id, seconds=seconds, detail=node.does)
    yield event("data", rows={"stdlib": 17_501}, steps=300, epoch_rows=None, epoch_tokens=None, epochs=None)
    yield event("setup_done", seconds=now - START)
    for step in range(1, 301):
        now += STEP_SECONDS
        rate = 3e-3 * step / 30 if step < 30 else 3e-4 + 1.35e-3 * (1 + cos(pi * (step - 30) / 270))
        numbers = {"loss": 1.4 + 4.2 / (1 + step / 12), "lr": rate, "tokens": 2048 * step}
        yield (
            {"time": now, "step": step, "grad_norm": 0.8, "step_seconds": STEP_SECONDS}
            | numbers
            | {"tokens_per_second": 2048 / STEP_SECONDS}
        )
        if step == 13:
            left = {"steps_left": 287, "seconds_left": 287 * STEP_SECONDS}
            yield event("estimate", step, step_seconds=0.26, measured_steps=12, first_step_seconds=0.66, **left)
        if step in EVALUATED:
            evaluated = {"node": "tick.eval.stdlib", "dataset": "stdlib", "batches": 8, "weights": "trained"}
            yield event("eval", step, loss=EVALUATED[step], tokens=16_200, seconds=0.65, **evaluated)
            saved = {"path": str(directory / f"checkpoints/ckpt-s{step:012d}"), "bytes": 10_171_187}
            yield event("checkpoint", step, node="tick.checkpoint", seconds=0.49, **saved)
    whole = {"node": "event.finish.eval.stdlib", "dataset": "stdlib", "batches": None, "weights": "trained"}
    yield event("eval", 300, loss=1.6102, tokens=238_500, seconds=17.4, **whole)
    samples = [{"prompt": prompt, "text": text} for prompt, text in SAMPLES]
    yield event("generate", 300, node="event.finish.generate", weights="trained", samples=samples, seconds=2.1)
    model = {"path": str(directory / "checkpoints/model-s000000000300"), "bytes": 3_370_000, "weights": "trained"}
    yield event("model", 300, node="event.finish.model", seconds=0.05, **model)
    now += 20
    yield event("run_end", 300, status="done", exit_code=0, seconds=now - START, loss=1.5615)


def quickstart_screens() -> dict[str, str]:
    """Return file name → text of both screens."""
    with chdir(ROOT):
        plan = plan_from_path(SPEC).plan
        assert plan is not None
        head = f"$ xtrain run {SPEC}\n{render_summary(plan)}"
        directory = Path("runs") / plan.name / plan.config_id
        every = [typed(record) for record in records(plan, directory)]
        middle = [each for each in every if (each.step or 0) < MIDDLE or each.step == MIDDLE]
        return {
            "quickstart-middle.txt": head + drawn(middle, directory),
            "quickstart-end.txt": head + drawn(every, directory),
        }


def drawn(given: list[Any], directory: Path) -> str:
    """Return what a terminal shows after these records."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, highlight=False)
    view, state = ConsoleView(console, directory, clock=lambda: given[-1].time), RunState()
    for record in given:
        state = reduce(state, record)
        if view.shows(record):
            view.draw(state, record)
    if state.end is None:
        console.print(progress_line(state, width=WIDTH, now=given[-1].time, quiet=0.0))
    else:
        view.close(state)
    return re.sub(r" +$", "", out.getvalue(), flags=re.MULTILINE)


if __name__ == "__main__":
    for name, text in quickstart_screens().items():
        (ROOT / "docs/screens" / name).write_text(text, encoding="utf-8")
