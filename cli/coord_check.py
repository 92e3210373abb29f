"""`xtrain coord-check SPEC`: sizes of activations of models of several widths or depths in the first steps."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xtrain.cli.verb import Refused, add_sets, end_by_exception, number_of

if TYPE_CHECKING:
    from xtrain.plan.plan import Plan
    from xtrain.runtime.inspect.coordinates import Sizes

HELP = "check that activations keep their size when the model grows"
DESCRIPTION = (
    "Train models of several widths, or depths, for a few steps on this machine, and compare the mean absolute values "
    "of embedding, first and last block, and logits after the last step. Under `parametrization` they must not grow "
    "with the model; widths of heads stay, and numbers of heads and widths of feed-forward layers grow in proportion."
)
EPILOG = """\
examples:
  xtrain coord-check base.xtrain --widths 64 128 256 512
  xtrain coord-check base.xtrain --depths 2 4 8 16 --svg sizes.svg

exit codes: 0 no size grows, 1 one grows, 2 the spec or a size is invalid, 3 a run failed
"""
# Exponent of growth from which on a size depends on the model: ten times as wide, 1.6 times as large.
MOST: Final = 0.2
SECONDS: Final = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="a .xtrain spec")
    sizes = parser.add_mutually_exclusive_group()
    size = number_of("features")
    sizes.add_argument(
        "--widths", type=size, nargs="+", metavar="D", help="default: half, one, two and four times `dim`"
    )
    sizes.add_argument("--depths", type=number_of("layers"), nargs="+", metavar="L", help="numbers of layers instead")
    parser.add_argument("--steps", type=number_of("steps"), default=5, metavar="N", help="steps of each (default 5)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="save the plot")
    parser.add_argument("--json", action="store_true", help="print only the sizes in every step, as JSON")
    add_sets(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain coord-check`. The help lists the exit statuses."""
    what, plans = _plans(arguments)
    end_by_exception()
    from xtrain.runtime.base.locks import scratch_folder
    from xtrain.runtime.inspect.coordinates import measure
    from xtrain.runtime.inspect.rank_jobs import RanksFailed

    def tell(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line} … ", end="", file=sys.stderr, flush=True)

    with scratch_folder("coord-check") as folder:
        try:
            found = measure(plans, folder, tell, SECONDS)
        except RanksFailed as failure:
            raise Refused(3, f"xtrain coord-check: {failure}") from None
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    growth = {
        part: _exponent({size: sizes[part][-1] for size, sizes in found.items()}) for part in next(iter(found.values()))
    }
    grown = [part for part, exponent in growth.items() if not exponent <= MOST]
    if arguments.json:
        print(json.dumps({"over": what, "steps": arguments.steps, "sizes": found, "growth": growth}))
    else:
        print("\n".join(_page(what, found, growth, arguments.steps)))
    if arguments.svg is not None:
        _save(arguments.svg, what, found)
    return 1 if grown else 0


def _plans(arguments: argparse.Namespace) -> tuple[str, dict[int, "Plan"]]:
    """Return `width` or `depth`, and the plan of each size. Raises Refused."""
    from xtrain.dsl.load import load_spec
    from xtrain.dsl.spec_text import resolved_text
    from xtrain.planner.compile import compile_plan
    from xtrain.planner.review.sized import Unsized, sized

    loaded = load_spec(arguments.spec, arguments.sets)
    if loaded.spec is None:
        raise Refused(2, loaded.diagnostics.render(color=False).rstrip())
    if loaded.spec.serve is not None:
        raise Refused(2, "xtrain coord-check: this is a server spec, whose clients train")
    whole = compile_plan(loaded.spec)
    if whole.plan is None:
        raise Refused(2, whole.diagnostics.render(color=False).rstrip())
    arch, depths = whole.plan.architecture, arguments.depths
    if (
        not arch.has_logits
        or "code" in arch.own
        or loaded.spec.model.folder is not None
        or loaded.spec.rollout is not None
    ):
        raise Refused(
            2, "xtrain coord-check: only native language models that start from drawn weights have sizes to compare"
        )
    sizes = sorted({*(depths or arguments.widths or (arch.dim // 2, arch.dim, 2 * arch.dim, 4 * arch.dim))})
    if len(sizes) < 2:
        raise Refused(2, "xtrain coord-check: one size shows no growth; name two or more")
    plans: dict[int, Plan] = {}
    for size in sizes:
        try:
            spec = sized(loaded.spec, arch, steps=arguments.steps, **{"depth" if depths else "width": size})
        except Unsized as error:
            raise Refused(2, f"xtrain coord-check: {error}") from None
        compiled = compile_plan(spec, world=1, spec_text=resolved_text(spec))
        if compiled.plan is None:
            raise Refused(2, compiled.diagnostics.render(color=False).rstrip())
        plans[size] = compiled.plan
    return "depth" if depths else "width", plans


def _exponent(values: Mapping[int, float]) -> float:
    """Return the slope of the line of least squares through the logarithms of sizes and values."""
    points = [(math.log(size), math.log(value)) if value > 0 else (0.0, math.nan) for size, value in values.items()]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def _page(what: str, found: Mapping[int, "Sizes"], growth: Mapping[str, float], steps: int) -> list[str]:
    from xtrain.text.units import plural, table

    rows = [
        (part, *(f"{sizes[part][-1]:.3g}" for sizes in found.values()), f"{what}^{exponent:.2f}")
        for part, exponent in growth.items()
    ]
    head = (f"mean |x| in step {steps}", *(f"{what} {size:,}" for size in found), "grows as")
    grown = [part for part, exponent in growth.items() if not exponent <= MOST]
    verdict = f"grows with the {what}: {', '.join(grown)}" if grown else f"no part grows with the {what}"
    note = f"{verdict} (exponents above {MOST:g} count, after {plural(steps, 'step')})"
    return [*table(head, rows, texts=1), "", note]


def _save(path: Path, what: str, found: Mapping[int, "Sizes"]) -> None:
    """Write the plot as SVG. Raises Refused."""
    import numpy as np

    from xtrain.tui.curves.canvas import Line
    from xtrain.tui.curves.picture import standalone
    from xtrain.tui.curves.viewport import Viewport

    over = np.log2(np.array(list(found), dtype=np.float64))
    parts = next(iter(found.values()))
    lines = [Line(part, over, np.array([sizes[part][-1] for sizes in found.values()])) for part in parts]
    text = standalone(lines, Viewport(log=True), title="mean |x|", x_label=f"log₂ {what}", x_unit="number")
    try:
        path.write_text(text or "", encoding="utf-8")
    except OSError as error:
        raise Refused(2, f"xtrain coord-check: {path} cannot be written: {error.strerror}") from None
