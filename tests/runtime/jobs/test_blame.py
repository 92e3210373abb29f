"""The smallest set without which a spike is gone, and what counts as a spike."""

import json
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.runtime.jobs.blame import Spike, smallest


@given(st.integers(1, 60), st.data())
def test_no_document_can_be_put_back(count: int, data: st.DataObject):
    """Several sets may do: the spike is gone without any of them."""
    some = st.sets(st.integers(0, count - 1), min_size=1, max_size=4)
    causes = data.draw(st.lists(some, min_size=1, max_size=3))
    asked: list[list[int]] = []

    def is_gone(removed) -> bool:
        asked.append([*removed])
        return any(cause <= set(removed) for cause in causes)

    if not is_gone(range(count)):
        return
    found = smallest(range(count), is_gone)
    assert is_gone(found)
    assert not any(is_gone([each for each in found if each != one]) for one in found)
    assert len(found) == len(set(found))


def written(folder: Path, losses: list[float | None]) -> Path:
    lines = [{"step": step, "time": 1.0, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


FALLING = [5.0 - 0.1 * step + 0.02 * (step % 3) for step in range(20)]


@pytest.mark.parametrize(
    ("losses", "high"),
    [([*FALLING, 3.1], False), ([*FALLING, 4.6], True), ([*FALLING, 3.0], False), ([*FALLING, None], True)],
)
def test_a_spike_is_far_above_the_last_steps(tmp_path: Path, losses: list[float | None], high: bool):
    spike = Spike.of(written(tmp_path, losses), 21, "loss")
    assert spike is not None and spike.is_high == high
    if high:
        assert spike.usual < spike.limit < spike.value
    assert spike.value == (inf if losses[-1] is None else losses[-1])


@pytest.mark.parametrize(("value", "high", "limit"), [
    (9.2, False, 9.29), (9.4, True, 9.29), (100.0, True, 27.25), (None, True, 9.29),
])  # fmt: skip
def test_what_counts_as_a_spike_by_hand(tmp_path: Path, value: float | None, high: bool, limit: float):
    """Losses of 5 and 3 in turn differ by 2: 2 · 1.4826 / √2 = 2.097, and three times that over the median of 3."""
    spike = Spike.of(written(tmp_path, [*[5.0, 3.0] * 4, value]), 9, "loss")
    assert spike is not None
    assert (spike.usual, spike.steps, spike.is_high) == (3.0, 5, high)
    assert spike.limit == pytest.approx(limit, abs=0.001)


def test_what_is_usual_is_unknown_without_steps_before(tmp_path: Path):
    assert Spike.of(written(tmp_path, [5.0, 4.0, 9.0]), 3, "loss") is None
    assert Spike.of(written(tmp_path, [5.0, 4.0, 3.0]), 9, "loss") is None
