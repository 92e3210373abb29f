"""`Spec`: what a user declared, typed, with defaults filled in and the place each value came from."""

from typing import Literal

from attrs import field, frozen

from .schema.actions import Event, Tick
from .schema.data import DEFAULT_CHAIN, Batch, Dataset, Link
from .schema.experiment import Experiment, Launch, Workspace
from .schema.model import Model, Precision, Tokenizer
from .schema.parallel import Parallel
from .schema.training import Checkpoint, Loss, Optimizer, Scheduler
from .source import Span


@frozen
class Origin:
    """Where a value came from: `text` of a spec, a `let` or `param` it refers to, `--set`, or the schema's default."""

    kind: Literal["text", "let", "param", "set", "default"]
    span: Span | None = None


@frozen(kw_only=True)
class Spec:
    """A whole experiment. `origins` maps a dotted path (`optimizer.lr`, `dataset.web.source`) to its origin."""

    path: str
    experiment: Experiment
    model: Model
    tokenizer: Tokenizer
    datasets: dict[str, Dataset]
    batch: Batch
    optimizer: Optimizer
    scheduler: Scheduler = Scheduler(kind="constant")
    loss: Loss = Loss(kind="cross_entropy")
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    workspace: Workspace = Workspace()
    launch: Launch = Launch()
    collate: tuple[Link, ...] = DEFAULT_CHAIN
    ticks: tuple[Tick, ...] = ()
    events: tuple[Event, ...] = ()
    origins: dict[str, Origin] = field(factory=dict, eq=False)
