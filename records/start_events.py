"""Events of a start of a run, up to its first step."""

from typing import Annotated

from msgspec import Struct, field

from xtrain.records.event import Event
from xtrain.records.record import doc


class RunStartEvent(Event, tag="run_start"):
    """an attempt begins"""

    run_id: Annotated[str, doc("name of the run directory")]
    plan_id: Annotated[str, doc("of the plan that is executed")]
    name: Annotated[str, doc("of the experiment")]
    world_size: Annotated[int | None, doc("of the run", "ranks")]
    device: Annotated[str, doc("`cpu` or `cuda`")]
    steps: Annotated[int | None, doc("of the run; null where data must be counted first", "steps")]
    attempt: Annotated[int | None, doc("which start of the run this is, from 1")]
    resumed_step: Annotated[int | None, doc("where it goes on; null: from the beginning", "steps")]
    directory: Annotated[str, doc("of the run")]
    rewards: Annotated[bool, doc("the model gives rewards, and no texts")] = False


class SetupBeginEvent(Event, tag="setup_begin"):
    """a set-up node begins"""

    node: Annotated[str, doc("id of the node")]


class SetupEvent(Event, tag="setup"):
    """a set-up node has ended"""

    node: Annotated[str, doc("id of the node")]
    seconds: Annotated[float | None, doc("it took", "s")]
    detail: Annotated[str, doc("what it does, in words")]


class DeviceEvent(Event, tag="device"):
    """rank 0 has initialized its device"""

    device: Annotated[str, doc("its name in torch")]
    threads: Annotated[int | None, doc("of torch", "threads")]
    matmul: Annotated[str, doc("the effective fp32 matmul precision")]
    torch: Annotated[str, doc("version")]


class DataEvent(Event, tag="data"):
    """all datasets have been prepared"""

    rows: Annotated[dict[str, int], doc("dataset → rows that it has for training: one epoch of that dataset", "rows")]
    steps: Annotated[int | None, doc("of the run, also where epochs were asked for", "steps")]
    epoch_rows: Annotated[float | None, doc("of an epoch of the run", "rows")]
    epoch_tokens: Annotated[float | None, doc("positions in them", "tokens")]
    epochs: Annotated[float | None, doc("the budget, if it is in them", "epochs")]


class HorizonTick(Struct, frozen=True):
    """A tick planned in epochs or shares of the run. nodes: the nodes it runs. steps or tokens: its period."""

    nodes: list[str] = []
    steps: int | None = None
    tokens: float | None = None


class HorizonStretch(Struct, frozen=True):
    """A stretch of equal steps: tokens of each, and of all steps before `first`."""

    first: int = 0
    tokens: int = 0
    tokens_before: int = 0


class HorizonEvent(Event, tag="horizon"):
    """lengths in epochs, and after a resume with another batch lengths in tokens, as steps; `step` is where the run
    continues"""

    epoch_rows: Annotated[float | None, doc("of an epoch of the run", "rows")]
    steps: Annotated[int | None, doc("of the run", "steps")]
    stop_at: Annotated[int | None, doc("where the run stops by plan, or null", "steps")]
    stop_after: Annotated[int | None, doc("how many steps behind its start it stops by plan, or null", "steps")]
    phases: Annotated[dict[str, int | None], doc("name → steps before the phase", "steps")]
    ticks: Annotated[
        list[HorizonTick],
        doc("those in epochs or shares of them, as in the plan: `nodes`, `steps` or `tokens`"),
    ]
    stretches: Annotated[
        list[HorizonStretch],
        doc("steps that are alike, where not all are: `first` index, `tokens` of each, `tokens_before` the first"),
    ]


class SetupDoneEvent(Event, tag="setup_done"):
    """the first step follows"""

    seconds: Annotated[float | None, doc("since `run_start`", "s")]
    memory_bytes: Annotated[int | None, doc("the peak of set-up on the first rank", "bytes")]


class SetAsideEvent(Event, tag="set_aside"):
    """the run starts from scratch, and an earlier run in its directory was moved aside; `step` is the step of the
    earlier run's latest checkpoint; written before `run_start`"""

    attempt: Annotated[str, doc("name of this start")]
    directory: Annotated[str, doc("where the earlier run lies now")]
    reason: Annotated[str, doc("in words")]
    command: Annotated[str, doc("resumes the earlier run; empty if that has no checkpoint")]


