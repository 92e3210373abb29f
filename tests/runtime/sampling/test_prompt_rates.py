"""Prompts that are drawn by their success: weights, draws and checkpoints."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from xtrain.runtime.feed.loader import StepRows
from xtrain.runtime.nn.batch import SampledGroup, Step
from xtrain.runtime.sampling.prompts import PromptRates, keep_rates, remember
from xtrain.runtime.sampling.trained_run import alone

ROWS = 4


def loader(rows: int = ROWS) -> Any:
    """Step s takes the rows 100 + 4 s to 103 + 4 s of its only dataset, in two microbatches."""

    def taken(step: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(rows, np.int64), np.arange(rows) + 100 + rows * step

    def step_rows(step: int) -> StepRows:
        datasets, own = taken(step)
        shape = (2, rows // 2)
        return StepRows(datasets.reshape(shape), own.reshape(shape), (np.arange(rows) + rows * step).reshape(shape))

    return SimpleNamespace(
        datasets=[SimpleNamespace(name="d")],
        curriculum=SimpleNamespace(rows_before=lambda step: rows * step),
        taken=taken,
        step_rows=step_rows,
        read=lambda taken: taken.rows.tolist(),
    )


def rates(known: dict[int, float], *, by: str = "unsolved", share: float = 0.5, seed: int = 1) -> PromptRates:
    found = keep_rates(alone(torch.device("cpu")), share, by, seed)
    found.rates = {("d", row): rate for row, rate in known.items()}
    return found


@pytest.mark.parametrize(("by", "weights"), [
    ("unsolved", {1: 0.75, 2: 0.5, 3: 0.0, 4: 1.0}), ("learnable", {1: 0.1875, 2: 0.25, 3: 0.0, 4: 0.0}),
])  # fmt: skip
def test_prompts_are_drawn_in_proportion_to_their_weight(by: str, weights: dict[int, float]):
    known = {1: 0.25, 2: 0.5, 3: 1.0, 4: 0.0}
    first: Counter[int] = Counter()
    for step in range(3000):
        parts: Any = rates(known, by=by, share=0.25).rows(loader(), step)
        (drawn, *own), rest = parts
        assert [*own, *rest] == [101 + 4 * step, 102 + 4 * step, 103 + 4 * step]
        first[drawn] += 1
    whole = sum(weights.values())
    for row, weight in weights.items():
        assert first[row] / 3000 == pytest.approx(weight / whole, abs=0.03)
        assert weight or not first[row]


def test_a_step_has_no_prompt_twice_and_draws_fewer_while_fewer_are_known():
    for step in range(20):
        both = rates({1: 0.0, 2: 0.5, 100 + 4 * step: 0.0}, share=0.75)
        (first, second), rest = both.rows(loader(), step)
        assert {first, second} == {1, 2} and rest == [102 + 4 * step, 103 + 4 * step] and both.drawn == 2
    none = rates({1: 1.0})
    assert none.rows(loader(), 0) == [[100, 101], [102, 103]] and none.drawn == 0


def test_what_succeeded_is_remembered_and_part_of_checkpoints():
    found = rates({7: 0.25, 8: 1.0})
    drawn = found.rows(loader(), 3)[0]
    assert drawn == [7, 113]  # all completions of prompt 8 have succeeded
    prompts: list[Any] = [SimpleNamespace(place=place) for place in (12, 13, 14, 15)]
    given = [np.array(each, np.float64) for each in ([1, 0.5], [0, 0], [2, 1], [0.9, 3])]
    groups = [SampledGroup(prompt, (), rewards) for prompt, rewards in zip(prompts, given, strict=True)]
    step = Step(index=3, groups=[groups[:2], groups[2:]])
    remember(found, solved=1.0)(step)
    assert found.rates == {("d", 7): 0.5, ("d", 8): 1.0, ("d", 113): 0.0, ("d", 114): 1.0, ("d", 115): 0.5}
    assert step.metrics == {"rollout/solved": 0.5, "rollout/replayed": 0.25}
    later = rates({5: 0.5})
    later.take(found.packed(4))
    assert later.rates == found.rates
    assert [later.rows(loader(), step) for step in (4, 5)] == [found.rows(loader(), step) for step in (4, 5)]
    later.take(None)
    assert later.rates == {} and later.packed(0) is None
