"""Estimates of a plan: memory, traffic, FLOPs and seconds of a step, and the hardware that they are for."""

from functools import cached_property
from typing import Literal

from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec, pairs_within

Label = Literal["exact", "interpolated", "extrapolated"]
TrafficOp = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv"]


@frozen(kw_only=True)
class Parameters:
    """Inventory of parameters by name and shape. `active` counts the parameters that one token uses."""

    total: int
    active: int
    tensors: tuple[ParameterSpec, ...]

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.total - sum(tensor.size for tensor in self.tensors if not tensor.trained)

    @cached_property
    def of_blocks(self) -> dict[int, list[ParameterSpec]]:
        """Layer → parameters of its block."""
        found: dict[int, list[ParameterSpec]] = {}
        for tensor in self.tensors:
            root, _, inner = tensor.name.partition(".")
            if root == "layers":
                found.setdefault(int(inner.partition(".")[0]), []).append(tensor)
        return found


@frozen(kw_only=True)
class Hardware:
    """Machines that a run is planned for; a field is None if neither the spec nor a preset gives it.

    memory_bytes: of one device. flops: FLOP/s of one device in dense products of the compute format; a step reaches a
    share in the range `efficiency`. link, network: bytes per second that one device sends inside its machine and to
    others. price: of one device for an hour. mtbf_seconds: between failures of one device; a run resumes
    `restart_seconds` after a failure, None: as computed by `costs/run.py`. storage: bytes per second of checkpoints,
    over all ranks. fp8_flops: FLOP/s of products in fp8, if supported. capability: major CUDA compute capability, and
    measured: name of the devices and time, if memory and speed were measured; a plan's id then does not depend on them.
    calibration: file with measured step times; the id does not depend on them either. The other fields describe a
    start, None if `costs/run.py` has their values or they are unknown.
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
    capability: int | None = None
    measured: str | None = None
    calibration: str | None = None

    def at_usual_speed(self, flops: int, fp8: int) -> float:
        """Return FLOPs, `fp8` of them in fp8, as FLOPs of the compute format that take the same time."""
        if self.flops is None or self.fp8_flops is None:
            return flops
        return flops - fp8 + fp8 * self.flops / self.fp8_flops


@frozen(kw_only=True)
class Memory:
    """Bytes on one rank, by use.

    parameters, gradients, optimizer, averages: state that the rank owns; in host memory if `offloaded`. unsharded:
    parameters gathered by fsdp, at their peak. unreduced: whole gradients that fsdp accumulates over microbatches
    before it exchanges them. activations: tensors kept for backwards, of all microbatches in flight. loss: tensors kept
    by the head's forward. working: peak of further memory while a block or a piece of the loss is computed. reserve:
    memory of libraries and the allocator, measured outside. host: further host memory, if only part of the rank's state
    is there.
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
        """Bytes in host memory, for ranks that compute on another device."""
        return self.host + (self.states if self.offloaded else 0)

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.averages

    @property
    def allocated_bytes(self) -> int:
        """Bytes of tensors on the device at the peak of a step; compare with `memory_bytes` of a run on GPUs."""
        states = 0 if self.offloaded else self.states
        return states + self.unsharded + self.unreduced + self.activations + self.loss + self.working

    @property
    def total_bytes(self) -> int:
        """Bytes on the device at the peak of a step, including memory outside tensors; this has to fit."""
        return self.allocated_bytes + self.reserve


@frozen(kw_only=True)
class Traffic:
    """Calls of one collective by one rank in one step, all for the same node of the plan.

    axis: `fsdp`, or axes joined by ` · ` whose ranks call together. bytes: of all calls, the larger of input and
    output. exposed: nothing can be computed meanwhile. seconds: of all calls, at the bandwidth of the axis. meanwhile:
    FLOPs computed during the calls, if not all FLOPs of the step.
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
    """Costs of a step on the ranks with one pipeline coordinate; each number is the maximum over these ranks.

    flops: of a step on tokens. hardware_flops: including recomputation, the teacher, the loss's reference forward, and
    optimizer_flops (of an optimizer that multiplies matrices). fp8_flops: the part of hardware_flops in fp8. unsaved:
    bytes of parameters that no checkpoint holds.
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
    """Seconds of one step on the slowest rank, and derived numbers; `step` is the likely value between `fast` and
    `slow`.

    computing: products at the likely efficiency. exposed: communication without concurrent computation. mfu: FLOPs
    without recomputation, divided by the devices' peak; equals the run's own mfu if each row is one whole document.
    label: relation to the measured runs of `cluster.calibration`, None without them; beyond: how it lies outside of
    them.
    """

    computing: float
    exposed: float
    step: float
    fast: float
    slow: float
    tokens_per_second: float
    mfu: float
    label: Label | None = None
    beyond: tuple[str, ...] = ()


@frozen(kw_only=True)
class Remedy:
    """Settings (`--set` texts) with which the fullest rank would hold `memory_bytes`, and a step take `seconds`."""

    sets: tuple[str, ...]
    memory_bytes: int
    seconds: float | None


@frozen(kw_only=True)
class Work:
    """FLOPs of training the whole model, by what they grow with; a multiply-add counts as two.

    position: products with weights, for each position. pair: attention, for each ordered pair of positions of a
    document. position_again, pair_again: the part that a backward recomputes, a teacher computes, or the loss's
    reference forward computes. position_fp8, position_fp8_again: the parts of both in fp8. windows: (window, share of
    the blocks that have it) for attention with windows, which skips positions further apart; None: a block without
    window.
    """

    position: int
    pair: int
    position_again: int = 0
    pair_again: int = 0
    windows: tuple[tuple[int | None, float], ...] = ()
    position_fp8: int = 0
    position_fp8_again: int = 0

    def pairs(self, length: int) -> int:
        """Return the pairs of positions in a document of `length` positions, averaged over the blocks."""
        if not self.windows:
            return length**2
        return round(sum(share * pairs_within(length, window) for window, share in self.windows))


@frozen(kw_only=True)
class Estimates:
    """Closed-form estimates; `sources` gives the source of each formula.

    work: the parts of `flops_per_token`. bubble: share of a step in which the busiest rank of a pipeline waits. times:
    None if the cluster is unknown. remedies: changes that would make the plan fit, if it does not.
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
    def fullest(self) -> RankClass:
        """Ranks with the most memory at the peak of a step."""
        return max(self.classes, key=lambda each: each.memory.total_bytes)

    @property
    def copy_bytes(self) -> int:
        """Bytes of a checkpoint that the fullest rank holds, and copies if checkpoints are written during training."""
        memories = ((each.memory, each.unsaved) for each in self.classes)
        return max(each.parameters - unsaved + each.optimizer + each.averages for each, unsaved in memories)
