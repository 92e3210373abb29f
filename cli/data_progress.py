"""Tokenization progress: a bar on a terminal, occasional lines elsewhere."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from xtrain.cli.safe_output import drawn_on

if TYPE_CHECKING:
    from xtrain.runtime.data.stores.progress import DataProgress, Report

LINE_SECONDS = 10.0


@contextmanager
def shown(name: str) -> "Iterator[Report]":
    """Yield a callback for `build_store` that shows its progress on stderr until the block ends."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(name) as report:
            yield report
        return
    from xtrain.runtime.data.stores.progress import every

    yield every(LINE_SECONDS, lambda line, _: print(f"{name}: {line}", file=sys.stderr, flush=True))


@contextmanager
def _bar(name: str) -> "Iterator[Report]":
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    from xtrain.runtime.data.stores.progress import ReadingPace, in_words

    pace = ReadingPace()
    # Remove the bar at the end; other lines report the result.
    bars = Bars(
        TextColumn("{task.fields[dataset]}", table_column=Column(no_wrap=True, min_width=len(name))),
        BarColumn(16, table_column=Column(min_width=16)),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=Console(file=drawn_on(sys.stderr)),
        transient=True,
        # Output for stdout must not be redirected to the bar's stream.
        redirect_stdout=False,
        redirect_stderr=False,
        refresh_per_second=4,
    )
    with bars:
        task = bars.add_task("", dataset=name, total=None, start=False)

        def report(now: "DataProgress") -> None:
            pace.look(now)
            bars.start_task(task)
            bars.update(task, description=in_words(now, pace), total=now.total, completed=now.done)

        yield report
