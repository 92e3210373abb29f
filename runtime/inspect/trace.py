"""Trace of a plan: one optimizer step of a rank's real program on meta tensors, without the other ranks."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.losses import LATER, LATER_LABELS
from xtrain.plan.architecture import widest_task
from xtrain.plan.estimates import Memory, Traffic
from xtrain.plan.graph import ALERTS, groups_node
from xtrain.plan.plan import Node, Plan, Traced
from xtrain.runtime.base.device import FakeDevice
from xtrain.runtime.base.ops import PlanMismatch, load_ops, op_of
from xtrain.runtime.base.state import Clocks, Progress, Rank
from xtrain.runtime.feed.collate import CollateChain, encode_outline
from xtrain.runtime.feed.microbatch import SIDES, Microbatch, Units
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.inspect.ledger import Ledger, MemoryOwners
from xtrain.runtime.inspect.observer import (
    CollectiveRecorder,
    IssuedCall,
    TraceObserver,
    joined_pieces,
    own_pieces,
)
from xtrain.runtime.inspect.repeats import ENOUGH, NotAlike, Shared, StageRepeats, attach_repeats, attach_skips
from xtrain.runtime.loop.agreement import Agreement
from xtrain.runtime.loop.alerts import AlertActions
from xtrain.runtime.loop.commands import Control
from xtrain.runtime.loop.node_calls import topological
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.nn.pipeline import PipelineSchedule
from xtrain.runtime.nn.state_scan import pieces_of
from xtrain.runtime.nn.transformer import ModelParts, Transformer
from xtrain.runtime.observe.stopping import StopRequests
from xtrain.runtime.observe.watch import Poller

# Its tensors need values: document boundaries decide later computations.
OUTLINE = "step.share_outline"


def left_out(node: Node) -> bool:
    """Return True if a trace leaves a node out; it has no records for trackers and no completions for rollouts."""
    return node.op.startswith(("setup.log.", "rollout.")) or not op_of(node).traced


@frozen(kw_only=True, eq=False)
class FullRows:
    """Loader of a trace: the same full rows in every step. whole, local: all positions, and this rank's."""

    whole: Microbatch
    local: Microbatch
    accumulate: int

    @classmethod
    def of(cls, plan: Plan, collate: CollateChain) -> "FullRows":
        args = plan.node("setup.loader").args
        several = len(args["datasets"]) > 1
        whole = full_rows(args["micro"], args["sequence"], dataset=_dataset(plan) if several else None)
        read = plan.args("collate.pack")
        whole = with_numbers(whole, read.get("unit"), read.get("columns", ()), read.get("values", ()))
        whole = with_columns(whole, read.get("later", 0), read.get("wide", {}))
        return cls(whole=whole, local=collate.local_part(whole), accumulate=args["accumulate"])

    def num_microbatches(self, step: int) -> int:
        return self.accumulate

    def microbatches(self, step: int) -> list[Microbatch]:
        return [evolve(self.local) for _ in range(self.accumulate)]


def _dataset(plan: Plan) -> int:
    """Return the number of the dataset of all rows: with tasks, one of the task that costs most."""
    datasets = plan.node("setup.loader").args["datasets"]
    own = (node.args["tasks"][widest_task(plan.architecture)] for node in plan.nodes if node.op == "setup.tasks")
    return datasets.index(next(own, datasets)[0])


def full_rows(rows: int, sequence: int, *, dataset: int | None = None) -> Microbatch:
    """Return full rows before context parallelism shards them. dataset: its number, if datasets are distinguished."""
    positions_BS = torch.arange(sequence).repeat(rows, 1)
    return Microbatch(
        input_ids_BS=torch.zeros_like(positions_BS),
        labels_BS=torch.zeros_like(positions_BS),
        positions_BS=positions_BS,
        real_BS=torch.ones_like(positions_BS, dtype=torch.bool),
        cumulative_lengths=torch.arange(0, rows * sequence + 1, sequence, dtype=torch.int32),
        real_lengths=torch.full((rows,), sequence, dtype=torch.int32),
        dataset_B=None if dataset is None else torch.full((rows,), dataset),
        place_B=torch.arange(rows),
        num_valid=rows * sequence,
    )


