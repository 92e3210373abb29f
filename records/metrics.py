"""The lines of `metrics.jsonl`, one for each logged step, and those of `ranks/*.jsonl`."""

from typing import Annotated, Final

from xtrain.records.lines import Record, doc


class StepMetrics(Record):
    """`metrics.jsonl`: a step over all ranks. `rest` has the keys with names of datasets and layers (FREE_NAMES) and
    measurements of user hooks. Averages are over the steps since the last record."""

    loss: Annotated[
        float | None,
        doc(
            "cross-entropy of this step: sum over its valid tokens on all ranks, divided once by their number; without "
            "z-loss and label smoothing, whatever is minimised",
            "nats a token",
        ),
    ] = None
    objective: Annotated[
        float | None,
        doc(
            "what this step minimised, where that is not the cross-entropy: the mean of `loss` of the spec with its "
            "z-loss over the valid tokens, or the sequences or pairs that it is of; without the losses of routers",
            "nats a token",
        ),
    ] = None
    reward: Annotated[
        float | None, doc("reward of a completion, mean over those that this step has sampled; only with rollouts")
    ] = None
    grad_norm: Annotated[
        float | None, doc("norm of the gradients of the whole model in this step, before clipping")
    ] = None
    lr: Annotated[float | None, doc("learning rate this step used")] = None
    tokens: Annotated[
        int | None,
        doc("positions seen since the beginning of the run, padding included: steps · rows · sequence", "tokens"),
    ] = None
    epoch: Annotated[
        float | None,
        doc(
            "epochs of data since the beginning of the run, as `1.5`: rows taken divided by the rows of an epoch",
            "epochs",
        ),
    ] = None
    tokens_per_second: Annotated[
        float | None, doc("positions a second over all ranks, since the last record", "tokens/s")
    ] = None
    step_seconds: Annotated[
        float | None, doc("time of a step, averaged since the last record, on the slowest rank", "s")
    ] = None
    data_seconds: Annotated[
        float | None, doc("part of it spent reading rows, on the rank where that is largest", "s")
    ] = None
    memory_bytes: Annotated[
        int | None,
        doc(
            "peak on the rank that holds most: on a GPU the most that tensors have taken since set-up was done, on a "
            "CPU the most that was resident since the process began",
            "bytes",
        ),
    ] = None
    phase: Annotated[str, doc("name of the phase of this step; `train` before the first declared phase")] = ""
    valid_tokens: Annotated[
        int | None,
        doc("tokens that count for the loss, on all ranks together, in the steps since the last record", "tokens"),
    ] = None
    valid_tokens_per_second: Annotated[float | None, doc("the same over the time of these steps", "tokens/s")] = None
    tflops: Annotated[
        float | None,
        doc("model FLOP/s per device since the last record: the numerator of `mfu` ([below](#how-fast))", "TFLOP/s"),
    ] = None
    mfu: Annotated[
        float | None,
        doc(
            "model FLOPs utilisation ([below](#how-fast)); this and the next two only if the peak FLOP/s of every "
            "device is known",
            "share, 0 to 1",
        ),
    ] = None
    mfu_causal: Annotated[
        float | None, doc("the same, with the attention that a causal mask leaves", "share, 0 to 1")
    ] = None
    hfu: Annotated[float | None, doc("the same, with padding and recomputed work", "share, 0 to 1")] = None
    comm_seconds: Annotated[
        float | None,
        doc(
            "part of `step_seconds` that a rank spent waiting for communication, averaged since the last record, on "
            "the rank where that is largest ([below](#waiting-for-others)); not on GPUs with more than one rank",
            "s",
        ),
    ] = None
    replicas: Annotated[
        list[int] | None,
        doc(
            "replica groups that took part in this step, where there are several "
            "([stacks.md](stacks.md#what-is-learned))"
        ),
    ] = None
    replica_rows: Annotated[
        int | None,
        doc(
            "rows of the groups that took part, in the steps since the last record; only where there are several",
            "rows",
        ),
    ] = None
    dropped: Annotated[
        int | None,
        doc(
            "how many records of this file are missing so far, since this start, because the disk did not keep up "
            "([logging.md](logging.md#no-step-waits)); only if there are any",
            "records",
        ),
    ] = None


# Keys of `rest` → their meaning; actions declare the keys that they add.
FREE_NAMES: Final = {
    "loss/NAME": doc(
        "cross-entropy of the rows of dataset NAME, from the same logits as `loss`: sum over their valid tokens on all "
        "ranks since the last record, divided by their number; only where several datasets are trained on, and only if "
        "there was such a token",
        "nats a token",
    ),
    "valid_tokens/NAME": doc(
        "how many tokens `loss/NAME` is the mean of; of a model that gives rewards how many sequences or pairs",
        "tokens",
    ),
    "rows/NAME": doc(
        "rows of dataset NAME that the run has taken since its beginning; only where several datasets are trained on",
        "rows",
    ),
    "grad_norm/NAME": doc(
        "norm of the gradients of task NAME in this step, of the loss over its own valid tokens, before clipping; only "
        "with tasks, and only if it has learned from this step"
    ),
    "mtp/NUMBER": doc(
        "cross-entropy of what module NUMBER predicts, the token so many behind the next one: sum over its labels on "
        "all ranks, divided by the valid tokens of the step; only with `mtp` of the model",
        "nats a token",
    ),
    "moe/aux_loss": doc(
        "load-balancing loss of the routers before its weight, mean over rows, layers with experts and the steps since "
        "the last record; 1 when balanced; only with experts"
    ),
    "moe/load/LAYER": doc(
        "how real tokens were distributed over the experts of that layer since the last record, a list that adds up "
        "to 1; only of layers with experts",
        "shares",
    ),
    "step/NAME/KEY": doc("what your own function in place of the step returned under KEY, on the first rank"),
    "hook/NAME/KEY": doc("what your own hook NAME returned under KEY in this step, on the first rank"),
}


class RankMetrics(Record):
    """`ranks/*.jsonl`: the same step on one rank."""

    step_seconds: Annotated[float | None, doc("time of a step, averaged since the last record, on this rank", "s")] = (
        None
    )
    data_seconds: Annotated[float | None, doc("part of it that this rank spent reading rows", "s")] = None
    comm_seconds: Annotated[
        float | None,
        doc("part of it that this rank spent waiting for communication; absent in the same cases as above", "s"),
    ] = None
    memory_bytes: Annotated[int | None, doc("peak on this rank, as above", "bytes")] = None
    resident_bytes: Annotated[int | None, doc("on a CPU: resident when the record was made", "bytes")] = None
    allocated_bytes: Annotated[int | None, doc("on a GPU: what tensors held when the record was made", "bytes")] = None
    reserved_bytes: Annotated[
        int | None, doc("on a GPU: what torch had taken for them when the record was made", "bytes")
    ] = None
    retries: Annotated[
        int | None,
        doc(
            "on a GPU: allocation retries (the allocator had to free cached memory first) since the last record",
            "times",
        ),
    ] = None
    node_seconds: Annotated[
        dict[str, float] | None, doc("node of the step → its time, averaged since the last record", "s")
    ] = None
    dropped: Annotated[int | None, doc("how many records of this file are missing so far, as above", "records")] = None
