"""Figures of a run: newest values, values against the plan, its end, and what to do next."""

import math

from attrs import frozen

from xtrain.records.metrics import RankMetrics, StepMetrics
from xtrain.records.names import EndStatus
from xtrain.text.units import UNKNOWN, brief, count, decimal, duration, plural, printable, share, size
from xtrain.tui.event_text import cause, failed
from xtrain.tui.lines.plain import command_of_model, going_on, more_of_it, outcome, short_path, succeeded
from xtrain.tui.model.board import Board
from xtrain.tui.model.planned import PlannedTimes
from xtrain.tui.pages.inquiries import inquiries
from xtrain.tui.pages.node_times import step_cost
from xtrain.tui.pages.sheet import left


def name_of(board: Board) -> str:
    """Return the name of the run: of its experiment, else of its folder."""
    start, planned = board.run.start, board.planned
    return printable((start.name if start else "") or (planned.name if planned else "") or board.directory.name)


def shortened(text: str, columns: int) -> str:
    """Return `text` in at most `columns` columns."""
    return left(text, columns).rstrip()


def steps_of(board: Board) -> int | None:
    """Return the number of steps of the run; None where unknown."""
    planned = board.planned.steps if board.planned else None
    return board.run.steps or planned


# Width of a figure's name.
NAME_COLUMNS = 10


def evaluated(board: Board) -> list[tuple[str, str, int | None]]:
    """Return the latest evaluation of each dataset: its name, its loss or accuracy, and the step."""
    return [
        (name, decimal(found.loss, 4) if found.acc is None else f"acc {share(found.acc)}", found.step)
        for name, found in board.run.evaluations.items()
    ]


def figures(board: Board) -> list[tuple[str, str]]:
    """Return the most important figures, by name."""
    last = board.series.last
    cost = step_cost(last, None)
    minimised = [("objective", decimal(last.objective, 4))] if last.objective not in (None, last.loss) else []
    rewarded = [("reward", decimal(last.reward, 3))] if last.reward is not None else []
    return [
        ("loss", decimal(last.loss, 4)),
        *minimised,
        *rewarded,
        _evaluation(board),
        ("grad norm", decimal(last.grad_norm, 4)),
        ("lr", "–" if last.lr is None else f"{last.lr:.3g}"),
        ("tokens/s", count(last.tokens_per_second)),
        ("MFU", share(last.mfu)),
        ("data wait", share(cost.share(cost.data))),
        ("comm, most", share(cost.share(cost.communication))),
    ]


def _evaluation(board: Board) -> tuple[str, str]:
    """Return the held-out loss under the name of its dataset; with several datasets, only their number."""
    found = evaluated(board)
    if len(found) != 1:
        return "eval loss", f"{len(found)} sets" if found else "–"
    name, value, _ = found[0]
    return shortened(f"eval {printable(name)}", NAME_COLUMNS), value


@frozen
class FigureRow:
    """One line of the comparison. off: actual value / planned value - 1; None where unknown."""

    name: str
    actual: str
    planned: str
    off: float | None = None


def comparison(board: Board) -> list[FigureRow]:
    """Return actual next to planned values; `n/a` where the plan or the run does not know one."""
    last, planned = board.series.last, board.planned
    times = (planned and planned.times) or PlannedTimes()
    start = board.run.start
    seconds, speed, memory, mfu = last.step_seconds, last.tokens_per_second, last.memory_bytes, last.mfu
    tokens, steps = last.tokens, steps_of(board)
    wanted_memory = planned.memory_bytes if planned else None
    on_cpu = start is not None and start.device == "cpu"
    return [
        FigureRow("step time", brief(seconds), _between(times), _off(seconds, times.step)),
        FigureRow(
            "tokens/s", count(speed), count(times.tokens_per_second) if times.tokens_per_second else UNKNOWN,
            _off(speed, times.tokens_per_second),
        ),
        # On a CPU, a process holds more than tensors (such as libraries), which the plan does not count.
        FigureRow(
            "memory, all" if on_cpu else "memory", size(memory), size(wanted_memory) if wanted_memory else UNKNOWN,
            None if on_cpu else _off(memory, wanted_memory),
        ),
        FigureRow("MFU", share(mfu), share(times.mfu), _off(mfu, times.mfu)),
        *([FigureRow("GPU", gauges, UNKNOWN)] if (gauges := gauges_text(last)) else []),
        FigureRow("tokens", count(tokens), count(planned.tokens) if planned and planned.tokens else UNKNOWN),
        FigureRow("steps", f"{board.step:,}", f"{steps:,}" if steps else UNKNOWN),
        *_groups(board),
    ]  # fmt: skip


def gauges_text(last: StepMetrics | RankMetrics) -> str:
    """Return utilization, temperature and power of a GPU as text; empty without them."""
    forms = ((last.gpu_utilization, "{:.0%}"), (last.gpu_temperature, "{:.0f} °C"), (last.gpu_power, "{:.0f} W"))
    return " · ".join(form.format(value) for value, form in forms if value is not None)


def _groups(board: Board) -> list[FigureRow]:
    """Return the replica groups that take part in steps, where there are several."""
    found = board.run.replicas
    if found is None:
        return []
    who, of = ", ".join(map(str, found.taking_part)), found.of
    off = _off(float(len(found.taking_part)), float(of) if of else None)
    return [FigureRow("groups in", who, UNKNOWN if of is None else f"{of}", off)]


def _between(times: PlannedTimes) -> str:
    if times.step is None:
        return UNKNOWN
    if times.fast is None or times.slow is None:
        return brief(times.step)
    return f"{brief(times.step)} ({brief(times.fast)} to {brief(times.slow)}){times.label and ', '}{times.label}"


def _off(actual: float | None, planned: float | None) -> float | None:
    if actual is None or not planned or not math.isfinite(actual):
        return None
    return actual / planned - 1


def headline(board: Board) -> str:
    """Return one line on how the run ended."""
    run, life = board.run, board.life
    if life.state == "lost":
        return f"LOST at step {board.step:,}: {life.why or 'its processes are gone'}"
    why = outcome(run)
    parts = [f"{life.in_words.upper()} after {plural(board.step, 'step')}{_time_taken(board)}"]
    parts += [f"loss {decimal(run.loss, 4)}"] if run.loss is not None else []
    parts += [why] if why else []
    return printable(", ".join(parts))


def _time_taken(board: Board) -> str:
    """Return ` in 4m02s`; for a resumed run, also the steps of this start."""
    run = board.run
    if run.end is None or run.end.seconds is None:
        return ""
    own = f", the last {board.step - run.first_step:,} of them" if 0 < run.first_step < board.step else ""
    return f"{own} in {duration(run.end.seconds)}"


def advice(board: Board) -> list[str]:
    """Return what to do next, the most helpful first."""
    run, directory = board.run, board.directory
    if succeeded(run):
        purpose, *command = command_of_model(run, directory)
        more = more_of_it(run)
        lines = [f"{purpose}: {' '.join(command)}", *([more] if more else []), *inquiries(board)]
        return [printable(text) for text in lines]
    lines = [f"{failed(failure)}: {cause(failure)}" for failure in run.failures[:1]]
    lines.append(going_on(run))
    if run.status == EndStatus.FAILED or board.life.state == "lost":
        lines.append(f"logs: {short_path(directory / 'logs')}")
    lines += inquiries(board)
    return [printable(text) for text in lines]