class ChangedEvent(Event, tag="changed"):
    """the run was resumed with other settings, code or versions; written before `run_start`"""

    attempt: Annotated[str, doc("name of this start")]
    verdict: Annotated[str, doc("`same`, `safe`, `resharded`; empty if the earlier plan cannot be read")]
    changes: Annotated[list[str], doc("a short list, in words")]


class ResumedEvent(Event, tag="resumed"):
    """a checkpoint was loaded; `step` is the step at which the run resumes"""

    path: Annotated[str, doc("of the checkpoint")]
    source: Annotated[str, doc("`run`: its own, `from`: the one named")]
    groups: Annotated[
        dict[str, str],
        doc("what became of each group of the state, see [checkpoints.md](checkpoints.md#what-a-full-state-is)"),
    ]


class PretrainedEvent(Event, tag="pretrained"):
    """weights of another run were loaded"""

    path: Annotated[str, doc("of the checkpoint")]
    of_step: Annotated[int | None, doc("that it was saved at", "steps")]
    weights: Annotated[str, doc("`trained` or `averaged`")]


class WeightsEvent(Event, tag="weights"):
    """weights of the model's folder: every ten seconds while they are read, and when all ranks have theirs"""

    path: Annotated[str, doc("of the folder, or name on the hub")]
    done: Annotated[int | None, doc("that the first rank has read so far", "bytes")]
    total: Annotated[int | None, doc("that the first rank reads", "bytes")]
    rank_bytes: Annotated[list[int], doc("that each rank has read; empty until all have", "bytes")] = field(
        default_factory=list
    )
    rank_seconds: Annotated[list[float], doc("that reading took each rank; empty until all have", "s")] = field(
        default_factory=list
    )


class TokeniseEvent(Event, tag="tokenise"):
    """every ten seconds during tokenization"""

    dataset: Annotated[str, doc("name")]
    message: Annotated[str, doc("in words")]
    stage: Annotated[str, doc("`files`, `tokens` or `waiting`")]
    done: Annotated[int | None, doc("of the input, so far", "bytes")]
    total: Annotated[int | None, doc("of the input, null if unknown", "bytes")]
    documents: Annotated[int | None, doc("so far", "documents")]
    tokens: Annotated[int | None, doc("so far", "tokens")]
    bad_records: Annotated[int | None, doc("left out so far", "records")]
    resumed: Annotated[int | None, doc("of the input that an earlier build had done", "bytes")] = field(name="kept")
    builder: Annotated[str, doc("process that builds, while this one waits")]


class ReferenceEvent(Event, tag="reference"):
    """log-probabilities of a reference model for a dataset: every ten seconds while they are computed, and when all are
    there"""

    dataset: Annotated[str, doc("name")]
    reference: Annotated[str, doc("`initial`, `adapter_off`, or the folder of the model")]
    key: Annotated[str, doc("name of the entry in `cache/reference`")]
    computed: Annotated[bool | None, doc("true: by this start; false: they were in the cache")]
    done: Annotated[int | None, doc("so far", "rows")]
    rows: Annotated[int | None, doc("of the dataset that are trained on", "rows")]
    tokens: Annotated[int | None, doc("of the dataset, each of which has a number on disk", "tokens")]
    seconds: Annotated[float | None, doc("since the node has begun", "s")]


class EstimateEvent(Event, tag="estimate"):
    """once per attempt, as soon as two steps and 3 s of steps have been measured"""

    step_seconds: Annotated[float | None, doc("of a step", "s")]
    measured_steps: Annotated[int | None, doc("of which this is the mean, without the first step", "steps")]
    first_step_seconds: Annotated[float | None, doc("of the first step, which compiles", "s")]
    steps_left: Annotated[int | None, doc("of this attempt", "steps")]
    seconds_left: Annotated[float | None, doc("until this attempt ends, without evaluations and saves", "s")]


START_EVENTS: tuple[type[Event], ...] = (
    SetAsideEvent,
    ChangedEvent,
    RunStartEvent,
    SetupBeginEvent,
    SetupEvent,
    DeviceEvent,
    TokeniseEvent,
    DataEvent,
    HorizonEvent,
    ResumedEvent,
    WeightsEvent,
    PretrainedEvent,
    ReferenceEvent,
    SetupDoneEvent,
    EstimateEvent,
)
