"""`xtrain solve`: the size, tokens, machines and layout of the least predicted loss within a budget and a deadline.

A point is a size on a number of nodes of an offer, in the fastest layout that fits there. All of its money or time goes
into tokens, so the loss of a point follows from a scaling law. Points are searched in the order of a bound, the loss
without any communication, until no bound is below the best loss, so an exhaustive search has the same result.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Final

from attrs import evolve, field

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.estimates import Hardware
from xtrain.plan.plan import Plan
from xtrain.planner.compile import Compiled, compile_plan
from xtrain.planner.costs.run import goodput_of, startup_of
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.alternatives import Candidate, Unsearchable, any_layout, search, split
from xtrain.records.law import ScalingLaw
from xtrain.regular_files import open_regular, reason_of
from xtrain.text.units import plural

WIDTHS: Final = tuple(map(Fraction, ("1/4", "3/8", "1/2", "3/4", "1", "3/2", "2", "3", "4")))
"""Factors of the widths and the depth of the declared model, if no sizes are given."""
SCALED: Final = ("dim", "heads", "kv_heads", "ffn", "expert_ffn", "shared_ffn")
LOOSER: Final = 1.1
"""Factor of a limit whose price is shown."""
COLUMNS: Final = ("cluster", "devices", "nodes", "price")
MOST_BYTES: Final = 1 << 20
MOST_STEPS: Final = 2**63 - 1
"""Largest budget of a spec."""


class Unsolvable(ValueError):
    """A search without a result; the message says why, and what to change."""


@frozen(kw_only=True)
class RunLimits:
    """RunLimits of a run. money: in the unit of prices; seconds: from the first start to the end. None: no limit."""

    money: float | None
    seconds: float | None

    def time(self, rate: float) -> float:
        """Return the seconds that the limits allow. rate: money that all devices take in a second."""
        paid = inf if self.money is None or not rate else self.money / rate
        return min(paid, inf if self.seconds is None else self.seconds)


@frozen(kw_only=True)
class MachineOffer:
    """Machines of one kind. sets: `--set` texts that choose them. nodes: the most there are; devices: of a node.
    price: of a device for an hour."""

    name: str
    sets: tuple[str, ...]
    nodes: int
    devices: int
    price: float | None

    def counts(self) -> list[int]:
        """Return the numbers of nodes to try: powers of two, and all."""
        return sorted({self.nodes, *(2**power for power in range(self.nodes.bit_length()) if 2**power <= self.nodes)})

    def rate(self, nodes: int) -> float:
        """Return the money that nodes take in a second."""
        return (self.price or 0.0) * nodes * self.devices / 3600


@frozen(kw_only=True)
class ModelSize:
    """A size of the model. sets: `--set` texts. parameters: that a token uses. flops: of a token, forward and
    backward."""

    name: str
    sets: tuple[str, ...]
    parameters: int = 0
    flops: int = 0


@frozen(kw_only=True)
class SolvePoint:
    """A size on machines. plan: in its fastest layout, whose `--set` texts are `layout.sets`."""

    size: ModelSize
    offer: MachineOffer
    nodes: int
    layout: Candidate
    plan: Plan = field(repr=False)

    @property
    def machines(self) -> tuple[str, ...]:
        return machine_sets(self.offer, self.nodes)

    def outcome(self, limits: RunLimits, law: ScalingLaw) -> "RunOutcome | None":
        """Return the run that uses up the limits; None if they end before its first step."""
        times, goodput = self.plan.estimates.times, goodput_of(self.plan)
        assert times is not None
        share = 1.0 if goodput is None else goodput.best_share
        startup = startup_of(self.plan).seconds
        allowed = (limits.time(self.offer.rate(self.nodes)) - startup) * share
        steps = min(int(allowed / times.step), MOST_STEPS) if allowed > 0 else 0
        if steps < 1:
            return None
        tokens = steps * self.plan.estimates.tokens_per_step
        seconds = startup + steps * times.step / share
        loss, interval = law.predicted(self.size.parameters, tokens)
        return RunOutcome(
            point=self,
            steps=steps,
            tokens=tokens,
            loss=loss,
            interval=interval,
            seconds=seconds,
            cost=None if self.offer.price is None else seconds * self.offer.rate(self.nodes),
            share=share,
            save_seconds=None if goodput is None or self.plan.cluster.storage is None else goodput.best,
        )


@frozen(kw_only=True)
class RunOutcome:
    """A run within the limits. loss, interval: predicted. seconds: of the whole run; share: of it that trains, with a
    checkpoint every `save_seconds`; None: unknown."""

    point: SolvePoint
    steps: int
    tokens: int
    loss: float
    interval: tuple[float, float]
    seconds: float
    cost: float | None
    share: float
    save_seconds: float | None

    @property
    def sets(self) -> tuple[str, ...]:
        """All `--set` texts with which the spec is this run."""
        point = self.point
        return (*point.size.sets, *point.machines, *point.layout.sets, f"experiment.budget={self.steps} steps")


@frozen
class LimitPrice:
    """Loss in nats that a looser limit would save. why: the reason why it saves none; empty if it does."""

    limit: str
    less: float
    why: str = ""

    @classmethod
    def of(cls, limit: str, less: float) -> "LimitPrice":
        return cls(limit, less) if less > 0 else cls(limit, 0.0, "no less")


@frozen(kw_only=True)
class Solution:
    """Result of a search. best: the run with the least loss; outcomes: of all points that were searched, by loss.
    left_out: number of points whose bound is above it. rejected: the others, each with its reason."""

    best: RunOutcome
    outcomes: tuple[RunOutcome, ...]
    left_out: int
    rejected: tuple[tuple[str, str], ...]
    prices: tuple["LimitPrice", ...]
    plan: Plan = field(repr=False)
    """Plan of `best`, compiled from its `--set` texts."""


def solve(
    path: str | Path,
    law: ScalingLaw,
    limits: RunLimits,
    *,
    sets: Sequence[str] = (),
    sizes: Sequence[str] = (),
    offers: Path | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Solution:
    """Search the run of the spec at `path`, after `sets`, with the least loss by `law` within `limits`.

    sizes: texts of settings, such as `model.dim=512,model.layers=8`; without any, the declared model in several widths
    and depths. offers: a CSV file of machines; without it, `cluster` gives them. told: called with the points that are
    done, and all. Raises Unsolvable.
    """
    declared = _loaded(path, sets)
    machines = _offers(declared, offers)
    found = _PointSearch(path=path, sets=tuple(sets), law=law, limits=limits, offers=machines)
    if limits.money is not None and (free := [offer.name for offer in found.offers if offer.price is None]):
        raise Unsolvable(f"--budget needs a price of {', '.join(free)}: set cluster.price, or give it in --offers")
    return found.solved([_size(text) for text in sizes] or _ladder(declared), told)


def machine_sets(offer: MachineOffer, nodes: int) -> tuple[str, ...]:
    """Return the `--set` texts that choose nodes of an offer."""
    counts = {"cluster.nodes": nodes, "cluster.devices": offer.devices, "launch.nodes": nodes}
    counts["launch.ranks_per_node"] = offer.devices
    return (*offer.sets, *(f"{path}={count}" for path, count in counts.items()))


@frozen(kw_only=True)
class _PointSearch:
    path: str | Path
    sets: tuple[str, ...]
    law: ScalingLaw
    limits: RunLimits
    offers: tuple[MachineOffer, ...]

    def solved(self, sizes: Sequence[ModelSize], told: Callable[[int, int], None]) -> Solution:
        rejected: list[tuple[str, str]] = []
        measured = [size for each in sizes if (size := self._measured(each, rejected)) is not None]
        if not measured:
            raise Unsolvable("no size can be planned: " + "; ".join(map(": ".join, rejected)))
        places = [(size, offer, nodes) for size in measured for offer in self.offers for nodes in offer.counts()]
        machines = {offer.name: self._hardware(measured, offer, rejected) for offer in self.offers}
        looser = RunLimits(
            money=None if self.limits.money is None else self.limits.money / (2 - LOOSER),
            seconds=None if self.limits.seconds is None else self.limits.seconds * LOOSER,
        )

        def bound(place: tuple[ModelSize, MachineOffer, int], limits: RunLimits) -> float:
            size, offer, nodes = place
            hardware = machines[offer.name]
            if hardware is None:
                return inf
            peak = max(hardware.flops or 0.0, hardware.fp8_flops or 0.0) * max(hardware.efficiency)
            tokens = limits.time(offer.rate(nodes)) * peak * nodes * offer.devices / size.flops
            return self.law.fitted.loss(size.parameters, tokens) if tokens else inf

        points: list[SolvePoint] = []
        best, left_out = inf, 0
        ordered = sorted((place for place in places if bound(place, looser) < inf), key=lambda x: bound(x, self.limits))
        for number, place in enumerate(ordered):
            told(number, len(ordered))
            # What the best run would be with a looser limit is found among the same points.
            if bound(place, looser) >= best:
                left_out += 1
                continue
            point = self._point(*place, rejected)
            if point is not None:
                points.append(point)
                outcome = point.outcome(self.limits, self.law)
                best = min(best, inf if outcome is None else outcome.loss)
        outcomes = self._outcomes(points, self.limits)
        if not outcomes:
            why = f": {rejected[0][0]}: {rejected[0][1]}" if rejected else ": the limits end before the first step"
            raise Unsolvable(f"no size on any of the machines trains within the limits{why}")
        compiled = plan_from_spec(self.path, (*self.sets, *outcomes[0].sets))
        if (plan := compiled.plan) is None:
            why = compiled.diagnostics.errors[0].message
            raise Unsolvable(f"the best run, of {plural(outcomes[0].steps, 'step')}, is refused: {why}")
        return Solution(
            best=outcomes[0],
            outcomes=tuple(outcomes),
            left_out=left_out,
            rejected=tuple(rejected),
            prices=tuple(self._prices(points, outcomes[0])),
            plan=plan,
        )

    def _outcomes(self, points: Sequence[SolvePoint], limits: RunLimits) -> list[RunOutcome]:
        found = [outcome for point in points if (outcome := point.outcome(limits, self.law)) is not None]
        return sorted(found, key=lambda each: (each.loss, each.cost or 0.0, each.seconds))

    def _prices(self, points: Sequence[SolvePoint], best: RunOutcome) -> Iterator[LimitPrice]:
        money, seconds, offer = self.limits.money, self.limits.seconds, best.point.offer

        def with_limits(text: str, limits: RunLimits) -> LimitPrice:
            return LimitPrice.of(text, best.loss - self._outcomes(points, limits)[0].loss)

        more = f"{LOOSER - 1:.0%}"
        if money is not None:
            yield with_limits(f"{more} more money", evolve(self.limits, money=money * LOOSER))
            yield with_limits(f"prices {more} lower", evolve(self.limits, money=money / (2 - LOOSER)))
        if seconds is not None:
            yield with_limits(f"{more} more time", evolve(self.limits, seconds=seconds * LOOSER))
        if best.point.nodes == offer.nodes:
            text, why = f"this size on one more node of {offer.name}", list[tuple[str, str]]()
            point = self._point(best.point.size, evolve(offer, nodes=offer.nodes + 1), offer.nodes + 1, why)
            outcome = None if point is None else point.outcome(self.limits, self.law)
            if outcome is None:
                yield LimitPrice(text, 0.0, why[0][1] if why else "no time for a step")
            else:
                yield LimitPrice.of(text, best.loss - outcome.loss)

    def _measured(self, size: ModelSize, rejected: list[tuple[str, str]]) -> ModelSize | None:
        """Return the size with its parameters and FLOPs, by its plan on the machines of the first offer on which it has
        one."""
        why = ""
        for offer in self.offers:
            for nodes in offer.counts():
                compiled = self._compiled(size.sets, offer, nodes)
                if compiled.plan is not None:
                    plan = compiled.plan
                    return evolve(size, parameters=plan.parameters.active, flops=plan.estimates.flops_per_token)
                why = why or compiled.diagnostics.errors[0].message
        rejected.append((size.name, why))
        return None

    def _hardware(
        self, sizes: Sequence[ModelSize], offer: MachineOffer, rejected: list[tuple[str, str]]
    ) -> Hardware | None:
        """Return the machines of an offer, by any plan on them. Raises Unsolvable if speed or memory is unknown."""
        why = "no size has a layout on it"
        for size in sizes:
            for nodes in offer.counts():
                compiled = self._compiled(size.sets, offer, nodes)
                if compiled.plan is not None:
                    hardware = compiled.plan.cluster
                    if hardware.flops is None or hardware.memory_bytes is None or compiled.plan.estimates.times is None:
                        raise Unsolvable(f"memory and speed of {offer.name} are unknown: use `cluster h100` or such")
                    return hardware
                why = compiled.diagnostics.errors[0].message
        rejected.append((offer.name, why))
        return None

    def _point(
        self, size: ModelSize, offer: MachineOffer, nodes: int, rejected: list[tuple[str, str]]
    ) -> SolvePoint | None:
        name = f"{size.name} on {plural(nodes, 'node')} of {offer.name}"
        chosen = (*self.sets, *size.sets, *machine_sets(offer, nodes))
        plain = self._compiled(size.sets, offer, nodes)
        if plain.plan is None:
            rejected.append((name, plain.diagnostics.errors[0].message))
            return None
        try:
            fit = search(load_spec(self.path, chosen).require(), plain.plan, best=1)
        except Unsearchable as error:
            raise Unsolvable(str(error)) from error
        if not fit.best:
            code, members = fit.reasons[0]
            rejected.append((name, "no layout fits in memory" if code == "memory" else members[0].rejected))
            return None
        layout = fit.best[0]
        plan = plan_from_spec(self.path, (*chosen, *layout.sets)).plan
        assert plan is not None
        return SolvePoint(size=size, offer=offer, nodes=nodes, layout=layout, plan=plan)

    def _compiled(self, own: Sequence[str], offer: MachineOffer, nodes: int) -> Compiled:
        loaded = load_spec(self.path, (*self.sets, *own, *machine_sets(offer, nodes)))
        if loaded.spec is None:
            return Compiled(None, loaded.diagnostics)
        return compile_plan(any_layout(evolve(loaded.spec, sweep=None)))


def _loaded(path: str | Path, sets: Sequence[str]) -> Spec:
    """Return the spec as declared. Raises Unsolvable for one that `xtrain check` refuses."""
    loaded = load_spec(path, sets)
    if loaded.spec is None:
        raise Unsolvable(f"{path}: {loaded.diagnostics.errors[0].message}; see `xtrain check`")
    if loaded.spec.serve is not None:
        raise Unsolvable(f"{path} describes a server, which is not trained to a loss")
    if loaded.spec.batch.ramp_from is not None:
        raise Unsolvable("steps of a batch with `ramp_from` differ in tokens: remove it from the spec")
    return loaded.spec


def _size(text: str) -> ModelSize:
    if not (sets := tuple(split(text))):
        raise Unsolvable("a size has no settings; write it as `model.dim=512,model.layers=8`")
    return ModelSize(name=text, sets=sets)


def _ladder(spec: Spec) -> list[ModelSize]:
    """Return the declared model in several widths, with heads of the same width and as many blocks for a width; only
    itself if it is read from a folder."""
    model = spec.model
    if model.folder is not None:
        return [ModelSize(name="the model", sets=())]
    own = {name: value for name in SCALED if isinstance(value := getattr(model, name, None), int)}
    sizes = []
    for factor in WIDTHS:
        widths = {name: value * factor for name, value in own.items()}
        if any(width.denominator != 1 for width in widths.values()):
            continue
        layers = max(1, round(model.layers * factor))
        sets = {**{name: int(width) for name, width in widths.items()}, "layers": layers}
        if factor == 1:
            sizes.append(ModelSize(name="as declared", sets=()))
        else:
            texts = tuple(f"model.{name}={value}" for name, value in sets.items())
            sizes.append(ModelSize(name=f"{sets['dim']} wide, {plural(layers, 'block')}", sets=texts))
    return sizes


def _offers(spec: Spec, table: Path | None) -> tuple[MachineOffer, ...]:
    if table is not None:
        return tuple(_read(table))
    given = spec.cluster
    if not CLUSTERS[given.preset].known:
        raise Unsolvable(
            "declare the machines: `cluster h100 { nodes = 8, devices = 8, price = 2.5 }`, or --offers FILE"
        )
    nodes = spec.launch.nodes if isinstance(given.nodes, Auto) else given.nodes
    devices = spec.launch.ranks_per_node if isinstance(given.devices, Auto) else given.devices
    if isinstance(nodes, Auto) or isinstance(devices, Auto):
        raise Unsolvable("say how many machines there are: `cluster { nodes = …, devices = … }`")
    return (MachineOffer(name=given.preset, sets=(), nodes=nodes, devices=devices, price=given.price),)


def _read(path: Path) -> Iterator[MachineOffer]:
    """Yield the offers of a CSV file with the columns `COLUMNS`, and others, which are settings of `cluster`. Raises
    Unsolvable."""
    try:
        with open_regular(path) as file:
            lines = file.read(MOST_BYTES).decode().splitlines()
    except OSError as error:
        raise Unsolvable(f"{path} cannot be read: {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise Unsolvable(f"{path} is not a text file") from error
    rows = csv.DictReader(lines, skipinitialspace=True)
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise Unsolvable(f"{path} has no column {', '.join(missing)}; its first line is `{','.join(COLUMNS)}`")
    names: set[str] = set()
    for row in rows:
        where = f"{path}:{rows.line_num}"
        if None in row or None in row.values():
            raise Unsolvable(f"{where}: as many values as columns are needed: {', '.join(rows.fieldnames or ())}")
        preset = row["cluster"].strip()
        if preset not in CLUSTERS or not preset:
            raise Unsolvable(f"{where}: `{preset}` is no cluster; use one of {', '.join(filter(None, CLUSTERS))}")
        numbers = {}
        for name in ("devices", "nodes"):
            if not row[name].strip().isdecimal() or int(row[name]) < 1:
                raise Unsolvable(f"{where}: {name} is `{row[name]}`, not a whole number above 0")
            numbers[name] = int(row[name])
        try:
            price = float(row["price"])
        except ValueError:
            price = 0.0
        if not 0 < price < inf:
            raise Unsolvable(f"{where}: price is `{row['price']}`, not an amount above 0")
        others = tuple(f"cluster.{name}={row[name]}" for name in row if name not in COLUMNS and row[name].strip())
        name = preset if preset not in names else f"{preset} of line {rows.line_num}"
        names.add(name)
        yield MachineOffer(
            name=name, sets=(f"cluster={preset}", f"cluster.price={price!r}", *others), price=price, **numbers
        )
    if not names:
        raise Unsolvable(f"{path} has no offers below its first line")
