"""Completions that wait for the steps that learn from them: what a checkpoint has of them, and when they do not fit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from xtrain.runtime.nn.batch import Completion, Prompt, SampledGroup
from xtrain.runtime.sampling.prompts import KeptCompletions, keep_completions, pack, unpacked
from xtrain.runtime.sampling.trained_run import alone


def prompt(place: int) -> Prompt:
    ids = np.array([256, 7, place], np.int64)
    return Prompt(ids=ids, text="?", answer="7", rest=ids[:0], values={}, dataset=-1, place=place)


def group(place: int, experts: np.ndarray | None = None) -> SampledGroup:
    one = Completion(tokens=[1, 2, place], logprobs=[-0.1, -0.2, -1 / 3], text="añ", cut=True, left_out=0.25)
    other = Completion(tokens=[5], logprobs=[-2.0], text="", cut=False)
    return SampledGroup(prompt(place), [evolve(one, experts=experts), evolve(other, experts=experts)])


def kept() -> tuple[KeptCompletions, list[str]]:
    warnings: list[str] = []
    records: Any = SimpleNamespace(warn=lambda message, step: warnings.append(message))
    return KeptCompletions(rank=alone(torch.device("cpu")), records=records), warnings


def prompts(shift: int = 0) -> Any:
    return SimpleNamespace(of_step=lambda step: [[prompt(2 * step + shift)], [prompt(2 * step + 1 + shift)]])


def saved(step: int) -> bytes | None:
    """What a checkpoint behind `step` steps has of completions of steps 3 to 5."""
    first, _ = kept()
    for number in (3, 4, 5):
        first.keep(number, [[group(2 * number)], [group(2 * number + 1)]])
    first.of(step - 1)
    return first.packed(step)


def test_a_checkpoint_has_the_completions_of_the_steps_to_come():
    assert saved(6) is None
    content = saved(4)
    assert content is not None
    later, warnings = kept()
    later.take(content)
    later.find(4, prompts(), group=2, most=3, experts=False)
    found = [later.of(4), later.of(5)]
    assert found[0] is not None and found[1] is not None and not warnings and later.end == 6
    assert [[each.prompt.place for each in some] for some in (*found[0], *found[1])] == [[8], [9], [10], [11]]
    assert [list(some[0].completions) for some in found[0]] == [list(group(place).completions) for place in (8, 9)]
    # And it saves what it has got.
    assert later.packed(5) == saved(5)


@pytest.mark.parametrize(
    ("shift", "asked"),
    [(1, {}), (0, {"group": 3}), (0, {"most": 2}), (0, {"experts": True})],
    ids=["other prompts", "a larger group", "fewer tokens", "experts"],
)
def test_what_does_not_fit_is_sampled_anew(shift: int, asked: dict[str, Any]):
    later, warnings = kept()
    later.take(saved(4))
    later.find(4, prompts(shift), **{"group": 2, "most": 3, "experts": False, **asked})
    assert later.of(4) is None and len(warnings) == 1 and "sampled again" in warnings[0]


def test_a_prompt_of_the_same_place_and_other_tokens_does_not_fit():
    later, warnings = kept()
    later.take(saved(4))
    others: Any = SimpleNamespace(of_step=lambda step: [[evolve(prompt(2 * step), ids=np.array([1, 2]))]])
    later.find(4, others, group=2, most=3, experts=False)
    assert later.of(4) is None and warnings


def test_a_checkpoint_without_completions_leaves_none():
    later, _ = kept()
    later.keep(3, [[group(6)]])
    later.take(None)
    assert later.of(3) is None and later.packed(3) is None


def test_completions_of_one_step_that_several_learn_from_are_kept_once():
    """A checkpoint has them once, and gives them to each step."""
    records: Any = SimpleNamespace(warn=lambda message, step: pytest.fail(message))
    first = keep_completions(alone(torch.device("cpu")), records, steps=1, updates=3)
    groups = [[group(4)], [group(5)]]
    for number in (6, 7, 8):
        first.keep(number, groups)
    content = first.packed(7)
    assert content is not None and set(unpacked(content)[0]) == {4, 5}
    later = keep_completions(alone(torch.device("cpu")), records, steps=1, updates=3)
    later.take(content)
    same: Any = SimpleNamespace(of_step=lambda step: [[prompt(4)], [prompt(5)]])
    later.find(7, same, group=2, most=3, experts=False)
    for number in (7, 8):
        found = later.of(number)
        assert found is not None and [list(each.completions) for (each,) in found] == [
            each.completions for (each,) in groups
        ]


def test_stages_put_together_what_they_know_of_experts():
    one, other = np.array([[0, 0, 3, 1], [0, 0, 2, 2]], np.int32), np.array([[4, 1, 0, 0], [2, 3, 0, 0]], np.int32)
    parts = [group(6, one), group(7, one), group(6, other), group(7, other)]
    found, end = unpacked(pack([(each.prompt, each.completions) for each in parts], 9))
    assert end == 9 and set(found) == {6, 7}
    for each in (*found[6].completions, *found[7].completions):
        assert each.experts is not None and each.experts.tolist() == [[4, 1, 3, 1], [2, 3, 2, 2]]
