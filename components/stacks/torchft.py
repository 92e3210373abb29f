"""`stack = torchft`: replica groups that may leave and return while the others train, by torchft."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.contracts.stacks import PlannedStack
from xtrain.dsl.schema.parallel import STACKS, StackSettings
from xtrain.dsl.schema.setting import Conflict, Range, at_least, execution_setting, mesh_setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import StepNode
from xtrain.text.units import BYTES, bytes_text, plural, seconds_text

if TYPE_CHECKING:
    from xtrain.blocks.stage_costs import StageCosts
    from xtrain.contracts.stacks import OwnedBytes
    from xtrain.dsl.spec import Spec
    from xtrain.plan.graph import Builder
    from xtrain.plan.resolved import Resolved

BUCKET: Final = 2**22  # maximum of numbers reduced together; one larger gradient is reduced alone
_GROUPS: Final = "spreads a replica group only over fsdp and tp"


@frozen
class TorchftSettings(StackSettings):
    """`torchft { … }`: the replica groups of `stack = torchft`."""

    replicas: int = mesh_setting(
        "number of replica groups, each with a whole copy of the model and its share of the rows of a step",
        default=2,
        check=at_least(2),
        added=True,
    )
    min: int = execution_setting(
        "minimum number of groups for a step; with fewer, the others wait for a group to return",
        default=1,
        check=at_least(1),
        added=True,
    )
    heartbeat: Quantity = execution_setting(
        "time without a heartbeat after which a group that has not closed its connections counts as lost",
        default=Quantity(5, "seconds"),
        units=("seconds",),
        check=Range(low=1),
        added=True,
        example="5 s",
    )
    process_group: Literal["gloo", "baby_gloo"] = execution_setting(
        "process group of torchft between replica groups. gloo: in the rank; baby_gloo: in a process of its own, which "
        "is ended if an operation hangs, and to which tensors are copied",
        default="gloo",
        added=True,
    )
    timeout: Quantity = execution_setting(
        "time to connect this process group, and to receive the next piece of a state",
        default=Quantity(60, "seconds"),
        units=("seconds",),
        check=Range(low=1),
        added=True,
        example="60 s",
    )


@STACKS.register()
@frozen
class Torchft(PlannedStack):
    """`stack = torchft`: replica groups; one that dies leaves, comes back, and takes the state of a running one."""

    kind = "torchft"
    settings = TorchftSettings
    package = "torchft"
    install = "xtrain[torchft]"
    uses_fsdp = True
    groups = True
    beside = ("setup.parallel.fsdp",)
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("pp", "cp", "ep"), _GROUPS),
        "offload": "keeps model states where they are used",
    }
    resuming: ClassVar[Mapping[str, str]] = {
        "replicas": "gradients are summed in another order",
        "min": "",
        "heartbeat_seconds": "",
        "process_group": "",
        "timeout_seconds": "",
    }

    def replicas(self, spec: "Spec") -> int:
        return _settings(spec).replicas

    def shard(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        from xtrain.planner.graph.parallel import add_fsdp

        return add_fsdp(graph, resolved, last)

    def wrap(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        own, ranks = _settings(resolved.spec), resolved.group_mesh.world_size
        seconds = own.heartbeat.value
        does = (
            f"{own.replicas} replica groups of {plural(ranks, 'rank')}, each with a manager of torchft and a process "
        )
        does += f"group; a group that dies or sends no heartbeat for {seconds_text(seconds)} leaves, the others "
        does += "continue, and the launcher restarts it"
        usual = TorchftSettings()
        args: dict[str, Any] = {"replicas": own.replicas, "min": own.min, "heartbeat_seconds": seconds}
        if own.process_group != usual.process_group:
            args["process_group"] = own.process_group
            does += f"; groups exchange through {own.process_group}"
        if own.timeout != usual.timeout:
            args["timeout_seconds"] = own.timeout.value
            does += f"; their process groups connect within {seconds_text(own.timeout.value)}"
        return graph.add(
            "setup", self.node(), does, args=args, axes=resolved.wide("replicate"), after=((last, "model"),)
        )

    def before_rows(self, resolved: "Resolved") -> Iterator[StepNode]:
        own, rows = _settings(resolved.spec), resolved.batch.row_sizes.full
        does = f"agree which of {own.replicas} replica groups take part, at least {own.min}; a joining group copies "
        does += "weights, optimizer, counters and data position from a running one; while a group is missing, its "
        does += f"{rows // own.replicas:,} of the {rows:,} rows of a step are never trained on"
        yield StepNode("step.fetch", f"step.{self.kind}.quorum", {}, does)

    def sums(self, resolved: "Resolved") -> Iterator[StepNode]:
        numbers = max((sum(own) for own in _trained(resolved)), default=0)
        size = bytes_text(BYTES[resolved.formats.params] * numbers)
        does = f"sum losses and gradients, {size} a rank, over the groups that take part; if one is lost meanwhile, "
        does += "repeat the step without it"
        yield StepNode("step.clip", f"step.{self.kind}.sum", {}, does)

    def beside_update(self, resolved: "Resolved", states: "OwnedBytes") -> int:
        """Return a bucket of gradients, put together to be summed."""
        return min(states.trained, BYTES[resolved.formats.params] * BUCKET)

    def calls(self, resolved: "Resolved", stages: "list[StageCosts]", pp: int) -> Iterator[tuple[CollectiveCall, int]]:
        from xtrain.planner.costs.traffic import gathers_of, sums_of

        yield from gathers_of(resolved, stages, pp)
        yield from sums_of(resolved, stages)
        for own in _trained(resolved):
            for size in bucket_sizes(own):
                width = BYTES[resolved.formats.params]
                yield CollectiveCall("replicate", "all_reduce", f"step.{self.kind}.sum", width * size), 1

    def conflicts(self, spec: "Spec") -> Iterator[Conflict]:
        own, other = _settings(spec), "or use stack parallel"
        if own.min > own.replicas:
            message = f"a step would need {own.min} replica groups, and there are {own.replicas}"
            yield Conflict("parallel.torchft.min", message, f"use at most {own.replicas}")
        if spec.parallel.fsdp.replicate != 1:
            message = "the copies of the model under stack torchft are its replica groups"
            yield Conflict("parallel.fsdp.replicate", message, "use replicate 1, and set torchft.replicas")
        yield from _of_ranks_together(spec, other)
        yield from _of_actions(spec, other)


def bucket_sizes(sizes: list[int]) -> list[int]:
    """Return the number of elements in each bucket of gradients of these sizes, in this order."""
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        if filled and filled + size > BUCKET:
            buckets.append(filled)
            filled = 0
        filled += size
    return [*buckets, filled] if filled else buckets


def _settings(spec: "Spec") -> TorchftSettings:
    return spec.parallel.of_stacks()[Torchft.kind]


def _trained(resolved: "Resolved") -> list[list[int]]:
    """Return for each pipeline coordinate the gradient sizes on its fullest rank."""
    from math import prod

    return [[prod(resolved.cuts.shape(each)) for each in own if each.trained] for own in resolved.parameters_by_pp]


def _of_ranks_together(spec: "Spec", other: str) -> Iterator[Conflict]:
    """Yield conflicts with features, other than loss and gradients, that sum or compute over all ranks."""
    together = {
        "model.experts": (spec.model.experts > 0, "the loads of experts", "use a model without experts"),
        "task": (bool(spec.tasks), "a norm for each task", "remove them"),
        "rollout": (spec.rollout is not None, "rewards of completions", "remove it"),
        "step.name": (spec.step is not None, "data exchanged by your own step", "remove it"),
        "serve": (spec.serve is not None, "requests of clients", "remove it"),
        "loss": (bool(spec.loss.computed), "log-probabilities of a reference", "use a loss without one"),
    }
    for path, (there, what, instead) in together.items():
        if there:
            message = f"stack torchft sums losses and gradients over replica groups, not {what}"
            yield Conflict(path, message, f"{instead}, {other}")
    if spec.loss.learns_from is not None:
        message = "stack torchft does not support a teacher: each replica group would compute the same"
        yield Conflict("loss", message, f"use a loss without one, {other}")


def _of_actions(spec: "Spec", other: str) -> Iterator[Conflict]:
    for path, action in spec.actions:
        if action.goes_back:
            message = f"{action.kind} rolls back all replica groups, and a missing group would not be told"
            yield Conflict(path, message, f"use skip, {other}")
        elif action.writes_beside:
            message = f"the replica groups of stack torchft would write the files of {action.kind} over each other"
            yield Conflict(path, message, f"remove it, {other}")
