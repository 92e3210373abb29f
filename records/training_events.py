"""Events of a start, up to the first step, and of training: evaluations, checkpoints, skipped steps."""

from typing import Annotated, Any

from msgspec import Struct, field

from xtrain.records.lines import Event, doc, in_words


class SetAsideEvent(Event, tag="set_aside"):
    """the run starts from scratch, and an earlier run in its directory was moved aside; `step` is the step of the
    earlier run's latest checkpoint; written before `run_start`"""

    attempt: Annotated[str, doc("name of this start")]
    directory: Annotated[str, doc("new place of the earlier run")]
    reason: Annotated[str, in_words()]
    command: Annotated[str, doc("command that resumes the earlier run; empty if it has no checkpoint")]


class ChangedEvent(Event, tag="changed"):
    """the run was resumed with other settings, code or versions; written before `run_start`"""

    attempt: Annotated[str, doc("name of this start")]
    verdict: Annotated[str, doc("`same`, `safe`, `resharded`; empty if the earlier plan cannot be read")]
    changes: Annotated[list[str], in_words("short list of changes")]


class RunStartEvent(Event, tag="run_start"):
    """an attempt begins"""

    run_id: Annotated[str, doc("name of the run directory")]
    plan_id: Annotated[str, doc("id of the executed plan")]
    name: Annotated[str, doc("name of the experiment")]
    world_size: Annotated[int | None, doc("number of ranks", "ranks")]
    device: Annotated[str, doc("`cpu` or `cuda`")]
    steps: Annotated[int | None, doc("length of the run; null if the data must be counted first", "steps")]
    attempt: Annotated[int | None, doc("number of this start of the run, from 1")]
    resumed_step: Annotated[int | None, doc("step from which the run resumes; null: from scratch", "steps")]
    directory: Annotated[str, doc("directory of the run")]
    rewards: Annotated[bool, doc("true for a reward model, which generates no texts")] = False


class SetupBeginEvent(Event, tag="setup_begin"):
    """a set-up node begins"""

    node: Annotated[str, doc("id of the node")]


class SetupEvent(Event, tag="setup"):
    """a set-up node has ended"""

    node: Annotated[str, doc("id of the node")]
    seconds: Annotated[float | None, doc("duration", "s")]
    detail: Annotated[str, in_words("description of the node")]


class DeviceEvent(Event, tag="device"):
    """rank 0 has initialized its device"""

    device: Annotated[str, doc("name in torch")]
    threads: Annotated[int | None, doc("CPU threads of torch", "threads")]
    matmul: Annotated[str, doc("effective fp32 matmul precision")]
    torch: Annotated[str, doc("version")]


class TokeniseEvent(Event, tag="tokenise"):
    """every ten seconds during tokenization"""

    dataset: Annotated[str, doc("name")]
    message: Annotated[str, in_words()]
    stage: Annotated[str, doc("`files`, `tokens` or `waiting`")]
    done: Annotated[int | None, doc("processed input so far", "bytes")]
    total: Annotated[int | None, doc("total input, null if unknown", "bytes")]
    documents: Annotated[int | None, doc("documents so far", "documents")]
    tokens: Annotated[int | None, doc("tokens so far", "tokens")]
    bad_records: Annotated[int | None, doc("skipped records so far", "records")]
    resumed: Annotated[int | None, doc("input processed by an earlier build", "bytes")] = field(name="kept")
    builder: Annotated[str, doc("process that builds while this process waits")]


class DataEvent(Event, tag="data"):
    """all datasets have been prepared"""

    rows: Annotated[dict[str, int], doc("dataset → training rows: one epoch of that dataset", "rows")]
    steps: Annotated[int | None, doc("length of the run, also with a budget in epochs", "steps")]
    epoch_rows: Annotated[float | None, doc("rows of an epoch of the run", "rows")]
    epoch_tokens: Annotated[float | None, doc("positions of an epoch", "tokens")]
    epochs: Annotated[float | None, doc("budget, if given in epochs", "epochs")]


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

    epoch_rows: Annotated[float | None, doc("rows of an epoch of the run", "rows")]
    steps: Annotated[int | None, doc("length of the run", "steps")]
    stop_at: Annotated[int | None, doc("planned stop of the run, or null", "steps")]
    stop_after: Annotated[int | None, doc("planned stop, in steps after the start, or null", "steps")]
    phases: Annotated[dict[str, int | None], doc("name → steps before the phase", "steps")]
    ticks: Annotated[
        list[HorizonTick],
        doc("ticks in epochs or shares of epochs: `nodes` of the plan, and their period in `steps` or `tokens`"),
    ]
    stretches: Annotated[
        list[HorizonStretch],
        doc("stretches of equal steps, if steps differ: `first` index, `tokens` of each, `tokens_before` the first"),
    ]


