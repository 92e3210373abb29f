"""Did you mean, tier by tier."""

import pytest

from xtrain.dsl.diagnostics.suggest import certain, closest, did_you_mean, distance


@pytest.mark.parametrize(("word", "candidates", "found"), [
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
])  # fmt: skip
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


@pytest.mark.parametrize(("word", "candidates", "found"), [
    ("stages_per_rnak", ["schedule", "stages_per_rank"], "stages_per_rank"),
    ("LR", ["lt", "lr"], "lr"),
    ("hidden_size", ["dim", "heads"], "dim"),  # what another trainer calls it
    ("parallel_tensor", ["tensor_parallel"], "tensor_parallel"),
    ("sp", ["tp", "pp", "cp"], None),  # as near to each
    ("shap", ["shape", "sharp"], None),
    ("Lr", ["LR", "lr"], None),
    ("rl", ["lr", "eps"], "lr"),  # swapped
    ("l", ["lr"], None),  # half of two letters are a guess
    ("qwen4", ["qwen3"], None),  # a digit is no slip
    ("1f1", ["1f1b", "gpipe"], "1f1b"),
    ("abcdef", ["uvwxyz"], None),
    ("modle", ["model", "model"], "model"),
])  # fmt: skip
def test_certain(word, candidates, found):
    assert certain(word, candidates) == found


def test_the_hint():
    assert did_you_mean("modle", ["model"]) == "did you mean `model`?"
    assert did_you_mean("zzz", ["model"]) is None
