"""Run one layout and print how far it is from one process; ranks that fail show their tracebacks.

    python tests/support/try_layout.py --world 4 --model moe --set parallel.tp=2 --format fp64

Exits with 1 if a rank fails, a gap exceeds the tolerance, or a rank holds other parts than planned.
"""

import argparse
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from attrs import evolve
from forked_ranks import TIMEOUT, ForkedRanks, Mutation, RanksFailed
from trials import MODELS, TOLERANCE, Laboratory, NoPlan, Trial, gaps, stray_shapes


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, help="ranks (default: what the axes need)")
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--format", choices=TOLERANCE, default="fp64")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="of the layout alone")
    parser.add_argument("--both", action="append", default=[], help="a --set of the layout and of one process")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--clip", default="0.5", help="largest gradient norm, or none")
    parser.add_argument("--align", type=int, help="of one process (default: twice the plan's ring, if there is one)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT)
    parser.add_argument("--fault", nargs="+", metavar="WORD", help="of rank_mutations.py: name argument=value …")
    parser.add_argument("--keep", type=Path, help="folder for the run directories (default: one that is removed)")
    return parser.parse_args()


def try_layout(lab: Laboratory, arguments: argparse.Namespace) -> bool:
    sets = tuple(arguments.sets)
    trial = Trial(
        model=arguments.model,
        params=arguments.format,
        rows=arguments.rows,
        steps=arguments.steps,
        clip=arguments.clip,
        settings=tuple(arguments.both),
    )
    plan = lab.plan(trial, sets, arguments.world)
    ring = plan.mesh.size("ring")
    align = arguments.align or (2 * ring if ring > 1 else 1)
    print(" · ".join(f"{a.name} {a.size}" for a in plan.mesh.axes if a.size > 1) or "one rank", flush=True)
    mutation = read_fault(arguments.fault) if arguments.fault else None
    try:
        alone = lab.alone(evolve(trial, align=align))
        print(f"one process: {alone.seconds:.1f} s", flush=True)
        begin = time.monotonic()
        outcome = lab.run(trial, sets, plan.mesh.world_size, timeout=arguments.timeout, mutation=mutation)
    except RanksFailed as failure:
        print(failure)
        return False
    print(f"{plan.mesh.world_size} ranks: {time.monotonic() - begin:.1f} s")
    for (step, loss, norm), (_, loss_alone, norm_alone) in zip(outcome.curve, alone.curve, strict=True):
        print(f"step {step}: loss {loss:.12f} (alone {loss_alone:.12f}), norm {norm:.12f} (alone {norm_alone:.12f})")
    found = gaps(outcome, alone)
    print(f"gaps: loss {found.loss:.1e}, norm {found.norm:.1e}, eval {found.eval:.1e}, routing {found.routing:.1e}")
    limit = TOLERANCE[trial.params]
    for name, gap in sorted(found.tensors.items(), key=lambda item: -item[1])[:12]:
        print(f"  {gap:.1e} {name}{'' if gap <= limit else '  <<<'}")
    stray = stray_shapes(plan, outcome) if find_spec("xtrain.plan.mesh") else []
    print("\n".join(stray[:20]) or "every rank holds what was planned")
    return found.worst <= limit and not stray


def read_fault(words: list[str]) -> Mutation:
    pairs = (word.split("=", 1) for word in words[1:])
    return Mutation(words[0], **{name: int(value) if value.isdecimal() else value for name, value in pairs})


def main() -> int:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as temporary, ForkedRanks() as ranks:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            good = try_layout(Laboratory.open(folder.resolve(), ranks), arguments)
        except NoPlan as none:
            print(none)
            return 2
    print("equal" if good else "NOT EQUAL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
