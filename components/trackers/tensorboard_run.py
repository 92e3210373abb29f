"""`setup.log.tensorboard`: records as event files: numbers as scalars, lists as histograms, texts as texts."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from xtrain.lazy_attrs import define
from xtrain.plan.plan import Plan
from xtrain.records.lines import Event, as_object
from xtrain.records.metrics import StepMetrics
from xtrain.records.training_events import GenerateEvent, RollbackEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import TrackerContext, Trackers

# Seconds between two flushes to the file.
FLUSH_SECONDS: Final = 5.0


@op("setup.log.tensorboard")
def log_to_tensorboard(trackers: Trackers, folder: str) -> None:
    """Write event files to a folder of the run."""

    def make(run: TrackerContext) -> TensorBoardWriter:
        texts = {"spec": lambda: run.plan.spec_text, "plan": lambda: _page(run.plan)}
        return TensorBoardWriter(folder=run.directory / folder, step=run.step, texts=texts)

    trackers.begin(make)


def _page(plan: Plan) -> str:
    from xtrain.planner.review.page import render

    return render(plan)


@define(eq=False, kw_only=True)
class TensorBoardWriter:
    """A `RecordWriter` for TensorBoard. step: the step at which the run resumes; later steps in the folder are
    discarded.

    texts: name → function that returns a text about the run, called when the text is written.
    """

    folder: Path
    step: int
    texts: dict[str, Callable[[], str]]
    name: str = "TensorBoard"
    seconds: float = 10.0
    local: bool = True
    _file: Any = None
    _events: Any = None
    _summaries: Any = None
    _tensors: Any = None
    _shapes: Any = None
    _string: Any = None
    _flushed: float = 0.0

    def begin(self) -> None:
        proto = "tensorboard.compat.proto"
        self._events, self._summaries = import_module(f"{proto}.event_pb2"), import_module(f"{proto}.summary_pb2")
        self._tensors, self._shapes = import_module(f"{proto}.tensor_pb2"), import_module(f"{proto}.tensor_shape_pb2")
        self._string = import_module(f"{proto}.types_pb2").DT_STRING
        files = import_module("tensorboard.summary.writer.event_file_writer")
        self._file = files.EventFileWriter(str(self.folder))
        self._undo_after(self.step)
        now = time.time()
        self._write(now, self.step, [self._text(tag, _as_code(make())) for tag, make in self.texts.items()])

    def metric(self, record: StepMetrics) -> None:
        values = []
        for key, value in as_object(record).items():
            if key in ("step", "time"):
                continue
            if isinstance(value, int | float):
                values.append(self._summaries.Summary.Value(tag=key, simple_value=value))
            elif isinstance(value, list) and value:
                values.append(self._bars(key, value))
        self._write(record.time or 0.0, record.step or 0, values)

    def event(self, record: Event) -> None:
        if isinstance(record, RollbackEvent):
            self._undo_after(record.step or 0)
        elif isinstance(record, GenerateEvent):
            samples = enumerate(record.samples, start=1)
            texts = [self._text(f"generate/{n}", _as_code(each.prompt + each.text)) for n, each in samples]
            self._write(record.time or 0.0, record.step or 0, texts)

    def rest(self, *, must: bool) -> None:
        now = time.monotonic()
        if must or now - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def end(self, exit_code: int) -> None:
        self._file.close()

    def _write(self, at: float, step: int, values: list[Any]) -> None:
        summary = self._summaries.Summary(value=values)
        self._file.add_event(self._events.Event(wall_time=at, step=step, summary=summary))

    def _undo_after(self, step: int) -> None:
        """Make readers discard data of later steps."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._file.add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def _bars(self, tag: str, heights: list[float]) -> Any:
        """Return a histogram with a bar of the element's height for each element of a list, for example per expert."""
        number = len(heights)
        places = [place + 0.5 for place in range(number)]
        histogram = self._summaries.HistogramProto(
            min=0,
            max=number,
            num=sum(heights),
            sum=sum(height * place for height, place in zip(heights, places, strict=True)),
            sum_squares=sum(height * place**2 for height, place in zip(heights, places, strict=True)),
            bucket_limit=range(1, number + 1),
            bucket=heights,
        )
        return self._summaries.Summary.Value(tag=tag, histo=histogram)

    def _text(self, tag: str, markdown: str) -> Any:

        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        shape = self._shapes.TensorShapeProto(dim=[self._shapes.TensorShapeProto.Dim(size=1)])
        content = [markdown.encode(errors="replace")]
        tensor = self._tensors.TensorProto(dtype=self._string, string_val=content, tensor_shape=shape)
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        return self._summaries.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)


def _as_code(text: str) -> str:
    """Return a text as an indented markdown code block, which no character in the text can end."""
    return "\n".join(f"    {line}" for line in text.splitlines())