class ResumedEvent(Event, tag="resumed"):
    """a checkpoint was loaded; `step` is the step at which the run resumes"""

    path: Annotated[str, doc("path of the checkpoint")]
    source: Annotated[str, doc("`run`: the run's own checkpoint, `from`: the named one")]
    groups: Annotated[
        dict[str, str],
        doc("treatment of each group of the state, see [checkpoints.md](checkpoints.md#what-a-full-state-is)"),
    ]


class WeightsEvent(Event, tag="weights"):
    """weights of the model's folder: every ten seconds while they are read, and when all ranks have theirs"""

    path: Annotated[str, doc("path of the folder, or name on the hub")]
    done: Annotated[int | None, doc("size read by the first rank so far", "bytes")]
    total: Annotated[int | None, doc("size to read by the first rank", "bytes")]
    rank_bytes: Annotated[list[int], doc("size read by each rank; empty until all are done", "bytes")] = field(
        default_factory=list
    )
    rank_seconds: Annotated[list[float], doc("reading time of each rank; empty until all are done", "s")] = field(
        default_factory=list
    )


class PretrainedEvent(Event, tag="pretrained"):
    """weights of another run were loaded"""

    path: Annotated[str, doc("path of the checkpoint")]
    of_step: Annotated[int | None, doc("step at which it was saved", "steps")]
    weights: Annotated[str, doc("`trained` or `averaged`")]


class ReferenceEvent(Event, tag="reference"):
    """log-probabilities of a reference model for a dataset: every ten seconds while they are computed, and when all are
    there"""

    dataset: Annotated[str, doc("name")]
    reference: Annotated[str, doc("`initial`, `adapter_off`, or the folder of the model")]
    key: Annotated[str, doc("name of the entry in `cache/reference`")]
    computed: Annotated[bool | None, doc("true: computed by this start; false: from the cache")]
    done: Annotated[int | None, doc("rows so far", "rows")]
    rows: Annotated[int | None, doc("training rows of the dataset", "rows")]
    tokens: Annotated[int | None, doc("tokens of the dataset, each with a number on disk", "tokens")]
    seconds: Annotated[float | None, doc("time since the start of the node", "s")]


class SetupDoneEvent(Event, tag="setup_done"):
    """the first step follows"""

    seconds: Annotated[float | None, doc("since `run_start`", "s")]
    memory_bytes: Annotated[int | None, doc("peak of set-up on the first rank", "bytes")]


class EstimateEvent(Event, tag="estimate"):
    """once per attempt, as soon as two steps and 3 s of steps have been measured"""

    step_seconds: Annotated[float | None, doc("mean time of a step", "s")]
    measured_steps: Annotated[int | None, doc("number of measured steps, without the first", "steps")]
    first_step_seconds: Annotated[float | None, doc("time of the first step, which compiles", "s")]
    steps_left: Annotated[int | None, doc("remaining steps of this attempt", "steps")]
    seconds_left: Annotated[float | None, doc("time until the end of this attempt, without evaluations and saves", "s")]


class PhaseEvent(Event, tag="phase"):
    """a phase begins with the next step, or a run is resumed in a phase; only with several phases"""

    name: Annotated[str, doc("name of the phase")]
    shares: Annotated[dict[str, float], doc("dataset → share of the rows in the phase", "shares, 0 to 1")]
    lr_scale: Annotated[float | None, doc("factor on the learning rate")]
    epoch: Annotated[
        float | None, doc("epochs of data since the start of the run, null if they are not counted", "epochs")
    ]


