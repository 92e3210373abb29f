"""Costs of a run outside its steps: start-up time, goodput under failures, and disk space of checkpoints.

Start-up: host times are measured by `benchmarks/startup.py` (torch 2.13, one core of a shared x86-64 machine); times of
GPU networks are published. `cluster` may override them. Sums do not include unknown parts.

Goodput: times between failures are exponential (Young 1974; Daly 2006, "A higher order estimate of the optimum
checkpoint interval for restart dumps"). Of n devices one fails every `mtbf / n`. A failure costs the restart and all
work after the latest checkpoint; it may also occur during a restart.
"""

import json
from collections.abc import Iterable, Mapping
from math import exp, expm1, inf, prod, sqrt
from random import Random
from typing import Any, Final

from attrs import evolve

from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec
from xtrain.plan.checkpoints import checkpoint_contents, saved_parameters
from xtrain.plan.groups import ParameterGroups
from xtrain.plan.mesh import LAZY_FROM, base_of_plan
from xtrain.plan.parameters import weight_bytes
from xtrain.plan.plan import Plan
from xtrain.plan.timeline import saves
from xtrain.text.units import BYTES, bytes_text, plural

# Seconds until a rank has loaded Python, torch and the code of its nodes: 3.5 times as long as torch alone (9.5 s and
# 2.7 s on a busy machine), which takes 1.4 s on an idle one (docs/performance.md).
PROGRAMS: Final = 5.0
# Seconds that a rank needs to read one rank's part of a plan, and the bytes of that part in the file.
PLAN_OF_A_RANK: Final = 15e-6
PLAN_BYTES: Final = 242
# Requests per second answered by the process with the ranks' store: under load, adding to a number takes 5 to 9 µs. A
# single client, whose requests wake an idle virtual machine one by one, takes 30 µs.
STORE_RATE: Final = 100_000.0
# Requests of a rank to the store during rendezvous (runtime/jobs/rendezvous.py): register, wait for the answer, report
# ready, wait for the start, remove its answer; the first rank answers.
MEETING: Final = 8
# Seconds that the store needs to accept a connection.
CONNECTION: Final = 250e-6
# Seconds that the first rank needs for each other rank, one after the other: setting a value takes 4 µs, querying
# numbers 20 µs.
ANSWER: Final = 25e-6
# Gloo groups over all ranks: of the run, of the checkpoint reader, of the checkpoint writer.
WHOLE: Final = 3
# Seconds of NCCL for a communicator, per rank. Published are 15 s for 8 Ki and 265 s for 96 Ki ranks (arXiv
# 2510.20171), 17 s for 16 Ki and 200 s for 96 Ki (arXiv 2602.00277): fitted by least squares through 0. MegaScale
# (arXiv 2402.15627) reached less than 30 s for all groups of more than 10,000 GPUs, with another store.
CONNECT: Final = 2.3e-3


@frozen
class Part:
    """Part of a start: its seconds, None if unknown, and their source or the missing setting."""

    name: str
    seconds: float | None
    why: str


