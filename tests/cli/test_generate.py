"""`xtrain generate`: what is said of a run and of a checkpoint that are not there. Real runs are sampled elsewhere."""

from pathlib import Path

import pytest
from small_checkpoints import save

from xtrain.cli.main import main
from xtrain.runtime.checkpoint.layout import CheckpointFolder


@pytest.fixture
def run(tmp_path) -> Path:
    save(CheckpointFolder(tmp_path / "checkpoints"), 20)
    (tmp_path / "plan.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("best", "has no checkpoint best; there are latest, ckpt-s000000000020"),
        ("ckpt-s000000000010", "has no checkpoint ckpt-s000000000010; there are latest, ckpt-s000000000020"),
        ("no/such/run", "there is no checkpoint at no/such/run"),
    ],
)
def test_a_checkpoint_that_is_not_there(run, which, said, capsys):
    assert main(["generate", str(run), "--prompt", "a", "--checkpoint", which]) == 3
    assert said in capsys.readouterr().err


def test_no_run_and_no_checkpoint_yet(run, tmp_path, capsys):
    assert main(["generate", str(tmp_path / "nowhere"), "--prompt", "a"]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    assert main(["generate", str(run), "--prompt", "a"]) == 3
    assert "has no checkpoint yet" in capsys.readouterr().err
