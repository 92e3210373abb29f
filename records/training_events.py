"""Events of a start, up to the first step, and of training: evaluations, checkpoints, skipped steps."""

from typing import Annotated, Any

from msgspec import Struct, field

from xtrain.records.lines import Event, doc, in_words


class SetAsideEvent(Event, tag="set_aside"):
    """the run starts from scratch, and an earlier run in its directory was moved aside; `step` is the step of the
    earlier run's latest checkpoint; written before `run_start`"""

    attempt: Annotated[str, doc("name of this start")]
    directory: Annotated[str, doc("where the earlier run lies now")]
    reason: Annotated[str, in_words()]
    command: Annotated[str, doc("resumes the earlier run; empty if that has no checkpoint")]


class ChangedEvent(Event, tag="changed"):
    """the run was resumed with other settings, code or versions; written before `run_start`"""

    attempt: Annotated[str, doc("name of this start")]
    verdict: Annotated[str, doc("`same`, `safe`, `resharded`; empty if the earlier plan cannot be read")]
    changes: Annotated[list[str], in_words("a short list, in words")]


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
    detail: Annotated[str, in_words("what it does, in words")]


class DeviceEvent(Event, tag="device"):
    """rank 0 has initialized its device"""

    device: Annotated[str, doc("its name in torch")]
    threads: Annotated[int | None, doc("of torch", "threads")]
    matmul: Annotated[str, doc("the effective fp32 matmul precision")]
    torch: Annotated[str, doc("version")]


class TokeniseEvent(Event, tag="tokenise"):
    """every ten seconds during tokenization"""

    dataset: Annotated[str, doc("name")]
    message: Annotated[str, in_words()]
    stage: Annotated[str, doc("`files`, `tokens` or `waiting`")]
    done: Annotated[int | None, doc("of the input, so far", "bytes")]
    total: Annotated[int | None, doc("of the input, null if unknown", "bytes")]
    documents: Annotated[int | None, doc("so far", "documents")]
    tokens: Annotated[int | None, doc("so far", "tokens")]
    bad_records: Annotated[int | None, doc("left out so far", "records")]
    resumed: Annotated[int | None, doc("of the input that an earlier build had done", "bytes")] = field(name="kept")
    builder: Annotated[str, doc("process that builds, while this one waits")]


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


class ResumedEvent(Event, tag="resumed"):
    """a checkpoint was loaded; `step` is the step at which the run resumes"""

    path: Annotated[str, doc("of the checkpoint")]
    source: Annotated[str, doc("`run`: its own, `from`: the one named")]
    groups: Annotated[
        dict[str, str],
        doc("what became of each group of the state, see [checkpoints.md](checkpoints.md#what-a-full-state-is)"),
    ]


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


class PretrainedEvent(Event, tag="pretrained"):
    """weights of another run were loaded"""

    path: Annotated[str, doc("of the checkpoint")]
    of_step: Annotated[int | None, doc("that it was saved at", "steps")]
    weights: Annotated[str, doc("`trained` or `averaged`")]


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


class SetupDoneEvent(Event, tag="setup_done"):
    """the first step follows"""

    seconds: Annotated[float | None, doc("since `run_start`", "s")]
    memory_bytes: Annotated[int | None, doc("the peak of set-up on the first rank", "bytes")]


class EstimateEvent(Event, tag="estimate"):
    """once per attempt, as soon as two steps and 3 s of steps have been measured"""

    step_seconds: Annotated[float | None, doc("of a step", "s")]
    measured_steps: Annotated[int | None, doc("of which this is the mean, without the first step", "steps")]
    first_step_seconds: Annotated[float | None, doc("of the first step, which compiles", "s")]
    steps_left: Annotated[int | None, doc("of this attempt", "steps")]
    seconds_left: Annotated[float | None, doc("until this attempt ends, without evaluations and saves", "s")]


