"""How numbers read in every view."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.text.units import brief


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 ms"), (9.13e-5, "91.3 µs"), (9e-6, "9 µs"), (9.996e-4, "1 ms"), (0.006538, "6.54 ms"),
        (0.437, "437 ms"), (1.25, "1.25 s"), (125.0, "2m05s"), (None, "–"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_times_in_three_digits(seconds: float | None, words: str) -> None:
    assert brief(seconds) == words


@given(st.floats(0, 1e6, allow_nan=False))
def test_times_fit_their_column(seconds: float) -> None:
    assert len(brief(seconds)) <= 7