@frozen
class Startup:
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all known parts."""
        return sum(part.seconds or 0.0 for part in self.parts)

    @property
    def unknown(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.seconds is None)


def startup_of(plan: Plan) -> Startup:
    """Return the start of a run that resumes from a checkpoint."""
    cluster, world = plan.cluster, plan.mesh.world_size
    programs = PROGRAMS if cluster.programs_seconds is None else cluster.programs_seconds
    parts = [Part("programs", programs, "each rank loads Python, torch and its nodes, on a core of its own")]
    if world > 1:
        parts += [_plan(plan), _meeting(plan), _groups(plan)]
        if plan.node("setup.bootstrap").args["device"] != "cpu":
            parts.append(_communicators(plan))
    parts.append(_reading_weights(plan))
    if any(node.op == "setup.compile" for node in plan.nodes):
        parts.append(_compile(plan))
    return Startup(tuple(parts))


def _plan(plan: Plan) -> Part:
    """Return the time to read the plan: every machine reads the file once, and every rank reads all of it."""
    world, storage = plan.mesh.world_size, plan.cluster.storage
    size = PLAN_BYTES * world
    read = 0.0 if storage is None else size * plan.cluster.nodes / storage
    return Part("plan", PLAN_OF_A_RANK * world + read, f"each rank reads {bytes_text(size)}")


def _rate(plan: Plan) -> float:
    return plan.cluster.store_rate or STORE_RATE


def _meeting(plan: Plan) -> Part:
    world = plan.mesh.world_size
    seconds = world * (MEETING / _rate(plan) + CONNECTION + ANSWER)
    return Part("meeting", seconds, f"{MEETING} requests of each rank to one store; the first rank answers all others")


def _axes(plan: Plan) -> dict[str, int]:
    """Return axes → ranks of every process group in which this plan communicates, without the group of all ranks."""
    sizes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
    names = {each.axis for kind in plan.estimates.classes for each in kind.traffic}
    found = {name: prod(sizes[part] for part in name.split(" · ")) for name in sorted(names)}
    return {name: size for name, size in found.items() if 1 < size < plan.mesh.world_size}


def _groups(plan: Plan) -> Part:
    """Return the time to create the gloo groups, which exist on CUDA as well. When connecting at once, each rank waits
    for the address of every other rank (one request) and reads it (two). The time to compute a rank's own groups is
    not counted: 13 ms for 65,536 ranks."""
    world, axes = plan.mesh.world_size, _axes(plan)
    if world >= LAZY_FROM:
        requests = world * (WHOLE + len(axes))
        how = "each rank tells its address; it connects to those that it sends to"
    else:
        requests = 3 * world * (WHOLE * world + sum(axes.values()))
        how = "each rank connects to every other one"
    return Part("groups", requests / _rate(plan), f"{plural(len(axes), 'group')} of axes, {WHOLE} of all ranks; {how}")


def _communicators(plan: Plan) -> Part:
    """Return the time to create the NCCL communicators: one after the other, at a group's first call; groups of one
    axis in parallel."""
    ranks = plan.mesh.world_size + sum(_axes(plan).values())
    connect = CONNECT if plan.cluster.connect_seconds is None else plan.cluster.connect_seconds
    why = f"{1000 * connect:.3g} ms for each of {ranks:,} ranks in {plural(1 + len(_axes(plan)), 'communicator')}"
    return Part("communicators", ranks * connect, why)


def _reading_weights(plan: Plan) -> Part:
    """Return the time to read the weights: each replica of the sharded model reads all of them."""
    size = plan.estimates.checkpoint_bytes * plan.mesh.size("replicate")
    if plan.cluster.storage is None:
        return Part("weights", None, f"{bytes_text(size)}; no cluster.storage")
    return Part("weights", size / plan.cluster.storage, f"{bytes_text(size)} are read with cluster.storage")


def _compile(plan: Plan) -> Part:
    kinds = len(plan.architecture.kinds)
    if plan.cluster.compile_seconds is None:
        return Part("compile", None, f"{plural(kinds, 'kind')} of blocks; no cluster.compile")
    return Part("compile", kinds * plan.cluster.compile_seconds, f"{plural(kinds, 'kind')} of blocks in the first step")


FAILURES: Final = 20_000  # simulated failures; the error is then half a percent

NOTHING: Final = 5e-4  # a goodput that is shown as 0.0 %


@frozen(kw_only=True)
class Faults:
    """Failures of a run, in seconds. between: failures of the whole job. restart: from a failure to the next step.
    blocked: training time lost to a save. later: from there until the checkpoint can be loaded."""

    between: float
    restart: float
    blocked: float
    later: float

    def goodput(self, interval: float) -> float:
        """Return the share of the time that trains the run, with a checkpoint after every `interval` seconds of
        training.

        A checkpoint counts if it is complete before the next failure, so a time u between failures is worth ⌊(u -
        restart - later) / (interval + blocked)⌋ intervals: for exponential u, e^(-(restart + later) / M) /
        (e^((interval + blocked) / M) - 1) of them on average. Without `later` this is Daly's formula.
        """
        rounds = (interval + self.blocked) / self.between
        if rounds > 700:  # e^700 is near the limit of fp64
            return 0.0
        return interval / self.between * exp(-(self.restart + self.later) / self.between) / expm1(rounds)

    @property
    def young(self) -> float:
        """√(2 · blocked · M), the first-order approximation of the best interval."""
        return sqrt(2 * self.blocked * self.between)

    def best(self, shortest: float) -> float:
        """Return the interval of at least `shortest` with the highest goodput: interval / M is the root of 1 - x =
        e^-(x + blocked / M) between 0 and 1."""
        low, high = 0.0, 1.0
        for _ in range(60):
            x = (low + high) / 2
            low, high = (x, high) if 1 - x > exp(-x - self.blocked / self.between) else (low, x)
        return max(low * self.between, shortest)

    def simulated(self, interval: float, *, failures: int = FAILURES, seed: int = 0) -> float:
        """Return the goodput of a simulated run with `failures` failures."""
        done = spent = 0.0
        random = Random(seed)
        for _ in range(failures):
            between = random.expovariate(1 / self.between)
            spent += between
            done += interval * max(0.0, (between - self.restart - self.later) // (interval + self.blocked))
        return done / spent


@frozen(kw_only=True)
class Goodput:
    """Goodput of a plan.

    interval: seconds of training between checkpoints; inf: no checkpoint before the end. share: of the time that
    trains; 0 without checkpoints. trained: total seconds of training; None if unknown. wall: seconds of the whole run,
    and `failures` expected in it; None if its length is unknown, or it never ends. best: the interval with the highest
    goodput, `best_share`.
    """

    faults: Faults
    interval: float
    share: float
    trained: float | None
    wall: float | None
    best: float
    best_share: float

    @property
    def failures(self) -> float | None:
        return None if self.wall is None else self.wall / self.faults.between

    @property
    def saves(self) -> float:
        """Share of the time in which training waits for saves that count."""
        return self.share * self.faults.blocked / self.interval

    @property
    def restarts(self) -> float:
        """Share of the time in restarts: the average of min(u, restart)."""
        return -expm1(-self.faults.restart / self.faults.between)

    @property
    def lost(self) -> float:
        """Share of the time that no checkpoint preserves."""
        return max(0.0, 1 - self.share - self.saves - self.restarts)  # the others add up to 1 within rounding

    @property
    def stands(self) -> bool:
        """True if the run makes almost no progress: a share of the time below `NOTHING`."""
        return self.interval != inf and self.share < NOTHING


def goodput_of(plan: Plan) -> Goodput | None:
    """Return the goodput of a plan; None if `cluster` has no failure rate, or the time of a step is unknown."""
    cluster, times = plan.cluster, plan.estimates.times
    if cluster.mtbf_seconds is None or times is None:
        return None
    writes = 0.0 if cluster.storage is None else plan.estimates.checkpoint_bytes / cluster.storage
    waits = plan.args("setup.checkpoint").get("mode") == "sync"
    faults = Faults(
        between=cluster.mtbf_seconds / plan.mesh.world_size,
        restart=restart_of(plan),
        blocked=writes if waits else 0.0,
        later=0.0 if waits else writes,
    )
    trained = None if plan.timeline.full_steps is None else plan.timeline.full_steps * times.step
    interval = _interval(plan, times.step)
    if trained is not None and interval > trained:
        interval = inf  # such a checkpoint is never written
    share = 0.0 if interval == inf else faults.goodput(interval)
    best = faults.best(max(times.step, writes))
    wall = None if trained is None or not share else trained / share
    return Goodput(
        faults=faults,
        interval=interval,
        share=share,
        trained=trained,
        wall=wall,
        best=best,
        best_share=faults.goodput(best),
    )


def restart_of(plan: Plan) -> float:
    """Return the seconds from a failure to the next step: as given by `cluster`, or until ranks count as stuck and all
    have started, as far as that is known."""
    if plan.cluster.restart_seconds is not None:
        return plan.cluster.restart_seconds
    return (plan.node("setup.watch").args["stuck_seconds"] or 0.0) + startup_of(plan).seconds


def _interval(plan: Plan, step: float) -> float:
    """Return the seconds between two checkpoints of the most frequent tick."""
    tokens = plan.estimates.tokens_per_step
    found = [inf]
    for tick in plan.timeline.ticks:
        if not any(saves(plan.node(each)) for each in tick.nodes):
            continue
        if tick.seconds is not None:
            found.append(tick.seconds)
        elif tick.steps is not None:
            found.append(tick.steps * step)
        elif tick.tokens is not None:
            found.append(float(tick.tokens) / tokens * step)
        elif tick.fraction is not None and plan.timeline.steps is not None:
            found.append(tick.fraction * plan.timeline.steps * step)
    return min(found)


# Bytes in addition to the numbers, measured with torch 2.13 and rounded up. `dcp` writes every piece of a tensor as an
# archive of its own (1.6 KB) and names it in `.metadata`; `file` has one archive of all tensors.
OF_A_PIECE: Final = {"dcp": 1856, "file": 384}
# A rank's random number streams: three of 5 KB, and one more on a GPU.
OF_STREAMS: Final = 16 * 1024
STREAMS: Final = 4
# Counters, versions and the data position in `state.json`, and its entry for each file.
OF_COUNTERS: Final = 4096
OF_A_FILE: Final = 128


@frozen(kw_only=True)
class DiskUse:
    """Bytes in `checkpoints/` of an uninterrupted run.

    full, weights: of one full checkpoint, and of the weights alone, 0 if none are saved. rest: at the end, with no save
    in progress. most: at any moment, including a run that is resumed past its end.
    """

    full: int
    weights: int
    rest: int
    most: int


def disk_of(plan: Plan, saves: int | None) -> DiskUse | None:
    """Return the disk space of checkpoints; None if nothing is saved, or the amount is unknown. saves: total number of
    full checkpoints, None if unknown."""
    saving = plan.args("setup.checkpoint")
    if not saving or (saves is None and saving["keep"] is None):
        return None
    contents = checkpoint_contents(plan)
    sidecar = len(json.dumps(contents, indent=1)) + OF_COUNTERS + plan.mesh.world_size * OF_A_FILE
    full = sidecar + _full(plan, contents, saving["backend"])
    weights = _weights_on_disk(plan, contents, saving["backend"])
    weights += sidecar if weights else 0
    stays = saves if saving["keep"] is None else saving["keep"] + (saving["best"] is not None)
    assert stays is not None
    most = stays + (saving["keep"] is not None)
    if saves is not None:
        stays, most = min(stays, saves), min(most, saves)
    return DiskUse(full=full, weights=weights, rest=stays * full + weights, most=most * full + weights)


def _full(plan: Plan, contents: Mapping[str, Any], backend: str) -> int:
    copies, groups = 1 + bool(plan.args("setup.ema")), ParameterGroups.of(plan)
    trained = [tensor for tensor in plan.parameters.tensors if tensor.trained]
    counters = sum(len(groups.scalars(tensor.name)) for tensor in trained)
    moments = (tensor for tensor in trained for _ in groups.state(tensor.name))
    weights = _pieces(plan, saved_parameters(plan)) + len(contents["buffers"])
    pieces = copies * weights + _pieces(plan, moments) + counters
    streams = plan.mesh.world_size * (OF_STREAMS + STREAMS * OF_A_PIECE[backend])
    buffers = copies * _buffer_bytes(contents)
    numbers = plan.estimates.checkpoint_bytes + buffers + BYTES["fp32"] * counters
    return numbers + pieces * OF_A_PIECE[backend] + streams


def _weights_on_disk(plan: Plan, contents: Mapping[str, Any], backend: str) -> int:
    if not any(plan.node(node).op == "tick.model" for trigger in plan.timeline.triggers for node in trigger.nodes):
        return 0
    averages = plan.args("setup.ema")
    form = averages["format"] if averages and averages["publish"] else plan.node("setup.build_model").args["params"]
    frozen = plan.args("setup.freeze").get("format", "")
    saved = saved_parameters(plan)
    kept = evolve(plan.parameters, total=sum(each.size for each in saved), tensors=saved)
    numbers = weight_bytes(kept, form, frozen, base_of_plan(plan)) + _buffer_bytes(contents)
    pieces = _pieces(plan, saved) + len(contents["buffers"])
    return numbers + pieces * OF_A_PIECE[backend]


def _pieces(plan: Plan, tensors: Iterable[ParameterSpec]) -> int:
    """Return the number of pieces into which ranks cut weights; a weight that several ranks hold whole is written
    once."""
    axes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
    shards = prod(axes[axis] for axis in plan.node("setup.mesh").args["shard_axes"])
    experts = axes["ep"] * axes["ep_fsdp"]
    return sum(
        experts if tensor.expert else shards * (axes["tp"] if len(tensor.shape) > 1 else 1) for tensor in tensors
    )


def _buffer_bytes(contents: Mapping[str, Any]) -> int:
    return sum(BYTES["fp32"] * prod(shape) for shape in contents["buffers"].values())
