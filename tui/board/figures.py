"""The figures of the first screen as text: what is, and what was planned."""

import math
from typing import TYPE_CHECKING

from attrs import frozen

from xtrain.tui.board.head import shortened, steps_of
from xtrain.tui.pages.node_times import step_cost
from xtrain.tui.words import UNKNOWN, brief, count, decimal, printable, share, size

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

# Width of a figure's name.
NAME_COLUMNS = 10


def evaluated(board: "Board") -> list[tuple[str, str, int | None]]:
    """Return the latest evaluation of each dataset: its name, its loss or accuracy, and the step."""
    return [
        (name, decimal(found.loss, 4) if found.acc is None else f"acc {share(found.acc)}", found.step)
        for name, found in board.run.evaluations.items()
    ]


def figures(board: "Board") -> list[tuple[str, str]]:
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
        ("lr", _rate(last.lr)),
        ("tokens/s", count(last.tokens_per_second)),
        ("MFU", share(last.mfu)),
        ("data wait", share(cost.share(cost.data))),
        ("comm, most", share(cost.share(cost.communication))),
    ]


def _evaluation(board: "Board") -> tuple[str, str]:
    """Return the held-out loss under the name of its dataset; with several datasets, only their number."""
    found = evaluated(board)
    if len(found) != 1:
        return "eval loss", f"{len(found)} sets" if found else "–"
    name, value, _ = found[0]
    return shortened(f"eval {printable(name)}", NAME_COLUMNS), value


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


@frozen
class FigureRow:
    """One line of the comparison. off: actual value / planned value - 1; None where unknown."""

    name: str
    actual: str
    planned: str
    off: float | None = None


def comparison(board: "Board") -> list[FigureRow]:
    """Return actual next to planned values; `n/a` where the plan or the run does not know one."""
    last, planned = board.series.last, board.planned
    times = planned.times if planned else None
    start = board.run.start
    seconds, speed, memory, mfu = last.step_seconds, last.tokens_per_second, last.memory_bytes, last.mfu
    tokens, steps = last.tokens, steps_of(board)
    wanted_memory = planned.memory_bytes if planned else None
    on_cpu = start is not None and start.device == "cpu"
    return [
        FigureRow("step time", brief(seconds), _between(times), _off(seconds, times.step if times else None)),
        FigureRow(
            "tokens/s", count(speed), count(times.tokens_per_second) if times and times.tokens_per_second else UNKNOWN,
            _off(speed, times.tokens_per_second if times else None),
        ),
        # On a CPU, a process holds more than tensors (such as libraries), which the plan does not count.
        FigureRow(
            "memory, all" if on_cpu else "memory", size(memory), size(wanted_memory) if wanted_memory else UNKNOWN,
            None if on_cpu else _off(memory, wanted_memory),
        ),
        FigureRow("MFU", share(mfu), share(times.mfu if times else None), _off(mfu, times.mfu if times else None)),
        FigureRow("tokens", count(tokens), count(planned.tokens) if planned and planned.tokens else UNKNOWN),
        FigureRow("steps", f"{board.step:,}", f"{steps:,}" if steps else UNKNOWN),
        *_groups(board),
    ]  # fmt: skip


def _groups(board: "Board") -> list[FigureRow]:
    """Return the replica groups that take part in steps, where there are several."""
    found = board.run.replicas
    if found is None:
        return []
    who, of = ", ".join(map(str, found.taking_part)), found.of
    off = _off(float(len(found.taking_part)), float(of) if of else None)
    return [FigureRow("groups in", who, UNKNOWN if of is None else f"{of}", off)]


def _between(times) -> str:
    if times is None or times.step is None:
        return UNKNOWN
    if times.fast is None or times.slow is None:
        return brief(times.step)
    return f"{brief(times.step)} ({brief(times.fast)} to {brief(times.slow)})"


def _off(actual: float | None, planned: float | None) -> float | None:
    if actual is None or not planned or not math.isfinite(actual):
        return None
    return actual / planned - 1
