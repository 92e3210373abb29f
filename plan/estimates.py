"""Estimates of a plan: memory, traffic, operations and seconds of a step, and the hardware that they are for."""

from typing import Literal

from attrs import frozen

from xtrain.plan.architecture import ParameterSpec, pairs_within

TrafficOp = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv"]


@frozen(kw_only=True)
class Parameters:
    """The inventory: every parameter by name and shape. `active` counts those one token uses."""

    total: int
    active: int
    tensors: tuple[ParameterSpec, ...]

    @property
    def trained(self) -> int:
        """How many are trained."""
        return self.total - sum(tensor.size for tensor in self.tensors if not tensor.trained)


@frozen(kw_only=True)
class Hardware:
    """The machines a run is planned for; None where neither the spec nor a preset says.

    memory_bytes: of one device. flops: operations a second of one device in dense products of the compute format, of
    which a step reaches a share in the range `efficiency`. link, network: bytes a second that one device sends inside
    its machine and to others. price: of one device for an hour. mtbf_seconds: between failures of one device; a run
    goes on `restart_seconds` after one, None: as `costs/goodput.py` adds up. storage: bytes a second of checkpoints, by
    all ranks together. fp8_flops: as `flops`, of products in fp8, where there are some. The others are of a start, None
    where `costs/startup.py` has them or nobody.
    """

    preset: str
    nodes: int
    devices: int
    memory_bytes: int | None
    flops: float | None
    efficiency: tuple[float, ...]
    link: float | None
    network: float | None
    price: float | None
    mtbf_seconds: float | None = None
    restart_seconds: float | None = None
    storage: float | None = None
    fp8_flops: float | None = None
    programs_seconds: float | None = None
    store_rate: float | None = None
    connect_seconds: float | None = None
    compile_seconds: float | None = None

    def at_usual_speed(self, flops: int, fp8: int) -> float:
        """Operations, so many of them in fp8, as those of the compute format that take as long."""
        if self.flops is None or self.fp8_flops is None:
            return flops
        return flops - fp8 + fp8 * self.flops / self.fp8_flops


@frozen(kw_only=True)
class Memory:
    """Bytes on one rank, by what they are for.

    parameters, gradients, optimizer, averages: what the rank owns; in host memory if `offloaded`. unsharded: parameters
    that fsdp has gathered, as many as are alive at once. unreduced: whole gradients that fsdp adds up over microbatches
    before it exchanges them. activations: what forwards have left for backwards, of all microbatches in flight. loss:
    what the head's forward leaves. working: the most that is alive beside all this, while a block or a piece of the
    loss is computed. reserve: what libraries and the allocator need, from outside. host: in host memory beside all
    this, where only some of what the rank owns is there.
    """

    parameters: int
    gradients: int
    optimizer: int
    averages: int = 0
    unsharded: int = 0
    unreduced: int = 0
    activations: int = 0
    loss: int = 0
    working: int = 0
    reserve: int = 0
    host: int = 0
    offloaded: bool = False

    @property
    def host_bytes(self) -> int:
        """In host memory, of ranks that compute on another device."""
        return self.host + (self.states if self.offloaded else 0)

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.averages

    @property
    def allocated_bytes(self) -> int:
        """What tensors take of it at the peak of a step: what `memory_bytes` of a run on GPUs is held against."""
        states = 0 if self.offloaded else self.states
        return states + self.unsharded + self.unreduced + self.activations + self.loss + self.working

    @property
    def total_bytes(self) -> int:
        """On the device, at the peak of a step, with what is no tensor: what has to fit."""
        return self.allocated_bytes + self.reserve


@frozen(kw_only=True)
class Traffic:
    """Calls of one collective by one rank in one step, all for the same node of the plan.

    axis: `fsdp`, or axes joined by ` · ` whose ranks call together. bytes: over all calls, of the larger of what goes
    in and what comes out. exposed: nothing can be computed meanwhile. seconds: all calls, at the bandwidth of the axis.
    meanwhile: the operations that are computed then, where they are not all of the step.
    """

    axis: str
    op: TrafficOp
    node: str
    count: int
    bytes: int
    exposed: bool
    seconds: float | None = None
    meanwhile: int = 0


@frozen(kw_only=True)
class RankClass:
    """What a step costs on the ranks with one pipeline coordinate, each figure that of the rank with the most.

    flops: operations of a step on tokens. hardware_flops: with what is computed a second time, by a teacher and of what
    the loss compares with, and with optimizer_flops: those of an optimizer that multiplies matrices. fp8_flops: those
    of hardware_flops that are in fp8. unsaved: bytes of parameters that no checkpoint holds.
    """

    pp: int
    ranks: int
    memory: Memory
    traffic: tuple[Traffic, ...] = ()
    flops: int = 0
    hardware_flops: int = 0
    optimizer_flops: int = 0
    unsaved: int = 0
    fp8_flops: int = 0


@frozen(kw_only=True)
class Times:
    """Seconds of one step on the slowest rank, and what follows; `step` is the likely one between `fast` and `slow`.

    computing: products at the likely efficiency. exposed: communication nothing is computed beside. mfu: operations
    without recomputation, against what devices could do; as a run's own where each row is one whole document.
    """

    computing: float
    exposed: float
    step: float
    fast: float
    slow: float
    tokens_per_second: float
    mfu: float


@frozen(kw_only=True)
class Remedy:
    """Settings (`--set` texts) with which the fullest rank would hold `memory_bytes`, and a step take `seconds`."""

    sets: tuple[str, ...]
    memory_bytes: int
    seconds: float | None


@frozen(kw_only=True)
class Work:
    """Operations of training by what they grow with, of the whole model, a multiplication and an addition as two.

    position: of products with weights, for each position. pair: of attention, for each position and each one of its
    document, before or behind it. position_again, pair_again: those of them that a backward computes a second time, a
    teacher computes, or the forward of what the loss compares with. position_fp8, position_fp8_again: those of both
    that are in fp8.
    windows: (window, share of the blocks that have it), where attention has windows: positions further apart are not
    computed. None: a block without.
    """

    position: int
    pair: int
    position_again: int = 0
    pair_again: int = 0
    windows: tuple[tuple[int | None, float], ...] = ()
    position_fp8: int = 0
    position_fp8_again: int = 0

    def pairs(self, length: int) -> int:
        """Pairs of positions of a document of so many, a mean over the blocks."""
        if not self.windows:
            return length**2
        return round(sum(share * pairs_within(length, window) for window, share in self.windows))


@frozen(kw_only=True)
class Estimates:
    """Closed forms; `sources` says where each formula comes from.

    work: what `flops_per_token` is made of. bubble: share of a step in which the busiest rank of a pipeline waits.
    times: None where the cluster is not known. remedies: what would make the plan fit, where it does not.
    """

    tokens_per_step: int
    flops_per_token: int
    flops_per_step: int
    work: Work
    checkpoint_bytes: int
    classes: tuple[RankClass, ...]
    bubble: float
    times: Times | None
    sources: dict[str, str]
    remedies: tuple[Remedy, ...] = ()

    @property
    def copy_bytes(self) -> int:
        """Of a checkpoint what one rank holds, and copies where it is written beside training; of the fullest rank."""
        memories = ((each.memory, each.unsaved) for each in self.classes)
        return max(each.parameters - unsaved + each.optimizer + each.averages for each, unsaved in memories)