def with_numbers(whole: Microbatch, unit: str | None, columns: Sequence[str], values: Sequence[str]) -> Microbatch:
    """Add the loss's inputs to the rows: each row is a sequence, or both sides of a pair."""
    rows, positions_BS = whole.positions_BS.shape[0], whole.positions_BS
    units = Units(
        segment_BS=torch.arange(rows)[:, None].repeat(1, positions_BS.shape[1]),
        tokens_N=torch.full((rows,), positions_BS.shape[1]),
        last_N=torch.arange(1, rows + 1) * positions_BS.shape[1] - 1,
        members_KU=torch.arange(rows).repeat(len(SIDES[unit]), 1),
        values={name: torch.zeros(rows, dtype=torch.float64) for name in values},
    ) if unit is not None else None  # fmt: skip
    return evolve(whole, columns={name: torch.zeros(positions_BS.shape) for name in columns}, units=units)


def with_columns(whole: Microbatch, later: int, wide: Mapping[str, Mapping[str, Any]]) -> Microbatch:
    """Add the inputs of `later` multi-token-prediction modules, and columns with several numbers a token, to the
    rows."""
    shape = whole.positions_BS.shape
    names = (f"{kind}/{depth}" for kind in (LATER, LATER_LABELS) for depth in range(1, later + 1))
    more = {name: torch.zeros_like(whole.positions_BS) for name in names} | {
        name: torch.zeros((*shape, column["width"]), dtype=getattr(torch, column["format"]))
        for name, column in wide.items()
    }
    return evolve(whole, columns=whole.columns | more)


class Program:
    """Program of one rank for one step: afterwards `memory_owners` and `collectives` hold its memory and traffic."""

    memory_owners: MemoryOwners
    rows: FullRows

    def __init__(self, plan: Plan, rank: Rank) -> None:
        self.plan = plan
        self.collectives = CollectiveRecorder(plan=plan)
        self._ledger = Ledger()
        self._watch = TraceObserver(self._ledger, self.collectives)
        sheet = CLUSTERS[plan.cluster.preset].sheet
        capability = plan.cluster.capability if sheet is None else sheet.capability
        self._fake = FakeDevice(device_kind(plan), capability or 0)
        clocks = Clocks()
        for tick in plan.timeline.ticks:
            if tick.seconds is not None:
                clocks.add(tick.seconds)
        if any(node.op == "step.put_off_save" for node in plan.nodes):
            clocks.ask_for(lambda: False)
        requests = StopRequests(deadline_seconds=0.0, report=print)  # never used
        control = Control((), call=lambda node: print)
        self._resources: dict[str, Any] = {
            "plan": plan,
            "rank": rank,
            "stages": [],
            "clocks": clocks,
            "agreement": Agreement(requests, clocks, control, AlertActions.of(plan, ALERTS)),
            "poller": Poller(report=print),
            "progress": Progress(),
        }
        self._resources["resources"] = self._resources

    @property
    def model(self) -> ModelParts:
        return self._resources["model"]

    def set_up(self) -> None:
        """Run the nodes before the first step; weights and later tensors are fake."""
        # Of the `collate` nodes only sharding: the rows are invented, whatever the other nodes would do.
        setup = [n for n in topological(self.plan) if n.kind == "setup" or n.op == "collate.shard"]
        setup = [n for n in setup if not left_out(n)]
        first = next(place for place, node in enumerate(setup) if node.op == "setup.weights")
        with own_pieces():
            for node in setup[:first]:
                self._execute(node)
        self.collectives.know(self._resources["meshes"])
        with self._watching():
            for node in setup[first:]:
                self._execute(node)
            self._make_moments()
            for part in self.model.parts:
                if isinstance(part, FSDPModule):
                    part._get_fsdp_state()._lazy_init()  # so that its units know their names
        if "pipeline" in self._resources:
            skip_vote(self._resources["pipeline"])
        self._look_on()
        collate = CollateChain(stages=tuple(self._resources["stages"]))
        self.rows = FullRows.of(self.plan, collate)
        loader: Any = self.rows
        micro = self.rows.whole.positions_BS.shape[0]
        self._resources["feed"] = Feed(loader=loader, collate=collate, micro=micro, steps=1, datasets={})

    def step(self, shared: Shared | None = None, *, repeats: bool = True, calls: bool = False) -> None:
        """Run the nodes of a step as the loop does.

        repeats: skip microbatches of a pipeline that repeat earlier ones. calls: skip all but the first and the last,
        which issue all kinds of calls. shared: findings of earlier ranks, to which this rank's are added.

        Raises NotAlike if microbatches differ.
        """
        nodes = [n for n in topological(self.plan) if n.kind == "step" and not left_out(n)]
        if own := next((n for n in nodes if n.op == "step.body"), None):
            raise PlanMismatch(f"its step is {own.args['user']['function']} of your own, which only a run calls")
        step = Step(index=0)
        with self._watching(), _cycles_kept():
            bound = [(n.id, op_of(n).bind(n, self._resources)()) for n in nodes]
            self.memory_owners.begin()
            self.collectives.begin()
            if calls and "pipeline" in self._resources:
                attach_skips(self._resources["pipeline"], self.rows.accumulate)
            stages = self._repeats(shared) if repeats and not calls else []
            for node, call in bound:
                self.collectives.node = node
                with self._others() if node == OUTLINE else ExitStack():
                    call(step)
                self.memory_owners.name_gradients()
            self.collectives.node = None
            if shared is not None:
                shared.stages.extend(known_stage for stage in stages if (known_stage := stage.shared()) is not None)

    def _repeats(self, shared: Shared | None) -> list[StageRepeats]:
        """Attach repeats if a pipeline has more microbatches than must run."""
        pipeline, count = self._resources.get("pipeline"), self.rows.accumulate
        if pipeline is None or count <= ENOUGH:
            return []
        watching = self._ledger, self.collectives, self.memory_owners
        coordinate = self._resources["rank"].coordinates["pp"]
        return attach_repeats(pipeline, coordinate, count, watching, shared)

    def _execute(self, node: Node) -> None:
        for name in {"attention", "pointwise"} & node.args.keys():  # with the kernels of the plan's device
            kernels = node.args[name]
            node = evolve(node, args={**node.args, name: dict.fromkeys(kernels, kernels[device_kind(self.plan)])})
        op = op_of(node)
        result = op.bind(node, self._resources)()
        if op.gives:
            self._resources[op.gives] = result

    def _watching(self) -> ExitStack:
        stack = ExitStack()
        for context in (
            self._fake,
            self._watch,
            self._watch.blind_to_shapes(),
            self._ledger.watching_sizes(),
            joined_pieces(),
        ):
            stack.enter_context(context)
        return stack

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Give tensors values, and broadcast the outline of rows that other ranks read."""
        with unset_fake_temporarily():
            shared = self.plan.args(OUTLINE)
            whole, numbers = [self.rows.whole] * self.rows.accumulate, shared.get("numbers", ())
            self._watch.heard = encode_outline(whole, whole[0].sequence, numbers)
            yield
            self._watch.heard = None

    def _make_moments(self) -> None:
        """Create the optimizer's state, which exists before a traced step."""
        optimizer: Optimizer = self._resources["optimizer"]
        for _, parameter in self.model.trained():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _look_on(self) -> None:
        self.memory_owners = MemoryOwners(
            model=self.model,
            optimizer=self._resources["optimizer"],
            ema=self._resources.get("ema"),
            ledger=self._ledger,
            offloaded=self.plan.node("setup.weights").args["offload"],
        )
        # Gradients that this backward does not reduce are unsharded from here on.
        self._watch.ends["FSDP::root_post_backward_callback"] = self.memory_owners.name_gradients
        for part in self.model.parts:
            part.register_forward_pre_hook(self._before, prepend=True)
            part.register_forward_hook(self._after)

    def _before(self, part: Transformer, args: tuple[Any, ...]) -> None:
        self.collectives.mark()
        self.memory_owners.forward_begins([*part.inbox, *args[1:]])

    def _after(self, part: Transformer, args: tuple[Any, ...], out: Tensor) -> None:
        self.memory_owners.forward_ends(out if part.span.predicts else None)


