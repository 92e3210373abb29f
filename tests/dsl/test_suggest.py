"""Did you mean, tier by tier."""

import pytest

from xtrain.dsl.suggest import closest, did_you_mean, distance


@pytest.mark.parametrize(
    ("word", "candidates", "found"),
    [
        ("LR", ["lt", "lr"], "lr"),
        ("Layers", ["layer", "layers"], "layers"),
        ("stages_per_rnak", ["schedule", "stages_per_rank"], "stages_per_rank"),
        ("modle", ["mode", "model"], "model"),
        ("dm", ["dim"], "dim"),
        ("parallel_tensor", ["tensor_parallel"], "tensor_parallel"),
        ("decay_weight", ["weight_decay"], "weight_decay"),
        ("hidden_size", ["dim", "heads"], "dim"),
        ("hidden_size", ["heads"], None),
        ("abcdef", ["uvwxyz"], None),
        ("ab", ["cd"], None),
        ("same", ["same"], None),
    ],
)
def test_closest(word, candidates, found):
    assert closest(word, candidates) == found


def test_case_goes_before_distance_and_distance_before_order():
    assert closest("AB_CD", ["ab_ce", "cd_ab", "ab_cd"]) == "ab_cd"
    assert closest("ab_cx", ["cx_ab", "ab_cd"]) == "ab_cd"


@pytest.mark.parametrize(
    ("left", "right", "steps"),
    [("", "", 0), ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "abcd", 1), ("abc", "ab", 1), ("abc", "axc", 1),
     ("kitten", "sitting", 3), ("ca", "abc", 3)],
)  # fmt: skip
def test_distance(left, right, steps):
    assert distance(left, right, 10) == steps == distance(right, left, 10)
    assert distance(left, right, steps - 1) is None or steps == 0


def test_the_hint():
    assert did_you_mean("modle", ["model"]) == "did you mean `model`?"
    assert did_you_mean("zzz", ["model"]) is None