class EvalEvent(Event, tag="eval"):
    """an evaluation has ended"""

    node: Annotated[str, doc("id of the node")]
    dataset: Annotated[str, doc("name")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    loss: Annotated[
        float | None,
        doc("mean over the valid tokens of the held-out part; for questions over the correct choices", "nats a token"),
    ]
    tokens: Annotated[int | None, doc("valid tokens", "tokens")]
    batches: Annotated[int | None, doc("batches of one rank", "batches")]
    seconds: Annotated[float | None, doc("duration", "s")]
    bits_per_byte: Annotated[
        float | None, doc("cross-entropy per byte of text, if the bytes of each token are known", "bits a byte")
    ] = None
    bytes: Annotated[int | None, doc("bytes of the text of these tokens", "bytes")] = None
    objective: Annotated[float | None, doc("minimized loss, if it is not the cross-entropy")] = None
    metrics: Annotated[dict[str, float] | None, doc("metrics of the loss, by name")] = None
    reward: Annotated[float | None, doc("mean over completions of held-out prompts, with `answers`")] = None
    questions: Annotated[int | None, doc("number of questions, for a dataset with choices", "questions")] = None
    acc: Annotated[float | None, doc("share of questions with the correct choice most probable", "share, 0 to 1")] = (
        None
    )
    acc_norm: Annotated[
        float | None, doc("the same with log-likelihoods per character of a choice", "share, 0 to 1")
    ] = None
    acc_bytes: Annotated[float | None, doc("the same with log-likelihoods per byte of a choice", "share, 0 to 1")] = (
        None
    )


class GeneratedText(Struct, frozen=True):
    """A continued text. text: the prompt and the generated continuation."""

    prompt: str = ""
    text: str = ""


class GenerateEvent(Event, tag="generate"):
    """prompts were continued"""

    node: Annotated[str, doc("id of the node")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    samples: Annotated[list[GeneratedText], doc("texts, each with `prompt` and `text`")]
    seconds: Annotated[float | None, doc("duration", "s")]


class CheckpointEvent(Event, tag="checkpoint"):
    """a checkpoint is complete and `latest` names it"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("path of the checkpoint")]
    bytes: Annotated[int | None, doc("size of all its files", "bytes")]
    seconds: Annotated[float | None, doc("time until it was complete on disk", "s")]
    epoch: Annotated[float | None, doc("epochs of data since the start of the run, if they are counted", "epochs")] = (
        None
    )
    blocked_seconds: Annotated[float | None, doc("time that training waited for an asynchronous save", "s")] = None
    best: Annotated[dict[str, float] | None, doc("metric → value, if it is the best so far")] = None


class BestEvent(Event, tag="best"):
    """a checkpoint that was saved before it was measured in the same step is the best so far"""

    path: Annotated[str, doc("path of the checkpoint")]
    best: Annotated[dict[str, float], doc("metric → value")]


class PrunedEvent(Event, tag="pruned"):
    """a resumed run has removed checkpoints of earlier attempts beyond `checkpoint.keep`"""

    checkpoints: Annotated[list[str], doc("names of the removed checkpoints")]


class ModelEvent(Event, tag="model"):
    """the weights alone are saved and `model` names them"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("path of the weights")]
    bytes: Annotated[int | None, doc("size of all files", "bytes")]
    seconds: Annotated[float | None, doc("time until they were complete on disk", "s")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    ema: Annotated[dict[str, Any] | None, doc("settings and `updates` of averaged weights")] = None


class ExportEvent(Event, tag="export"):
    """the model is exported ([weights.md](weights.md#export)); an export that fails is a warning"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("path of the folder")]
    weights: Annotated[str, doc("`trained` or `averaged`")]
    formats: Annotated[dict[str, int], doc("number format → size of the weights written in it", "bytes")]
    bytes: Annotated[int | None, doc("size of all weights", "bytes")]
    seconds: Annotated[float | None, doc("duration", "s")]


class HealthEvent(Event, tag="health"):
    """a probe of all ranks has ended ([health.md](health.md#the-probe))"""

    node: Annotated[str, doc("id of the node")]
    seconds: Annotated[float | None, doc("time of an all-reduce over all ranks", "s")]
    slowest: Annotated[int | None, doc("rank that joined last")]
    late_seconds: Annotated[float | None, doc("time that the first rank waited for it", "s")]


class LrSweepEvent(Event, tag="lr_sweep"):
    """a search for a learning rate has ended ([optimizers.md](optimizers.md#finding-a-learning-rate))"""

    points: Annotated[int | None, doc("steps with a finite loss", "steps")]
    steepest: Annotated[float | None, doc("rate of the steepest descent of the loss, null if the loss never falls")]
    minimum_tenth: Annotated[
        float | None, doc("a tenth of the rate with the lowest loss, null if the loss never falls")
    ]
    diverged: Annotated[bool, doc("true if the run was stopped because the loss diverged")] = False


class RowLossesEvent(Event, tag="row_losses"):
    """losses of the rows of a step, with `row_losses` ([replay.md](replay.md#documents-that-cause-a-spike))"""

    place: Annotated[int | None, doc("rows of the run before the first one", "rows")]
    losses: Annotated[list[float | None], doc("sum of the cross-entropy of each row, null if it is not finite", "nats")]
    tokens: Annotated[list[int], doc("valid tokens of each row", "tokens")]


class DigestsEvent(Event, tag="digests"):
    """digests of the state after a step, with `digests` ([replay.md](replay.md#where-two-runs-part))"""

    parameters: Annotated[dict[str, str], doc("digest of each parameter")]
    gradients: Annotated[
        dict[str, str], doc("digest of each gradient as the optimizer took it; empty before the first step of a start")
    ]


class ProfileEvent(Event, tag="profile"):
    """a profile is complete ([profiling.md](profiling.md))"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("folder of the profile")]
    first: Annotated[int | None, doc("first recorded step", "steps")]
    last: Annotated[int | None, doc("last recorded step", "steps")]
    ranks: Annotated[int | None, doc("number of ranks that wrote one", "ranks")]
    seconds: Annotated[float | None, doc("time of writing", "s")]
    bytes: Annotated[int | None, doc("size of all files", "bytes")]
    note: Annotated[str, in_words("reason for missing steps, empty if there are none")]


class MemorySnapshotEvent(Event, tag="memory_snapshot"):
    """a memory snapshot is complete ([profiling.md](profiling.md#a-memory-snapshot))"""

    node: Annotated[str, doc("id of the node")]
    path: Annotated[str, doc("folder of the snapshot")]
    ranks: Annotated[int | None, doc("number of ranks that wrote one", "ranks")]
    seconds: Annotated[float | None, doc("time of taking and writing it", "s")]
    bytes: Annotated[int | None, doc("size of all files", "bytes")]
    note: Annotated[str, in_words("sentence about the moment of the snapshot, may be empty")]
    tensors: Annotated[dict[str, Any] | None, doc("memory of tensors on rank 0, by category", "bytes")] = field(
        name="held"
    )
    allocator: Annotated[dict[str, Any] | None, doc("figures of the allocator of rank 0, null on a CPU", "bytes")]
    process: Annotated[dict[str, Any] | None, doc("figures of the process of rank 0", "bytes")]
    planned: Annotated[dict[str, Any] | None, doc("plan of rank 0, by category", "bytes")]


class SkippedEvent(Event, tag="skipped"):
    """a step was skipped: no rank had a valid token, or its loss or norm was NaN or infinite; the step counts
    ([nonfinite.md](nonfinite.md#steps-without-a-token-to-learn-from))"""

    reason: Annotated[str, in_words()]
    loss: Annotated[float | None, doc("loss of a non-finite step", "nats a token")] = None
    grad_norm: Annotated[float | None, doc("gradient norm of a non-finite step")] = None
    in_a_row: Annotated[int | None, doc("consecutive non-finite steps, including this one", "steps")] = None
    limit: Annotated[int | None, doc("maximum number of consecutive non-finite steps", "steps")] = None


class NonFiniteEvent(Event, tag="nonfinite"):
    """loss or norm was NaN or infinite in as many steps in a row as `on nan` allows; the weights were not changed"""

    loss: Annotated[float | None, doc("loss of the step", "nats a token")]
    grad_norm: Annotated[float | None, doc("gradient norm of the step, before clipping")]


class RollbackEvent(Event, tag="rollback"):
    """the run was rolled back to `step`, the step of the checkpoint"""

    from_step: Annotated[int | None, doc("last step before the rollback", "steps")]
    checkpoint: Annotated[str, doc("name of the checkpoint")]
    number: Annotated[int | None, doc("number of rollbacks of the run, including this one", "times")]
    of: Annotated[int | None, doc("maximum number of rollbacks", "times")]
    rows_left_out: Annotated[int | None, doc("rows that the run skips", "rows")]
    seconds: Annotated[float | None, doc("duration", "s")]