class PhaseEvent(Event, tag="phase"):
    """a phase begins with the next step, or a run is resumed in a phase; only with several phases"""

    name: Annotated[str, doc("of the phase")]
    shares: Annotated[dict[str, float], doc("of rows, of each dataset of the phase", "shares, 0 to 1")]
    lr_scale: Annotated[float | None, doc("that the learning rate is multiplied with")]
    epoch: Annotated[
        float | None, doc("epochs of data since the beginning of the run, null if they are not counted", "epochs")
    ]


class EvalEvent(Event, tag="eval"):
    """an evaluation has ended"""

    node: Annotated[str, doc("id of the node")]
    dataset: Annotated[str, doc("name")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    loss: Annotated[
        float | None,
        doc("mean over the valid tokens of the held-out part; of questions over the right choices", "nats a token"),
    ]
    tokens: Annotated[int | None, doc("valid ones", "tokens")]
    batches: Annotated[int | None, doc("of one rank", "batches")]
    seconds: Annotated[float | None, doc("it took", "s")]
    bits_per_byte: Annotated[
        float | None, doc("of tokens that are text, if it is known how many bytes tokens stand for", "bits a byte")
    ] = None
    bytes: Annotated[int | None, doc("of the text of these tokens", "bytes")] = None
    objective: Annotated[float | None, doc("what is minimised, where that is not the cross-entropy")] = None
    metrics: Annotated[dict[str, float] | None, doc("of the loss, by name")] = None
    reward: Annotated[float | None, doc("mean over completions of held-out prompts, with `answers`")] = None
    questions: Annotated[int | None, doc("with choices, of a dataset of these", "questions")] = None
    acc: Annotated[float | None, doc("how many of them get the right choice as the likeliest", "share, 0 to 1")] = None
    acc_norm: Annotated[
        float | None, doc("the same with log-likelihoods for each character of a choice", "share, 0 to 1")
    ] = None
    acc_bytes: Annotated[
        float | None, doc("the same with log-likelihoods for each byte of a choice", "share, 0 to 1")
    ] = None


class GeneratedText(Struct, frozen=True):
    """A continued text. text: the prompt and the generated continuation."""

    prompt: str = ""
    text: str = ""


class GenerateEvent(Event, tag="generate"):
    """prompts were continued"""

    node: Annotated[str, doc("id of the node")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    samples: Annotated[list[GeneratedText], doc("each with `prompt` and `text`")]
    seconds: Annotated[float | None, doc("it took", "s")]


class CheckpointEvent(Event, tag="checkpoint"):
    """a checkpoint is complete and `latest` names it"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("of the checkpoint")]
    bytes: Annotated[int | None, doc("of all its files", "bytes")]
    seconds: Annotated[float | None, doc("until it was complete on disk", "s")]
    epoch: Annotated[
        float | None, doc("epochs of data since the beginning of the run, if they are counted", "epochs")
    ] = None
    blocked_seconds: Annotated[float | None, doc("for which training waited, of an asynchronous save", "s")] = None
    best: Annotated[dict[str, float] | None, doc("metric → value, if it is the best so far")] = None


class BestEvent(Event, tag="best"):
    """a checkpoint that was saved before it was measured in the same step is the best so far"""

    path: Annotated[str, doc("of the checkpoint")]
    best: Annotated[dict[str, float], doc("metric → value")]


class PrunedEvent(Event, tag="pruned"):
    """a resumed run has removed checkpoints of earlier attempts beyond `checkpoint.keep`"""

    checkpoints: Annotated[list[str], doc("names of those that were removed")]


class ModelEvent(Event, tag="model"):
    """the weights alone are saved and `model` names them"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("of the weights")]
    bytes: Annotated[int | None, doc("of all files", "bytes")]
    seconds: Annotated[float | None, doc("until they were complete on disk", "s")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    ema: Annotated[dict[str, Any] | None, doc("for averages: settings and `updates`")] = None


class ExportEvent(Event, tag="export"):
    """the model is exported ([weights.md](weights.md#export)); an export that fails is a warning"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("of the folder")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    formats: Annotated[dict[str, int], doc("number format → weights that are written in it", "bytes")]
    bytes: Annotated[int | None, doc("of all weights", "bytes")]
    seconds: Annotated[float | None, doc("it took", "s")]


class HealthEvent(Event, tag="health"):
    """a probe of all ranks has ended ([health.md](health.md#the-probe))"""

    node: Annotated[str, doc("id of the node")]
    seconds: Annotated[float | None, doc("of an all-reduce over all ranks", "s")]
    slowest: Annotated[int | None, doc("the rank that came last")]
    late_seconds: Annotated[float | None, doc("how long the first rank waited for it", "s")]


class LrSweepEvent(Event, tag="lr_sweep"):
    """a search for a learning rate has ended ([optimizers.md](optimizers.md#finding-a-learning-rate))"""

    points: Annotated[int | None, doc("with a finite loss", "steps")]
    steepest: Annotated[float | None, doc("the rate at which the loss falls fastest, null if it nowhere does")]
    minimum_tenth: Annotated[float | None, doc("a tenth of the rate with the least loss, null if it nowhere falls")]
    diverged: Annotated[bool, doc("the run was stopped because the loss diverged")] = False


class ProfileEvent(Event, tag="profile"):
    """a profile is complete ([profiling.md](profiling.md))"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("its folder")]
    first: Annotated[int | None, doc("the first one that was recorded", "steps")]
    last: Annotated[int | None, doc("the last one", "steps")]
    ranks: Annotated[int | None, doc("how many have written", "ranks")]
    seconds: Annotated[float | None, doc("of writing", "s")]
    bytes: Annotated[int | None, doc("of all files", "bytes")]
    note: Annotated[str, in_words("why it has fewer steps, empty if it has all")]


class MemorySnapshotEvent(Event, tag="memory_snapshot"):
    """a memory snapshot is complete ([profiling.md](profiling.md#a-memory-snapshot))"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("its folder")]
    ranks: Annotated[int | None, doc("how many have written", "ranks")]
    seconds: Annotated[float | None, doc("of taking and writing it", "s")]
    bytes: Annotated[int | None, doc("of all files", "bytes")]
    note: Annotated[str, in_words("a sentence about when it was taken, may be empty")]
    tensors: Annotated[dict[str, Any] | None, doc("memory of tensors on rank 0, by category", "bytes")] = field(
        name="held"
    )
    allocator: Annotated[dict[str, Any] | None, doc("of rank 0, null on a CPU", "bytes")]
    process: Annotated[dict[str, Any] | None, doc("of the process of rank 0", "bytes")]
    planned: Annotated[dict[str, Any] | None, doc("for rank 0, by category", "bytes")]


class SkippedEvent(Event, tag="skipped"):
    """a step was skipped: no rank had a valid token, or its loss or norm was NaN or infinite; the step counts
    ([nonfinite.md](nonfinite.md#steps-without-a-token-to-learn-from))"""

    reason: Annotated[str, in_words()]
    loss: Annotated[float | None, doc("of a non-finite step", "nats a token")] = None
    grad_norm: Annotated[float | None, doc("the same")] = None
    in_a_row: Annotated[int | None, doc("non-finite steps in a row, with this one", "steps")] = None
    limit: Annotated[int | None, doc("how many there may be", "steps")] = None


class NonFiniteEvent(Event, tag="nonfinite"):
    """loss or norm was NaN or infinite in as many steps in a row as `on nan` allows; the weights were not changed"""

    loss: Annotated[float | None, doc("of the step", "nats a token")]
    grad_norm: Annotated[float | None, doc("of the step, before clipping")]


class RollbackEvent(Event, tag="rollback"):
    """the run was rolled back to `step`, the step of the checkpoint"""

    from_step: Annotated[int | None, doc("that had ended", "steps")]
    checkpoint: Annotated[str, doc("its name")]
    number: Annotated[int | None, doc("how often the run has gone back, with this time", "times")]
    of: Annotated[int | None, doc("at most", "times")]
    rows_left_out: Annotated[int | None, doc("that the run will not see", "rows")]
    seconds: Annotated[float | None, doc("it took", "s")]
