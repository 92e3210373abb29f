"""Which weights of a checkpoint are read, and what is said of them."""

import pytest
from small_checkpoints import save, save_model

from xtrain.runtime.store.base_weights import evaluated, prefix, published
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path)


@pytest.mark.parametrize("which", ["trained", "averaged"])
def test_weights_alone_are_what_they_were_published_as(folder, which):
    entry = CheckpointEntry(save_model(folder, 3, weights=which), 3)
    assert (published(entry), evaluated(entry), prefix(entry, which)) == (which, which, "model.")


def test_weights_alone_that_say_nothing_are_trained_ones(folder):
    assert published(CheckpointEntry(save_model(folder, 3), 3)) == "trained"


@pytest.mark.parametrize("updates", [0, 7])
def test_of_a_full_state_the_averages_are_taken_that_the_run_took(folder, updates):
    entry = CheckpointEntry(save(folder, 3, ema={"updates": updates, "publish": True, "eval": False}), 3)
    expected = "averaged" if updates else "trained"
    assert (published(entry), evaluated(entry)) == (expected, "trained")
    assert prefix(entry, published(entry)) == ("ema." if updates else "model.")
