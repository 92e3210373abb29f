"""Start-up: how long it takes from the start of all ranks to their first step, part by part, each with its formula.

No constant is a guess. What a host does is processor time measured by `benchmarks/startup.py` (torch 2.13, one core
of a shared x86-64 machine); what a network of GPUs does is published. `cluster` may say it better. What nobody has said
is unknown, and in no sum.
"""

from math import prod
from typing import Final

from attrs import frozen

from xtrain.planner.mesh.mesh import LAZY_FROM
from xtrain.planner.plan import Plan
from xtrain.planner.units import bytes_text, plural

# Seconds until a rank has loaded Python, torch and the code of its nodes: 3.5 times as long as torch alone (9.5 s and
# 2.7 on a busy machine), which takes 1.4 s on a quiet one (docs/performance.md).
PROGRAMS: Final = 5.0
# Seconds of a rank to read what a plan says of one rank, and the bytes of that in the file.
PLAN_OF_A_RANK: Final = 15e-6
PLAN_BYTES: Final = 242
# Requests a second that the process answers which has the store of the ranks: where they queue, a number is added to in
# 5 to 9 µs. One client alone, whose requests wake an idle virtual machine one by one, takes 30.
STORE_RATE: Final = 100_000.0
# What a rank asks of the store to meet the others (runtime/launch/rendezvous.py): it says that it is there, waits for
# the answer, says that it can take part, waits for the word, removes its answer; the first one answers.
MEETING: Final = 8
# Seconds that it needs to take a connection.
CONNECTION: Final = 250e-6
# Seconds that the first rank needs for each other one, which it answers one after the other: a value is set in 4 µs,
# and their numbers are asked for in 20.
ANSWER: Final = 25e-6
# Groups of gloo over all ranks: of the run, of what reads a checkpoint, of what writes one.
WHOLE: Final = 3
# Seconds of NCCL for a communicator, for each of its ranks. Published are 15 s for 8 Ki and 265 s for 96 Ki ranks
# (arXiv 2510.20171), 17 s for 16 Ki and 200 s for 96 Ki (arXiv 2602.00277): fitted by least squares through 0.
# MegaScale (arXiv 2402.15627) has brought all groups of more than 10,000 GPUs below 30 s, with another store.
CONNECT: Final = 2.3e-3


@frozen
class Part:
    """One part of a start: its seconds, None where they are not known, and where they come from or what is missing."""

    name: str
    seconds: float | None
    why: str


@frozen
class Startup:
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Of all parts that are known."""
        return sum(part.seconds or 0.0 for part in self.parts)

    @property
    def unknown(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.seconds is None)


def startup_of(plan: Plan) -> Startup:
    """The start of a run that goes on from a checkpoint."""
    cluster, world = plan.cluster, plan.mesh.world_size
    programs = PROGRAMS if cluster.programs_seconds is None else cluster.programs_seconds
    parts = [Part("programs", programs, "each rank loads Python, torch and its nodes, on a core of its own")]
    if world > 1:
        parts += [_plan(plan), _meeting(plan), _groups(plan)]
        if plan.node("setup.bootstrap").args["device"] != "cpu":
            parts.append(_communicators(plan))
    parts.append(_weights(plan))
    if any(node.op == "setup.compile" for node in plan.nodes):
        parts.append(_compile(plan))
    return Startup(tuple(parts))


def _plan(plan: Plan) -> Part:
    """Every machine reads the file once, and every rank all of it."""
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
    """Ranks of every group in which this plan sends something, by the axes of it; all ranks together are another."""
    sizes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
    names = {each.axis for kind in plan.estimates.classes for each in kind.traffic}
    found = {name: prod(sizes[part] for part in name.split(" · ")) for name in sorted(names)}
    return {name: size for name, size in found.items() if 1 < size < plan.mesh.world_size}


def _groups(plan: Plan) -> Part:
    """Gloo's groups, which exist on CUDA as well. Connected at once, each rank asks for the address of every other one:
    it waits for it (one request), and gets it (two). What a rank computes to find its own groups is no part: 13 ms of
    65,536 ranks."""
    world, axes = plan.mesh.world_size, _axes(plan)
    if world >= LAZY_FROM:
        requests = world * (WHOLE + len(axes))
        how = "each rank tells its address; it connects to those that it sends to"
    else:
        requests = 3 * world * (WHOLE * world + sum(axes.values()))
        how = "each rank connects to every other one"
    return Part("groups", requests / _rate(plan), f"{plural(len(axes), 'group')} of axes, {WHOLE} of all ranks; {how}")


def _communicators(plan: Plan) -> Part:
    """Those of NCCL are made where a group first sends something, one after the other; groups of one axis at once."""
    ranks = plan.mesh.world_size + sum(_axes(plan).values())
    connect = CONNECT if plan.cluster.connect_seconds is None else plan.cluster.connect_seconds
    why = f"{1000 * connect:.3g} ms for each of {ranks:,} ranks in {plural(1 + len(_axes(plan)), 'communicator')}"
    return Part("communicators", ranks * connect, why)


def _weights(plan: Plan) -> Part:
    """Each replica of the sharded model reads all of it."""
    size = plan.estimates.checkpoint_bytes * plan.mesh.size("replicate")
    if plan.cluster.storage is None:
        return Part("weights", None, f"{bytes_text(size)}; no cluster.storage")
    return Part("weights", size / plan.cluster.storage, f"{bytes_text(size)} are read with cluster.storage")


def _compile(plan: Plan) -> Part:
    kinds = len(plan.architecture.kinds)
    if plan.cluster.compile_seconds is None:
        return Part("compile", None, f"{plural(kinds, 'kind')} of blocks; no cluster.compile")
    return Part("compile", kinds * plan.cluster.compile_seconds, f"{plural(kinds, 'kind')} of blocks in the first step")