@contextmanager
def _cycles_kept() -> Iterator[None]:
    """Disable the garbage collector, which would end storages at unrelated times."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def device_kind(plan: Plan) -> str:
    """Return the device that the run is for; cuda if the machine decides."""
    device = plan.node("setup.bootstrap").args["device"]
    return "cpu" if device == "cpu" else "cuda"


# pipelines in a world of one rank ------------------------------------------------------------------------------------


def skip_vote(pipeline: PipelineSchedule) -> None:
    """Skip the messages with which stages agree in their first step on who infers shapes.

    Stages with given shapes vote alike, and here no other stage answers.
    """
    for schedule in pipeline._schedules.values():
        if hasattr(schedule, "_warmup_p2p"):  # from torch 2.13 on
            schedule._warmup_p2p = _decide


def _decide(stages: list[Any], has_backward: bool, done: bool) -> None:
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        assert not InferenceMode.needs_dynamic(stage._user_meta, has_backward), "stages are told their shapes"
        stage._inference_mode = InferenceMode.STATIC


def trace_plan(
    plan: Plan, ranks: Sequence[int] | None = None, told: Callable[[int, int], object] = lambda number, count: None
) -> tuple[Traced, ...]:
    """Trace `ranks`, or the first rank of every pipeline coordinate. told: called before each, with numbers from 1.

    Raises RuntimeError if this process is part of a process group, PlanMismatch if plan and program differ.
    """
    if groups_node(plan) is not None:
        raise PlanMismatch("replica groups are of real ranks alone; a trace shows what stack parallel does")
    load_ops()
    if ranks is None:
        size = plan.mesh.size("pp")
        ranks = range(0, plan.mesh.world_size, plan.mesh.world_size // size)
    shared, traces = Shared(), []
    for number, rank in enumerate(ranks, start=1):
        told(number, len(ranks))
        try:
            traces.append(trace_rank(plan, rank, shared))
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            message = f"{plan.architecture.title} looks at values ({error.func}), which a trace does not have"
            raise PlanMismatch(message) from error
    return tuple(traces)


def trace_rank(plan: Plan, number: int, shared: Shared | None = None) -> Traced:
    """Trace one rank in a fake world. shared: findings of earlier ranks.

    Runs only the necessary microbatches of a pipeline, unless they turn out to differ.
    """
    begin = time.perf_counter()
    for known, repeats in ((shared, True), (None, True), (None, False)):
        try:
            with _quiet_schedules():
                memory, traffic = _step(plan, number, known, repeats)
        except NotAlike:
            continue
        except RuntimeError as error:  # torch wraps an error of a forward
            if not isinstance(error.__cause__, NotAlike):
                raise
            continue
        pp = plan.mesh.coordinates(number)["pp"]
        return Traced(rank=number, pp=pp, memory=memory, traffic=traffic, seconds=time.perf_counter() - begin)
    raise AssertionError("where nothing is repeated nothing has to be alike")


def recorded_calls(plan: Plan, number: int) -> list[IssuedCall]:
    """Return the collectives that a rank issues in a step, in order. Of microbatches between the first and the last one
    these are the calls between stages.

    Raises PlanMismatch if plan and program differ.
    """
    # Traces of plans compare all kinds of microbatches; the calls of two are enough.
    short, _ = shortened(plan, 2)
    with _quiet_schedules(), fake_world(plan, number) as rank:
        program = Program(short, rank)
        program.set_up()
        program.collectives.log = []
        program.step(calls=True)
        return program.collectives.log


@contextmanager
def _quiet_schedules() -> Iterator[None]:
    """Suppress the hundreds of lines that torch logs about an error in a schedule."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _step(plan: Plan, number: int, shared: Shared | None, repeats: bool) -> tuple[Memory, tuple[Traffic, ...]]:
    short, left_out = shortened(plan)
    with fake_world(plan, number) as rank:
        program = Program(short, rank)
        program.set_up()
        program.step(shared, repeats=repeats)
        return program.memory_owners.memory(), program.collectives.traffic(rank.coordinates["pp"], left_out)


