"""`xtrain prove SPEC|PLAN`: compute a small experiment of the same layout on ranks of this machine, and certify it."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import Refused, add_sets, counted, end_by_exception, number_of, ranks, say_own_code

if TYPE_CHECKING:
    from xtrain.plan.certificate import Certificate, ComparedLayout

HELP = "certify that a layout computes what one process computes"
DESCRIPTION = (
    "Shrink the plan of SPEC to a few ranks and small sizes, with its axes, pipeline schedule, recomputation, loss and "
    "own functions; train it for some steps in fp64 on gloo ranks and in one process; compare losses, gradient norms, "
    "parameters and optimizer state; resume on another layout; and compare the collectives that ranks issue in the "
    "plan at full size. Write a certificate."
)
EPILOG = """\
examples:
  xtrain prove specs/two_ranks_cpu.xtrain
  xtrain prove plan.json --out certificate.json
  xtrain run plan.json --require-certificate certificate.json

exit codes: 0 certified, 1 the layout computes something else, 2 the spec is invalid, 3 the plan cannot be proved
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="a spec (*.xtrain), or a saved plan (*.json)")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as in the spec)")
    add_sets(parser)
    parser.add_argument(
        "--ranks",
        type=number_of("ranks"),
        default=8,
        metavar="N",
        help="the most ranks to start at a time; a plan with more axes is proved in parts (default: 8)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file of the certificate (default: certificates/PLAN.json below workspace.root)",
    )
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain prove`. The help lists the exit statuses."""
    from xtrain.planner.load import plan_from_path

    compiled = plan_from_path(arguments.spec, arguments.sets, arguments.world, counted)
    if not compiled.report_to(sys.stderr):
        return 2
    assert compiled.plan is not None
    say_own_code(compiled.plan, arguments.spec)
    from xtrain.runtime.inspect.prove import prove
    from xtrain.runtime.store.certificates import certificate_path

    path = arguments.out or certificate_path(compiled.plan)
    _check_place(path)  # before minutes of work
    end_by_exception()  # a terminated proof removes its files
    certificate = prove(compiled.plan, most_ranks=arguments.ranks, told=_tell)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    _write(certificate, path)
    sys.stdout.write(certificate.text() if arguments.json else page(certificate))
    if not arguments.json:
        print(f"{'certificate' if certificate.holds else 'findings'}: {path}")
    return 0 if certificate.holds else 1


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line} … ", end="", file=sys.stderr, flush=True)


def _check_place(path: Path) -> None:
    """Raise Refused (3) if a file cannot be written at a path."""
    parent = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir():
        raise Refused(3, f"error: {path} is a folder; give the path of a file with --out")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        reason = f"{parent} is no folder that you may write to"
        raise Refused(3, f"error: {path} cannot be written: {reason}; give another file with --out")


def _write(certificate: "Certificate", path: Path) -> None:
    """Write the certificate, and its page next to it. Raises Refused."""
    from xtrain.runtime.base.files import write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, certificate.text())
        write(path.with_suffix(".txt"), page(certificate))
    except OSError as error:
        raise Refused(3, f"error: {path} cannot be written: {error.strerror}") from None


def page(certificate: "Certificate") -> str:
    """Return the page of a certificate for people."""
    from xtrain.text.units import plural, table

    c = certificate
    verdict = "computes what one process computes" if c.holds else "does NOT compute what one process computes"
    lines = [
        f"{c.name}: its layout {verdict}",
        f"plan {c.plan} · xtrain {c.version}, sources {c.code} · torch {c.torch}"
        + "".join(f" · {name} {digest}" for name, digest in c.own.items()),
        f"{c.steps} steps in fp64, and from the checkpoint of step {c.saved} on another layout; differences above "
        f"{c.tolerance:g} are faults; {c.seconds:.0f} s",
        "",
        *table(
            ("layout", "loss", "norm", "evaluation", "routing", "worst tensor"), [_row(e) for e in c.compared], texts=1
        ),
        "",
    ]
    if c.issued.reason:
        lines.append(f"collectives were not traced: {c.issued.reason}")
    else:
        lines.append(
            f"collectives of the plan at full size: {c.issued.calls:,} calls of ranks "
            f"{', '.join(f'{rank:,}' for rank in c.issued.ranks)}, "
            + ("all alike" if not c.issued.problems else plural(len(c.issued.problems), "difference"))
        )
    if c.faults:
        lines += ["", "FAULTS", *(f"  {line}" for fault in c.faults for line in fault.splitlines())]
    lines += ["", "SHRUNK", *(f"  {each.setting}: {each.before} → {each.after}" for each in c.changed)]
    lines += ["", "NOT COVERED", *(f"  {each}" for each in c.uncovered)]
    return "\n".join(lines) + "\n"


def _row(each: "ComparedLayout") -> tuple[str, ...]:
    name = f"{each.layout}, resumed" if each.resumed else each.layout
    if each.problem:
        return (name, *["–"] * 5)
    gaps = (each.loss, each.norm, each.evaluation, each.routing, each.tensor)
    return (name, *(f"{gap:.0e}" for gap in gaps))
