"""Content of a report: runs, curves, plan against measured, differences, alerts, samples, environment."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from xtrain.records import events
from xtrain.records import training_events as training
from xtrain.records.lines import Event
from xtrain.records.sweep import SweepState, TrialState
from xtrain.regular_files import read_json, read_regular
from xtrain.text.units import count, decimal, share
from xtrain.tui.curves.canvas import Line
from xtrain.tui.curves.picture import Picture, picture
from xtrain.tui.model.board import Board
from xtrain.tui.model.columns import EVALUATIONS
from xtrain.tui.model.metrics import TrialCurves
from xtrain.tui.model.reader import RunReader
from xtrain.tui.model.series import By
from xtrain.tui.pages import server_page, sweeps
from xtrain.tui.pages.charts import chart_keys, levels, unit_of
from xtrain.tui.pages.comparison import Compared, Difference, compared, differences, lines
from xtrain.tui.pages.figures import FigureRow, advice, comparison, figures, headline, name_of, steps_of
from xtrain.tui.pages.sheet import ListView, plain

# Bytes of columns that are kept of a run: all metrics of a million steps.
LIMIT_BYTES: Final = 512 << 20
# Bytes of a text file that are shown; events, and evaluations with samples, that are listed.
TEXT_BYTES: Final = 1 << 20
MOST_EVENTS, MOST_SAMPLED = 100, 3
# Events that a report lists.
_NOTABLE: Final = (
    events.AlertEvent, events.FailureEvent, events.WarningEvent, events.StuckEvent, events.RestartEvent,
    events.ReplicaGroupEvent, events.SignalEvent, events.StopEvent, training.NonFiniteEvent, training.RollbackEvent,
    training.SkippedEvent,
)  # fmt: skip
_BAD: Final = (events.FailureEvent, events.StuckEvent, training.NonFiniteEvent)
_ENVIRONMENT: Final = "metadata/environment.json"


@frozen(kw_only=True)
class Chart:
    """Plot of a metric of all runs."""

    title: str
    picture: Picture
    scale: str = ""


@frozen(kw_only=True)
class Notice:
    """Event in a report. bad: it is a failure or a raised alert."""

    when: str
    step: int | None
    kind: str
    text: str
    bad: bool


@frozen(kw_only=True)
class RunPart:
    """Part of a report about one run. evaluations: step, dataset, loss, accuracy and tokens. omitted: number of older
    events that are not listed."""

    run: Compared
    title: str
    headline: str
    advice: Sequence[str]
    progress: str
    figures: Mapping[str, str]
    against_plan: Sequence[FigureRow]
    evaluations: Sequence[tuple[int | None, str, str, str, str]]
    notices: Sequence[Notice]
    omitted: int
    samples: Sequence[training.GenerateEvent]
    environment: Sequence[tuple[str, str]]
    texts: Sequence[tuple[str, str]]
    server: str = ""


@frozen(kw_only=True)
class SweepPart:
    """Part of a report about a sweep. rows: trials, best first, each with its value and outcome."""

    name: str
    state: SweepState
    settings: Sequence[str]
    rows: Sequence[tuple[TrialState, str, str]]
    importance: Sequence[tuple[str, float, str]]
    charts: Sequence[Chart]


@frozen(kw_only=True)
class Report:
    """Content of a report. made: time at which it was made."""

    title: str
    made: str
    runs: Sequence[RunPart]
    charts: Sequence[tuple[str, Sequence[Chart]]]
    differences: Sequence[Difference] | None
    sweep: SweepPart | None = field(default=None)

    @property
    def columns(self) -> list[str]:
        """Names of the figures that any run has: runs of different losses have different ones."""
        return list(dict.fromkeys(name for part in self.runs for name in part.figures))


def report_of(
    directories: Sequence[Path], *, sweep: Path | None = None, texts: Mapping[Path, Sequence[tuple[str, str]]] = {}
) -> Report:
    """Return the report of some runs. sweep: folder of a sweep that is shown first; texts: title and text of further
    pages of a run, such as the page of its plan. Never raises because of the files."""
    boards = [read_all(directory) for directory in directories]
    runs = compared(directories, boards)
    parts = [_run_part(run, board, texts.get(run.directory, ())) for run, board in zip(runs, boards, strict=True)]
    sweep_part = None if sweep is None else _sweep_part(sweep)
    names = [sweep_part.name] if sweep_part else [run.label for run in runs]
    return Report(
        title=", ".join(names),
        made=datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=parts,
        charts=charts_of(runs),
        differences=differences(runs) if len(runs) > 1 else None,
        sweep=sweep_part,
    )


def read_all(directory: Path) -> Board:
    """Return the board of a run once all of its files have been read."""
    reader = RunReader(directory, LIMIT_BYTES, with_trials=False)
    while (board := reader.poll(10.0)).loading is not None:
        pass
    return board


def charts_of(runs: Sequence[Compared]) -> list[tuple[str, list[Chart]]]:
    """Return the plots of all metrics by topic; over tokens if the steps of the runs differ in size."""
    sizes = {run.board.planned.tokens_per_step for run in runs if run.board and run.board.planned}
    by: By = "tokens" if len(sizes) > 1 else "step"
    found: dict[str, list[Chart]] = {}
    for key in chart_keys(runs):
        drawn = lines(runs, key, by)
        if key == "loss" and len(runs) == 1:
            drawn += _evaluated(runs[0], by)
        if chart := _chart(key, drawn, by, levels(runs, key)):
            found.setdefault(topic_of(key), []).append(chart)
    return list(found.items())


def topic_of(key: str) -> str:
    """Return the topic of a metric."""
    if key.startswith(EVALUATIONS):
        return "Evaluation"
    if key.startswith(("loss/", "rows/", "valid_tokens/")):
        return "Datasets"
    return "Other metrics" if "/" in key else "Training"


def _chart(key: str, drawn: Sequence[Line], by: By, planned: Any = ()) -> Chart | None:
    found = picture(drawn, title=key, x_label=by, unit=unit_of(key), levels=planned)
    return None if found is None else Chart(title=key, picture=found, scale=", ".join(found.view.describe()))


def _evaluated(run: Compared, by: By) -> list[Line]:
    """Return the held-out losses of a run, to be drawn with its loss."""
    assert run.board is not None
    keys = [key for key in run.board.series.keys if key.startswith("eval/") and key.endswith("/loss")]
    return [Line(key.removesuffix("/loss"), *run.board.series.xy(key, by)) for key in keys]


def _run_part(run: Compared, board: Board, texts: Sequence[tuple[str, str]]) -> RunPart:
    known = [entry.event for entry in board.events.entries]
    notable = [_notice(each, entry.text) for each, entry in zip(known, board.events.entries, strict=True)
               if isinstance(each, _NOTABLE)]  # fmt: skip
    steps = steps_of(board)
    return RunPart(
        run=run,
        title=name_of(board),
        headline=headline(board) if board.life.over else "",
        advice=advice(board) if board.life.over else (),
        progress=f"{board.step:,}{f' of {steps:,}' if steps else ''}",
        figures=dict(figures(board)) if board.server is None else {},
        against_plan=comparison(board) if board.server is None else (),
        evaluations=[_evaluation(each) for each in known if isinstance(each, training.EvalEvent)][-MOST_EVENTS:],
        notices=notable[-MOST_EVENTS:],
        omitted=max(0, len(notable) - MOST_EVENTS) + board.events.forgotten,
        samples=[each for each in known if isinstance(each, training.GenerateEvent)][: -MOST_SAMPLED - 1 : -1],
        environment=_environment(run.directory, known),
        texts=[*texts, *_spec(run.directory)],
        server=_server(board),
    )


def _notice(event: Event, text: str) -> Notice:
    bad = isinstance(event, _BAD) or (isinstance(event, events.AlertEvent) and event.state != "cleared")
    when = "" if event.time is None else _clock(event.time)
    return Notice(when=when, step=event.step, kind=event.event.replace("_", " "), text=text, bad=bad)


def _clock(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # a time of a file can be any number
        return ""


def _evaluation(event: training.EvalEvent) -> tuple[int | None, str, str, str, str]:
    """Return step, dataset, loss, accuracy and tokens."""
    accuracy = "" if event.acc is None else share(event.acc)
    return event.step, event.dataset, decimal(event.loss, 4), accuracy, count(event.tokens)


def _environment(directory: Path, known: Sequence[Event]) -> list[tuple[str, str]]:
    """Return versions, machine and command of the last start; empty where they cannot be read."""
    try:
        content = read_json(_inside(directory, _ENVIRONMENT), TEXT_BYTES)
    except (OSError, ValueError):
        content = {}
    found = {key: _as_text(value) for key, value in content.items()} if isinstance(content, dict) else {}
    for line in _text_of(directory, "metadata/git.yaml").splitlines():
        name, _, value = line.partition(": ")
        found.setdefault(f"git {name}", value.strip('"'))
    for event in known:
        if isinstance(event, training.DeviceEvent):
            found |= {"torch device": event.device, "threads": _as_text(event.threads), "fp32 products": event.matmul}
    return [(key.replace("_", " "), value) for key, value in found.items() if value]


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _spec(directory: Path) -> list[tuple[str, str]]:
    text = _text_of(directory, "spec.xtrain")
    return [("Spec", text)] if text else []


def _text_of(directory: Path, name: str) -> str:
    try:
        return read_regular(_inside(directory, name), TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _inside(directory: Path, name: str) -> Path:
    """Return the path of a file of a run. Raises OSError if links lead out of its directory, to what nobody shares."""
    try:
        path = (directory / name).resolve()
        if path.is_relative_to(directory.resolve()):
            return path
    except RuntimeError:  # links in a circle
        pass
    raise OSError(f"{directory / name} is a link to elsewhere")


def _server(board: Board) -> str:
    """Return the Server screen as text; empty for a run without a server."""
    if board.server is None:
        return ""
    rows = len(board.server.models) + 60
    page = server_page.page(board.server, ListView(), 100, rows, board.now)
    return "\n".join(plain(row).rstrip() for row in page.rows).rstrip()


def _sweep_part(folder: Path) -> SweepPart:
    state = SweepState.read(folder)
    curves = TrialCurves(folder)
    version = -1
    while curves.version != version:
        version = curves.version
        curves.poll(state, float("inf"))
    ranked = sweeps.ranked(state)
    settings = list(dict.fromkeys(name for trial in ranked for name in trial.point))
    importance = sorted(sweeps.importance(state, settings).items(), key=lambda item: -item[1])
    keys = dict.fromkeys((state.objective or sweeps.LOSS, sweeps.LOSS))
    charts = [_chart(key, sweeps.trial_lines(state, curves.series, key), "tokens") for key in keys]
    return SweepPart(
        name=folder.name,
        state=state,
        settings=settings,
        rows=[(trial, decimal(state.of(trial).value, 4), sweeps.outcome(state, trial)) for trial in ranked],
        importance=[(name, value, share(value)) for name, value in importance],
        charts=[chart for chart in charts if chart],
    )
