"""What a step is made of, counted position by position on every rank, and held against what the run says of it.

A rank notes its own part of the rows that it reads. A document of s positions is worth s² = Σ (2p + 1) over its
positions p from 0, however they are dealt to ranks. The first step is in no rate.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from projects import records
from rank_mutations import rebind

from xtrain.plan.plan import Plan
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.nn.batch import Step

NAMES = ("valid_tokens", "tokens", "pairs", "laid_pairs", "positions")


def note(directory: Path, rank: int) -> None:
    """From now on write a line a step into `counts/<rank>.jsonl`; ranks that read no rows write none."""
    folder = directory / "counts"
    folder.mkdir(exist_ok=True)
    path = folder / f"{rank}.jsonl"

    def change(call: Any, given: dict[str, Any]) -> Any:
        def run(step: Step) -> None:
            call(step)
            if step.microbatches:
                found = [sum(each) for each in zip(*map(_of, step.microbatches), strict=True)]
                with path.open("a") as file:
                    file.write(json.dumps({"step": step.index + 1, **dict(zip(NAMES, found, strict=True))}) + "\n")

        return run

    rebind("step.fetch", change)


def _of(batch: Microbatch) -> list[int]:
    assert batch.labels_BS is not None
    worth = 2 * batch.positions_BS + 1
    counts = ((batch.labels_BS != IGNORE_INDEX).sum(), batch.real_BS.sum(), worth[batch.real_BS].sum(), worth.sum())
    return [*map(int, counts), batch.positions_BS.numel()]


def stray_counts(plan: Plan, directory: Path) -> list[str]:
    """What records of steps say otherwise than a count of all positions of all ranks does, in words."""
    noted = whole_counts(plan, directory)
    work, world = plan.estimates.work, plan.mesh.world_size
    stray, seen = [], 0
    for record in records(directory, "metrics"):
        if "loss" not in record:
            continue
        steps = range(seen + 1, record["step"] + 1)
        window = {name: sum(noted[step][name] for step in steps) for name in NAMES}
        seen = record["step"]
        valid = window["valid_tokens"]
        if (timed := [step for step in steps if step > 1]) == []:
            if record["valid_tokens"] != valid or record.keys() & {"step_seconds", "tflops", "mfu"}:
                stray.append(f"step {seen}: {record}, counted {valid} valid tokens, and no time is to be told")
            continue
        window = {name: sum(noted[step][name] for step in timed) for name in NAMES}
        seconds = record["step_seconds"] * len(timed)
        flops = work.position * window["tokens"] + work.pair * window["pairs"]
        causal = work.position * window["tokens"] + work.pair * (window["pairs"] + window["tokens"]) / 2
        again, pair_again = work.position_again, work.pair_again
        done = (work.position + again) * window["positions"] + (work.pair + pair_again) * window["laid_pairs"]
        expected = {
            "valid_tokens": valid,
            "valid_tokens_per_second": window["valid_tokens"] / seconds,
            "tflops": flops / seconds / world / 1e12,
        }
        peak = plan.node("setup.observe").args["peak_flops"]
        if peak is not None:
            whole = seconds * world * peak
            expected |= {"mfu": flops / whole, "mfu_causal": causal / whole, "hfu": done / whole}
        for name, value in expected.items():
            if record.get(name) != pytest.approx(value, rel=1e-9):
                stray.append(f"step {record['step']}: {name} is {record.get(name)}, counted {value}")
    assert seen == max(noted), "every step is in a record"
    return stray


def whole_counts(plan: Plan, directory: Path) -> dict[int, dict[str, int]]:
    """By step the sums over all ranks; pipeline stages and tensor-parallel peers have the same rows."""
    found: dict[int, dict[str, int]] = {}
    for rank in range(plan.mesh.world_size):
        at = plan.mesh.coordinates(rank)
        if at["pp"] == at["tp"] == 0:
            for line in map(json.loads, (directory / "counts" / f"{rank}.jsonl").read_text().splitlines()):
                sums = found.setdefault(line["step"], dict.fromkeys(NAMES, 0))
                for name in NAMES:
                    sums[name] += line[name]
    assert found
    return found
