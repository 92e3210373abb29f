"""Values far from the usual ones: a warning with the usual range and published values in it."""

import pytest

PUBLISHED = "DPO 5e-7"
MODEL = "model qwen3 {{ dim = 32, layers = 2, heads = 2, ffn = 64, rope_theta = {} }}"


@pytest.mark.parametrize(("blocks", "path", "words"), [
    ({"optimizer": "optimizer adamw { lr = 2 }"}, "optimizer.lr", ("lr is 2", "usual are 1e-07 to 0.01", PUBLISHED)),
    ({"optimizer": "optimizer adamw { lr = 1e-9 }"}, "optimizer.lr", ("lr is 1e-09", PUBLISHED)),
    ({"optimizer": "optimizer adamw8bit { lr = 0.3 }"}, "optimizer.lr", ("lr is 0.3", PUBLISHED)),
    ({"optimizer": "optimizer lion { lr = 0.1 }"}, "optimizer.lr", ("to 0.003", "2302.06675")),
    ({"optimizer": "optimizer sgd { lr = 30 }"}, "optimizer.lr", ("to 1:", "1512.03385")),
    ({"optimizer": "optimizer muon { lr = 2 }"}, "optimizer.lr", ("to 0.1:", "2502.16982")),
    ({"optimizer": "optimizer adamw { lr = 1e-3, weight_decay = 10 }"}, "optimizer.weight_decay", ("to 0.5",)),
    ({"optimizer": "optimizer lion { lr = 1e-4, weight_decay = 200 }"}, "optimizer.weight_decay", ("to 10",)),
    ({"model": MODEL.format("10")}, "model.rope_theta",
     ("more than 100 times beyond", "usual are 10000 to 1e+07", "2501.15383")),
    ({"model": MODEL.format("5e10")}, "model.rope_theta", ("Llama 3 5e5",)),
    ({"more": "launch { time_limit = 4 s }"}, "launch.time_limit", ("time_limit is 4.00 s", "30.0 min to 7.00 d")),
    ({"more": "launch { time_limit = 4000 h }"}, "launch.time_limit", ("more than 10 times beyond the usual range",)),
    ({"every": "every 2 s checkpoint"}, "every.0.every", ("between checkpoints is 2.00 s", "15.0 min to 6.00 h")),
    ({"every": "every 400 h checkpoint"}, "every.0.every", ("CheckFreq",)),
    ({"every": "every 2 steps checkpoint", "experiment": "experiment tiny { budget = 5000 steps }"}, "every.0.every",
     ("steps between checkpoints is 2", "usual are 100 to 10000", "2304.01373")),
    ({"every": "every 2 steps checkpoint", "experiment": "experiment tiny { budget = 1001 steps }"}, "every.0.every",
     ("steps between checkpoints is 2",)),
])  # fmt: skip
def test_a_value_that_nobody_uses(compiled, blocks, path, words):
    result = compiled(**blocks)
    (found,) = [each for each in result.diagnostics if each.code == "W433"]
    assert [check.id for check in result.plan.checks if check.code == "W433"] == [f"usual.{path}"]
    text = f"{found.message}; {found.hint}"
    assert all(word in text for word in words), text


@pytest.mark.parametrize("blocks", [
    {"optimizer": "optimizer adamw { lr = 5e-7, weight_decay = 0 }"},
    {"optimizer": "optimizer adamw { lr = 2e-2, weight_decay = 0.3 }"},
    {"optimizer": "optimizer sgd { lr = 1 }"},
    {"model": MODEL.format("1e7")},
    {"more": "launch { time_limit = 12 h }"},
    {"every": "every 2 steps checkpoint"},  # a trial of a hundred steps
    {"every": "every 2 steps checkpoint", "experiment": "experiment tiny { budget = 1000 steps }"},
    {"every": "every 20 min checkpoint"},
])  # fmt: skip
def test_nothing_is_said_of_values_in_use(compiled, blocks):
    assert not [each for each in compiled(**blocks).diagnostics if each.code == "W433"]
