"""The lines of `metrics.jsonl`, one for each logged step, and those of `ranks/*.jsonl`."""

from typing import Annotated, Final

from xtrain.records.lines import Record, doc


class StepMetrics(Record):
    """`metrics.jsonl`: a step over all ranks. `rest` has the keys with names of datasets and layers (FREE_NAMES) and
    measurements of user hooks. Averages are over the steps since the last record."""

    loss: Annotated[
        float | None,
        doc(
            "cross-entropy of this step: sum over its valid tokens on all ranks, divided once by their number; "
            "without z-loss and label smoothing",
            "nats a token",
        ),
    ] = None
    objective: Annotated[
        float | None,
        doc(
            "minimized loss of this step, if it is not the cross-entropy: mean of `loss` of the spec with its z-loss "
            "over the valid tokens, sequences or pairs; without the losses of routers",
            "nats a token",
        ),
    ] = None
    reward: Annotated[float | None, doc("mean reward of the completions sampled in this step; only with rollouts")] = (
        None
    )
    grad_norm: Annotated[
        float | None, doc("norm of the gradients of the whole model in this step, before clipping")
    ] = None
    lr: Annotated[float | None, doc("learning rate of this step")] = None
    tokens: Annotated[
        int | None,
        doc("positions since the start of the run, including padding: steps · rows · sequence", "tokens"),
    ] = None
    epoch: Annotated[
        float | None,
        doc(
            "epochs of data since the start of the run, as `1.5`: rows taken divided by the rows of an epoch",
            "epochs",
        ),
    ] = None
    tokens_per_second: Annotated[
        float | None, doc("positions per second over all ranks, since the last record", "tokens/s")
    ] = None
    step_seconds: Annotated[
        float | None, doc("time of a step, averaged since the last record, on the slowest rank", "s")
    ] = None
    data_seconds: Annotated[
        float | None, doc("part of `step_seconds` spent reading rows, on the rank with the largest", "s")
    ] = None
    memory_bytes: Annotated[
        int | None,
        doc(
            "peak memory of the rank with the highest peak: on a GPU the memory of tensors since the end of set-up, "
            "on a CPU the resident memory since the start of the process",
            "bytes",
        ),
    ] = None
    gpu_utilization: Annotated[
        float | None,
        doc(
            "share of the last second in which the GPU ran a kernel, on the rank with the least ([below](#gpus)); this "
            "and the next two only with the extra `nvml`",
            "share, 0 to 1",
        ),
    ] = None
    gpu_temperature: Annotated[float | None, doc("temperature of the hottest GPU", "°C")] = None
    gpu_power: Annotated[float | None, doc("power of the GPU that takes most", "W")] = None
    phase: Annotated[str, doc("name of the phase of this step; `train` before the first declared phase")] = ""
    valid_tokens: Annotated[
        int | None,
        doc("tokens that count for the loss, on all ranks, in the steps since the last record", "tokens"),
    ] = None
    valid_tokens_per_second: Annotated[float | None, doc("the same over the time of these steps", "tokens/s")] = None
    tflops: Annotated[
        float | None,
        doc("model FLOP/s per device since the last record: the numerator of `mfu` ([below](#how-fast))", "TFLOP/s"),
    ] = None
    mfu: Annotated[
        float | None,
        doc(
            "model FLOPs utilization ([below](#how-fast)); this and the next two only if the peak FLOP/s of every "
            "device is known",
            "share, 0 to 1",
        ),
    ] = None
    mfu_causal: Annotated[
        float | None, doc("the same, with attention counted under the causal mask", "share, 0 to 1")
    ] = None
    hfu: Annotated[float | None, doc("the same, with padding and recomputed work", "share, 0 to 1")] = None
    comm_seconds: Annotated[
        float | None,
        doc(
            "part of `step_seconds` spent waiting for communication, averaged since the last record, on the rank with "
            "the largest ([below](#waiting-for-others)); not on GPUs with more than one rank",
            "s",
        ),
    ] = None
    replicas: Annotated[
        list[int] | None,
        doc(
            "replica groups that took part in this step, if there are several ([stacks.md](stacks.md#what-is-learned))"
        ),
    ] = None
    replica_rows: Annotated[
        int | None,
        doc(
            "rows of the groups that took part, in the steps since the last record; only if there are several groups",
            "rows",
        ),
    ] = None
    dropped: Annotated[
        int | None,
        doc(
            "number of missing records of this file since this start, because the disk was too slow "
            "([logging.md](logging.md#no-step-waits)); only if there are any",
            "records",
        ),
    ] = None


