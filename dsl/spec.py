"""`Spec`: the declaration of a user, typed, with defaults filled in and the origin of each value."""

from typing import Literal

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Note, Span
from xtrain.dsl.evaluation.values import Value
from xtrain.dsl.schema.actions import Action, OnEvent, Tick
from xtrain.dsl.schema.adapters import Adapter, AdapterTask
from xtrain.dsl.schema.cluster import CLUSTERS, Cluster, FaultTolerance, Launcher, Serve
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data import Batch, Dataset, Mixture, Phase
from xtrain.dsl.schema.data_components import Link, Tokenizer, usual_chain
from xtrain.dsl.schema.losses import LOSSES, Loss
from xtrain.dsl.schema.model import Model
from xtrain.dsl.schema.optimizers import SCHEDULERS, Ema, Optimizer, ParameterGroup, Parametrization, Scheduler
from xtrain.dsl.schema.parallel import Activation, Compile, Parallel
from xtrain.dsl.schema.policy import Environment, Reward, Rollout, SamplingEngine
from xtrain.dsl.schema.precision import Precision
from xtrain.dsl.schema.run import (
    Alerts,
    Checkpoint,
    EvaluationBody,
    Experiment,
    Hook,
    Launch,
    Log,
    OwnEpoch,
    OwnTraining,
    Policy,
    StepBody,
    Workspace,
)
from xtrain.dsl.schema.sweep import Sweep
from xtrain.lazy_attrs import frozen


@frozen
class Origin:
    """Origin of a value: `text` of a spec, a `let` or `param` it refers to, `--set`, the `config.json` of the model's
    folder, or the schema's default.

    span: the value, or the head of a block. notes: places of the names it came through, for diagnostics.
    """

    kind: Literal["text", "let", "param", "set", "config", "default"]
    span: Span | None = None
    notes: tuple[Note, ...] = ()

    @classmethod
    def of(cls, value: Value) -> "Origin":
        """Return the origin of a value: the nearest name it came through."""
        if value.span.source.path == "--set":
            return cls("set", value.span, value.notes)
        for step in value.via:
            if step.kind in ("let", "param", "set", "config"):
                return cls(step.kind, value.span, value.notes)  # type: ignore[arg-type]
        return cls("text", value.span, value.notes)


@frozen(kw_only=True)
class Spec:
    """A whole experiment.

    `origins` maps a dotted path to its origin, for every setting, written or not: `optimizer.lr`, `parallel.tp.size`,
    `dataset.web.source`, `every.0.every`, `on.1.actions.0.dataset`; and for every block: `optimizer`, `dataset.web`,
    `every.0`, `on.1`. A weight has two: `mixture.web`, `phase.anneal.mix.web` for the number, and the same with `.name`
    appended for the name. Two specs are equal if they declare the same, wherever it was written.
    """

    path: str = field(eq=False)
    experiment: Experiment
    model: Model
    tokenizer: Tokenizer
    datasets: dict[str, Dataset]
    mixture: Mixture = Mixture()
    phases: dict[str, Phase] = field(factory=dict)
    batch: Batch
    optimizer: Optimizer
    groups: dict[str, ParameterGroup] = field(factory=dict)
    parametrization: Parametrization | None = None
    scheduler: Scheduler = field(factory=lambda: SCHEDULERS.default())
    loss: Loss = field(factory=lambda: LOSSES.default())
    rollout: Rollout | None = None
    reward: Reward | None = None
    environments: dict[str, Environment] = field(factory=dict)
    engine: SamplingEngine | None = None
    adapter: Adapter | None = None
    tasks: dict[str, AdapterTask] = field(factory=dict)
    ema: Ema | None = None
    precision: Precision = Precision()
    parallel: Parallel = field(factory=lambda: Parallel.complete()())
    activation: Activation = Activation(mode="none")
    compile: Compile = Compile(mode="none")
    checkpoint: Checkpoint = Checkpoint()
    fault_tolerance: FaultTolerance = FaultTolerance()
    alerts: Alerts = Alerts()
    log: Log = field(factory=lambda: Log.complete()())
    workspace: Workspace = Workspace()
    launch: Launch = Launch()
    cluster: Cluster = field(factory=lambda: CLUSTERS.default())
    launcher: Launcher | None = None
    hooks: dict[str, Hook] = field(factory=dict)
    step: StepBody | None = None
    evaluation_step: EvaluationBody | None = None
    train: OwnTraining | None = None
    epoch: OwnEpoch | None = None
    policy: Policy | None = None
    sweep: Sweep | None = None
    serve: Serve | None = None
    collate: tuple[Link, ...] = field(factory=usual_chain)
    ticks: tuple[Tick, ...] = ()
    events: tuple[OnEvent, ...] = ()
    origins: dict[str, Origin] = field(factory=dict, eq=False, repr=False)

    @property
    def is_adapted(self) -> bool:
        """True if adapters are trained (one, or one per task) over a frozen model."""
        return self.adapter is not None or bool(self.tasks)

    @property
    def actions(self) -> list[tuple[str, Action]]:
        """Path and action of all ticks and events."""
        return [
            (f"{kind}.{number}.actions.{place}", action)
            for kind, triggers in (("every", self.ticks), ("on", self.events))
            for number, trigger in enumerate(triggers)
            for place, action in enumerate(trigger.actions)
        ]

    @property
    def own_parts(self) -> list[tuple[str, UserComponent]]:
        """Path and block or call of each chosen user function, in the order in which they are needed."""
        named = (
            *((f"dataset.{name}.source", dataset.source) for name, dataset in self.datasets.items()),
            *(("collate", link) for link in self.collate),
            ("model.family", self.model),
            ("optimizer.kind", self.optimizer),
            *((f"group.{name}.optimizer.kind", group.optimizer) for name, group in self.groups.items()),
            *((f"task.{name}.optimizer.kind", task.optimizer) for name, task in self.tasks.items()),
            ("scheduler.kind", self.scheduler),
            ("loss.kind", self.loss),
            ("reward.kind", self.reward),
            *((f"environment.{name}", environment) for name, environment in self.environments.items()),
            *((f"hook.{name}", hook) for name, hook in self.hooks.items()),
            ("step.name", self.step),
            ("evaluation_step.name", self.evaluation_step),
            ("train.name", self.train),
            ("epoch.name", self.epoch),
            *self.actions,
            *((f"log.{tracker.kind}", tracker) for tracker in self.log.trackers()),
        )
        return [(path, part) for path, part in named if isinstance(part, UserComponent)]

    @property
    def environment(self) -> Environment | None:
        """The environment that rollouts have conversations with."""
        named = None if self.rollout is None else self.rollout.environment
        return None if named is None else self.environments.get(named)

    @property
    def used(self) -> list[str]:
        """Modules of user functions, each once, in the order in which they are needed."""
        return list(dict.fromkeys(part.module for _, part in self.own_parts))