# fewer microbatches --------------------------------------------------------------------------------------------------


def shortened(plan: Plan, enough: int = ENOUGH) -> tuple[Plan, int]:
    """Return the plan with at most `enough` microbatches in a step, and the number of omitted ones.

    Without a pipeline, microbatches between the first and the last are all alike. A pipeline's microbatches are handled
    by `repeats`.
    """
    count = plan.node("setup.loader").args["accumulate"]
    if plan.mesh.size("pp") > 1 or count <= enough:
        return plan, 0
    nodes = [evolve(n, args={**n.args, "accumulate": enough}) if "accumulate" in n.args else n for n in plan.nodes]
    return evolve(plan, nodes=tuple(nodes)), count - enough


# one rank of a world -------------------------------------------------------------------------------------------------


@contextmanager
def fake_world(plan: Plan, rank: int) -> Iterator[Rank]:
    """Make this process rank `rank` of the plan. Raises RuntimeError if it is already part of a process group."""
    if dist.is_initialized():
        raise RuntimeError("a trace needs a process that is not part of a process group")
    mesh = plan.mesh
    dist.init_process_group("fake", rank=rank, world_size=mesh.world_size, store=FakeStore())
    try:
        yield Rank(
            rank=rank,
            local_rank=rank % mesh.ranks_per_node,
            world_size=mesh.world_size,
            data_rank=mesh.data_rank(rank),
            data_ranks=mesh.data_ranks,
            device=torch.device("cpu"),
            pipeline_ranks=mesh.size("pp"),
            coordinates=mesh.coordinates(rank),
        )
    finally:
        dist.destroy_process_group()
        # DTensor's cache refers to groups that are gone, by names that the next world reuses.
        _clear_sharding_prop_cache()
        pieces_of.cache_clear()  # tensors that another trace would not count
