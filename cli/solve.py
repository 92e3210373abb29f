"""`xtrain solve SPEC --law FILE`: the run with the least predicted loss for money or time."""

import argparse
import json
import re
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from xtrain.cli.verb import Refused, above_zero, add_sets, colored

if TYPE_CHECKING:
    from xtrain.planner.review.solve import RunOutcome, Solution

HELP = "find the size, tokens, machines and layout of the least predicted loss for money or time"
DESCRIPTION = (
    "Search model sizes, machines and layouts for the run with the least loss that a scaling law predicts, such that "
    "it costs at most --budget and ends before --deadline. Prints the settings of this run, and how much loss a little "
    "more of each limit would save. Uses no device."
)
EPILOG = """\
examples:
  xtrain solve base.xtrain --law law.json --budget 5000 --deadline '3 d'
  xtrain solve base.xtrain --law law.json --budget 5000 --offers offers.csv
  xtrain solve base.xtrain --law law.json --deadline '12 h' --size model.dim=512,model.layers=8 --size model.dim=768

a file of offers, with the price of a device for an hour; further columns are settings of `cluster`:
  cluster, devices, nodes, price, mtbf
  h100, 8, 16, 2.49, 50000 h
  a100, 8, 32, 1.29, 50000 h
"""
SHOWN = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="a spec (*.xtrain): what does not change")
    parser.add_argument(
        "--law", type=Path, metavar="FILE", required=True, help="a law from `xtrain fit-law --out FILE`"
    )
    parser.add_argument(
        "--budget",
        type=above_zero("an amount of money"),
        metavar="AMOUNT",
        help="most money, in the unit of the prices",
    )
    parser.add_argument("--deadline", type=_seconds, metavar="TIME", help="longest time, such as '3 d' or '12 h'")
    parser.add_argument("--offers", type=Path, metavar="FILE", help="machines as CSV (default: `cluster` of the spec)")
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="SETTINGS",
        help="settings of a size, comma-separated; may be repeated (default: the model at 1/4 to 4 times its width)",
    )
    add_sets(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain solve`. Exit status: 0 a run was found, 2 there is none, or an argument is invalid."""
    from xtrain.planner.review.solve import RunLimits, Unsolvable, solve
    from xtrain.records.law import LawError, ScalingLaw

    limits = RunLimits(money=arguments.budget, seconds=arguments.deadline)
    if limits.money is None and limits.seconds is None:
        raise Refused(2, "error: give --budget, --deadline or both: without a limit more tokens are always better")
    try:
        law = ScalingLaw.read(arguments.law)
        found = solve(
            arguments.spec,
            law,
            limits,
            sets=arguments.sets,
            sizes=arguments.size,
            offers=arguments.offers,
            told=_tell,
        )
    except (LawError, Unsolvable) as problem:
        raise Refused(2, f"error: {problem}") from None
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    beyond = law.beyond(found.best.point.size.parameters, found.best.tokens)
    if arguments.json:
        print(json.dumps(_as_json(found, law.metric, beyond), indent=2))
    else:
        _print(found, arguments, law.metric, beyond)
    return 0


def _seconds(text: str) -> float:
    from xtrain.dsl.syntax.lexer import OTHER_WORDS
    from xtrain.dsl.values import UNITS

    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", text)
    unit = UNITS.get(OTHER_WORDS.get(match[2], match[2])) if match else None
    try:
        if match is None or unit is None or unit[0] != "seconds" or not (value := float(match[1])) > 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a time; write it as in '3 d', '12 h' or '90 min'") from None
    return value * unit[1]


def _limits(arguments: argparse.Namespace) -> str:
    from xtrain.text.units import seconds_text

    money, seconds = arguments.budget, arguments.deadline
    parts = [] if money is None else [f"a budget of {money:,g}"]
    return " and ".join([*parts, *([] if seconds is None else [f"a deadline of {seconds_text(seconds)}"])])


def _tell(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} combinations … ", end="", file=sys.stderr, flush=True)


def _as_json(found: "Solution", metric: str, beyond: float) -> dict[str, Any]:
    return {
        "metric": metric,
        "best": {**_numbers(found.best), "beyond": beyond, "plan": found.plan.id},
        "others": [_numbers(each) for each in found.outcomes[1:]],
        "left_out": found.left_out,
        "rejected": [{"name": name, "reason": reason} for name, reason in found.rejected],
        "prices": [{"limit": each.limit, "less": each.less, "why": each.why} for each in found.prices],
    }


def _numbers(outcome: "RunOutcome") -> dict[str, Any]:
    point = outcome.point
    return {
        "sets": list(outcome.sets),
        "parameters": point.size.parameters,
        "tokens": outcome.tokens,
        "steps": outcome.steps,
        "cluster": point.offer.name,
        "nodes": point.nodes,
        "devices": point.nodes * point.offer.devices,
        "layout": point.layout.name,
        "loss": outcome.loss,
        "interval": list(outcome.interval),
        "seconds": outcome.seconds,
        "cost": outcome.cost,
        "goodput": outcome.share,
        "save_seconds": outcome.save_seconds,
    }


def _print(found: "Solution", arguments: argparse.Namespace, metric: str, beyond: float) -> None:
    from xtrain.cli.plan_views import FAR
    from xtrain.records.law import SHARE
    from xtrain.text.page import Page
    from xtrain.text.units import amount_text, count_text, plural, seconds_text

    best, page = found.best, Page(color=colored())
    point = best.point
    searched = f"{plural(len(found.outcomes), 'combination')} searched, {found.left_out:,} cannot be better"
    page.heading("SOLVE", f"{_limits(arguments)}; {searched}")
    low, high = best.interval
    page.line(f"  {metric}  {best.loss:.4f}  {low:.4f} to {high:.4f} in {SHARE:.0%} of samples", "bold")
    if beyond >= FAR:
        page.line(
            f"  {beyond:.3g} times beyond the runs of the law: the interval does not cover errors of its form", "yellow"
        )
    cost = "" if best.cost is None else f", cost {amount_text(best.cost)}"
    page.described(
        [
            ("size", f"{point.size.name}: {count_text(point.size.parameters)} parameters used per token"),
            ("tokens", f"{count_text(best.tokens)}, {plural(best.steps, 'step')}"),
            ("machines", f"{plural(point.nodes, 'node')} of {point.offer.name} with {point.offer.devices} devices"),
            ("layout", f"{point.layout.name}"),
            ("time", f"{seconds_text(best.seconds)}{cost}"),
            *_saves(best),
        ]
    )
    if found.prices:
        page.heading("LIMITS", "how much less loss with")
        page.described([(each.limit, each.why or f"{each.less:.4f} nats") for each in found.prices])
    page.heading("THE NEXT", "the best of other combinations")
    rows: list[tuple[str, ...]] = [("loss", "parameters", "tokens", "machines", "layout", "time", "cost")]
    rows += map(_row, found.outcomes[1:SHOWN])
    page.table(rows, align=">>><<>>", styles=("bold",))
    if found.rejected:
        page.heading("RULED OUT", plural(len(found.rejected), "combination"))
        for name, reason in found.rejected[:SHOWN]:
            page.wrapped(reason, first=f"  {name}: ", rest="    ")
    sets = "".join(f" --set {quote(text)}" for text in (*arguments.sets, *best.sets))
    page.line()
    page.wrapped(f"xtrain plan {quote(arguments.spec)}{sets}", first="  look at it:  ", rest="    ")
    sys.stdout.write(str(page))


def _row(outcome: "RunOutcome") -> tuple[str, ...]:
    from xtrain.text.units import amount_text, count_text, seconds_text

    point = outcome.point
    return (
        f"{outcome.loss:.4f}",
        count_text(point.size.parameters),
        count_text(outcome.tokens),
        f"{point.nodes} × {point.offer.devices} {point.offer.name}",
        point.layout.name,
        seconds_text(outcome.seconds),
        "" if outcome.cost is None else amount_text(outcome.cost),
    )


def _saves(best: "RunOutcome") -> list[tuple[str, str]]:
    from xtrain.text.units import plural

    if best.save_seconds is None:
        return []
    times = best.point.plan.estimates.times
    assert times is not None
    every = max(1, round(best.save_seconds / times.step))
    return [("checkpoints", f"`every {plural(every, 'step')} checkpoint`: goodput {best.share:.1%}")]
