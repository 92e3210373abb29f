"""Proof of a plan's layout: its small experiment on several ranks against one process, and the collectives of the plan
at full size."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from attrs import evolve, frozen

from xtrain.dsl.schema.model import Model
from xtrain.plan.certificate import Certificate, Changed, ComparedLayout
from xtrain.plan.data import own_modules
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import source_fingerprint, to_json
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.small_experiment import (
    NoSmallExperiment,
    SmallExperiment,
    SmallLayout,
    small_experiment,
    small_teacher,
    spec_of,
)
from xtrain.planner.review.small_scope import SAVED
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.locks import scratch_folder
from xtrain.runtime.inspect.collective_order import issued_alike
from xtrain.runtime.inspect.gaps import TOLERANCE, NotComparable, gaps
from xtrain.runtime.inspect.rank_jobs import Outcome, RankForks, RanksFailed
from xtrain.runtime.inspect.small_data import write_records
from xtrain.runtime.store.certificates import subject_of
from xtrain.version import __version__

MOST_RANKS: Final = 8
TIMEOUT: Final = 300.0
Told = Callable[[str], object]


def prove(
    plan: Plan, *, most_ranks: int = MOST_RANKS, told: Told = lambda line: None, ranks: RankForks | None = None
) -> Certificate:
    """Prove the layout of a plan. told: called with a line at the beginning of each part. ranks: that execute the small
    experiment; by default forks of a process of its own.

    Raises EnvironmentFault (X741) if the plan has no small experiment.
    """
    begin = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("prove"))
        # Left last: an exception here ends the ranks, and with them the thread that waits for them.
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        forks = stack.enter_context(RankForks()) if ranks is None else ranks
        started = _Ranks(forks, folder, told)
        small, plans = _small(plan, started, most_ranks)  # or a refusal, for which no ranks are needed
        first = {} if ranks is not None or own_modules(plan) else _rehearsal(plan, started, small)
        # The ranks and the trace have a core each.
        compared: Future[list[ComparedLayout]] = pool.submit(_compare, started, small, plans, first)
        issued = issued_alike(plan, told, plans[1])
        results = compared.result()
    untraced = ["the order of collectives at full size"] if issued.reason and plan.mesh.world_size > 1 else []
    return Certificate(
        plan=plan.id,
        subject=subject_of(plan),
        name=plan.name,
        version=__version__,
        code=source_fingerprint(),
        own=own_modules(plan),
        torch=version("torch"),
        steps=plans[0].timeline.steps or 0,
        saved=SAVED,
        tolerance=TOLERANCE["fp64"],
        compared=tuple(results),
        issued=issued,
        changed=tuple(Changed(setting=e.setting, before=e.before, after=e.after) for e in small.shrunken),
        uncovered=(*untraced, *small.uncovered),
        seconds=time.monotonic() - begin,
    )


def _small(plan: Plan, ranks: "_Ranks", most_ranks: int) -> tuple[SmallExperiment, list[Plan]]:
    """Return the small experiment with its data in the ranks' folder, and the plans of one process, the layouts, and
    the layout that resumes."""
    folder, files, made_up = ranks.folder, {}, []
    try:
        spec = spec_of(plan)
    except NoSmallExperiment as none:
        raise EnvironmentFault("X741", f"{none}; {none.hint}") from None
    for name, dataset in spec.datasets.items():
        files[name] = str(folder / f"{name}.jsonl")
        if not write_records(plan, name, dataset, Path(files[name])):
            made_up.append(name)
    teacher = None if spec.loss.learns_from is None else str(folder / "teacher")
    if teacher is not None:
        layout = small_teacher(plan, files, teacher)
        try:
            ranks.run(_planned(plan, layout), layout, "teacher")
        except RanksFailed as failure:
            raise EnvironmentFault("X741", f"a small teacher cannot be made: {failure}") from None
    try:
        code = None if spec.model.folder is None or not spec.model.code else _small_code(spec.model, folder / "model")
        small = small_experiment(plan, files, most_ranks, teacher, code)
    except NoSmallExperiment as none:
        raise EnvironmentFault("X741", f"{none}; {none.hint}") from None
    if made_up:
        small = evolve(small, uncovered=(*small.uncovered, f"the data of {', '.join(made_up)}: records are made up"))
    return small, [_planned(plan, each) for each in (small.alone, *small.layouts, small.other)]


def _rehearsal(plan: Plan, ranks: "_Ranks", small: SmallExperiment) -> dict[str, str]:
    """Return what a job needs so that its ranks find a step rehearsed, if the layout of the rehearsal has a plan."""
    try:
        planned = _planned(plan, small.rehearsal)
    except EnvironmentFault:
        return {}
    file = ranks.folder / "rehearsal.json"
    file.write_text(json.dumps(to_json(planned)))
    return {"rehearsal": str(file)}


def _small_code(model: Model, folder: Path) -> str:
    """Write the config of a small model that transformers' code computes, with all kinds of its layers; return its
    folder. Raises NoSmallExperiment."""
    from xtrain.dsl.checking.model_code import read_config
    from xtrain.runtime.inspect.small_model import small
    from xtrain.runtime.nn.model_code import build, config_of

    assert model.folder is not None
    hint = "prove a plan of a model that transformers' code computes"
    if model.code == "remote":
        raise NoSmallExperiment("modeling files of a folder are not shrunk", hint)
    content = read_config(model.folder)
    with torch.device("meta"):
        whole = build(config_of(content))
    found = small(content, whole)
    if found is None:
        raise NoSmallExperiment(f"no small model has all kinds of layers of {model.folder}", hint)
    config = found.model.config
    config.architectures = [type(found.model).__name__]
    config.save_pretrained(folder)
    return str(folder)


def _planned(plan: Plan, layout: SmallLayout) -> Plan:
    compiled = plan_from_text(layout.text, plan.spec, (), layout.world)
    if compiled.plan is None:
        error = next(iter(compiled.diagnostics.errors))
        message = f"the small experiment on {layout.name} has no plan: {error.message}"
        raise EnvironmentFault("X741", f"{message}; {error.hint}" if error.hint else message)
    return compiled.plan


@frozen
class _Ranks:
    """Ranks that execute plans in a folder."""

    forks: RankForks
    folder: Path
    told: Told

    def run(self, plan: Plan, layout: SmallLayout, name: str, more: Mapping[str, str] | None = None) -> Outcome:
        self.told(f"{layout.name}: {name}")
        # Ranks work in the folder; the author's modules lie next to the spec.
        placed = evolve(plan, spec=str(Path(plan.spec).absolute()))
        return self.forks.run(placed, self.folder, name=name, timeout=TIMEOUT, more=more)


def _compare(
    ranks: _Ranks, small: SmallExperiment, plans: list[Plan], first: Mapping[str, str]
) -> list[ComparedLayout]:
    """Return the comparison of each layout with one process, and of the one that resumes the first layout. first: keys
    of the first job."""
    try:
        alone = ranks.run(plans[0], small.alone, "alone", first)
    except RanksFailed as failure:
        return [_failed(small.alone, str(failure), resumed=False)]
    if not all(norm > 0 for _, _, norm in alone.curve):
        return [_failed(small.alone, "a step has no gradient, so that nothing could differ", resumed=False)]
    found = []
    for number, (layout, plan) in enumerate(zip(small.layouts, plans[1:-1], strict=True)):
        found.append(_compared(ranks, plan, layout, alone, f"layout-{number}", resumed=False))
    checkpoint = f"ckpt-s{SAVED:012d}"
    source = ranks.folder / "jobs" / "layout-0" / "checkpoints" / checkpoint
    if source.is_dir():
        target = ranks.folder / "jobs" / "resumed" / "checkpoints"
        shutil.copytree(source, target / checkpoint)
        (target / "latest").write_text(f"{checkpoint}\n")
        found.append(_compared(ranks, plans[-1], small.other, alone, "resumed", resumed=True))
    elif not found[0].problem:
        found.append(_failed(small.other, f"{small.layouts[0].name} wrote no checkpoint", resumed=True))
    return found


def _compared(
    ranks: _Ranks, plan: Plan, layout: SmallLayout, alone: Outcome, name: str, *, resumed: bool
) -> ComparedLayout:
    try:
        ours = ranks.run(plan, layout, name)
        first = min((step for step, *_ in ours.curve), default=0)
        if resumed and first < SAVED:
            return _failed(layout, f"it did not begin with the checkpoint of step {SAVED}", resumed=True)
        past = sum(step < first for step, *_ in alone.curve)
        theirs = evolve(alone, curve=alone.curve[past:], routing=alone.routing[past:])
        gap = gaps(ours, theirs)
    except (RanksFailed, NotComparable) as problem:
        return _failed(layout, str(problem), resumed=resumed)
    return ComparedLayout(
        layout=layout.name,
        ranks=layout.world,
        resumed=resumed,
        loss=gap.loss,
        norm=gap.norm,
        evaluation=gap.eval,
        routing=gap.routing,
        tensor=gap.worst_tensor,
        worst=max(gap.tensors, key=lambda tensor: gap.tensors[tensor]),
        seconds=gap.seconds,
    )


def _failed(layout: SmallLayout, problem: str, *, resumed: bool) -> ComparedLayout:
    return ComparedLayout(
        layout=layout.name, ranks=layout.world, resumed=resumed, loss=0.0, norm=0.0, evaluation=0.0, routing=0.0,
        tensor=0.0, worst="", seconds=0.0, problem=problem,
    )  # fmt: skip