# Keys of `rest` → their meaning; actions declare the keys that they add.
FREE_NAMES: Final = {
    "loss/NAME": doc(
        "cross-entropy of the rows of dataset NAME, from the same logits as `loss`: sum over their valid tokens on "
        "all ranks since the last record, divided by their number; only with several training datasets, and only if "
        "there was a valid token",
        "nats a token",
    ),
    "valid_tokens/NAME": doc(
        "number of tokens in the mean `loss/NAME`; for a reward model, of sequences or pairs",
        "tokens",
    ),
    "rows/NAME": doc(
        "rows of dataset NAME since the start of the run; only with several training datasets",
        "rows",
    ),
    "grad_norm/NAME": doc(
        "norm of the gradients of task NAME in this step, of the loss over its own valid tokens, before clipping; "
        "only with tasks, and only if it was updated in this step"
    ),
    "mtp/NUMBER": doc(
        "cross-entropy of module NUMBER, which predicts the token this many after the next one: sum over its labels "
        "on all ranks, divided by the valid tokens of the step; only with `mtp` of the model",
        "nats a token",
    ),
    "moe/aux_loss": doc(
        "load-balancing loss of the routers before its weight, mean over rows, layers with experts and the steps since "
        "the last record; 1 when balanced; only with experts"
    ),
    "moe/load/LAYER": doc(
        "share of real tokens of each expert of that layer since the last record, with a sum of 1; only for layers "
        "with experts",
        "shares",
    ),
    "indexer/loss": doc(
        "loss of the indexers of sparse attention before its weight, mean over rows, blocks with a learning indexer "
        "and the steps since the last record; 0 where an indexer gives the distribution of attention; only with "
        "`index_loss`",
        "nats a position",
    ),
    "step/NAME/KEY": doc("value that your own step function returned under KEY, on the first rank"),
    "hook/NAME/KEY": doc("value that your own hook NAME returned under KEY in this step, on the first rank"),
}


class RankMetrics(Record):
    """`ranks/*.jsonl`: the same step on one rank."""

    step_seconds: Annotated[float | None, doc("time of a step, averaged since the last record, on this rank", "s")] = (
        None
    )
    data_seconds: Annotated[float | None, doc("part of `step_seconds` that this rank spent reading rows", "s")] = None
    comm_seconds: Annotated[
        float | None,
        doc(
            "part of `step_seconds` that this rank spent waiting for communication; absent in the same cases as above",
            "s",
        ),
    ] = None
    memory_bytes: Annotated[int | None, doc("peak memory of this rank, as above", "bytes")] = None
    resident_bytes: Annotated[int | None, doc("on a CPU: resident memory at the time of the record", "bytes")] = None
    allocated_bytes: Annotated[int | None, doc("on a GPU: memory of tensors at the time of the record", "bytes")] = None
    reserved_bytes: Annotated[
        int | None, doc("on a GPU: memory reserved by torch at the time of the record", "bytes")
    ] = None
    retries: Annotated[
        int | None,
        doc(
            "on a GPU: allocation retries (the allocator had to free cached memory first) since the last record",
            "times",
        ),
    ] = None
    gpu_utilization: Annotated[
        float | None, doc("share of the last second in which this rank's GPU ran a kernel, as above", "share, 0 to 1")
    ] = None
    gpu_temperature: Annotated[float | None, doc("temperature of this rank's GPU", "°C")] = None
    gpu_power: Annotated[float | None, doc("power of this rank's GPU", "W")] = None
    node_seconds: Annotated[
        dict[str, float] | None, doc("node of the step → its time, averaged since the last record", "s")
    ] = None
    dropped: Annotated[int | None, doc("number of missing records of this file, as above", "records")] = None
