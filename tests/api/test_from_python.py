"""Specs, plans and runs from Python: what the commands say of them, as objects."""

import math
from pathlib import Path

import pytest

import xtrain

SPEC = """experiment small { seed = 1, budget = 6 steps }
model llama { dim = 16, layers = 1, heads = 2, ffn = 32 }
tokenizer bytes
dataset notes { source = text("notes.txt") }
batch { sequence = 16, rows = 2 }
optimizer adamw { lr = 1e-2 }
launch { device = cpu }
every 2 steps checkpoint
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("What is declared is checked, and what was reviewed is what runs. " * 40)
    Path("small.xtrain").write_text(SPEC)
    return Path("small.xtrain")


def test_mistakes_are_raised_as_check_prints_them(spec: Path) -> None:
    spec.write_text(SPEC.replace("heads = 2", "heads = 3, depth = 4"))
    with pytest.raises(xtrain.SpecErrors, match=r"small.xtrain:2:48: error\[X203\]: .*`depth`") as caught:
        xtrain.load(spec)
    assert [each.code for each in caught.value.diagnostics] == ["X408", "X203"]
    with pytest.raises(xtrain.SpecErrors, match=r"nowhere\.xtrain"):
        xtrain.load("nowhere.xtrain")


def test_settings_are_those_of_the_command(spec: Path) -> None:
    given = {"optimizer.lr": 0.5, "optimizer.betas": [0.9, 0.99], "experiment.budget": "3 steps", "batch.micro": 1}
    given |= {"model.tie_embeddings": True, "checkpoint.pretrained": None}
    loaded = xtrain.load(spec, given)
    assert loaded.sets == (
        "optimizer.lr=0.5", "optimizer.betas=[0.9, 0.99]", "experiment.budget=3 steps", "batch.micro=1",
        "model.tie_embeddings=true", "checkpoint.pretrained=none",
    )  # fmt: skip
    plan = loaded.plan()
    assert plan.content.origin.sets == loaded.sets
    assert plan.content.node("setup.optimizer").args["lr"] == 0.5 and plan.content.architecture.tie_embeddings
    assert plan.id != xtrain.load(spec).plan().id


def test_what_check_warns_of_is_a_warning(spec: Path) -> None:
    with pytest.warns(xtrain.SpecWarning, match="W501"):
        xtrain.load(spec, {"checkpoint.pretrained": '"nowhere"'})


def test_a_plan_as_page_and_as_file(spec: Path) -> None:
    plan = xtrain.load(spec).plan(world=2)
    assert "small: 6 steps on 2 ranks" in str(plan)
    assert plan.page(["mesh"]).count("\n") < str(plan).count("\n") < plan.page(full=True).count("\n")
    assert plan._repr_html_().startswith("<pre") and "→" in plan._repr_html_() and "a <" not in plan._repr_html_()
    with pytest.raises(ValueError, match="no part 'mush'; there are model, "):
        plan.page(["mush"])
    plan.save("plan.json")
    assert xtrain.load("plan.json").plan().id == plan.id
    with pytest.raises(xtrain.SpecErrors, match="X704"):
        xtrain.load("plan.json", {"optimizer.lr": 1.0}).plan()


def test_a_run_and_what_it_has_written(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = xtrain.load(spec).plan()
    run = plan.run()
    printed = capsys.readouterr().out
    assert "step 6/6  loss" in printed and "end  done  step 6" in printed
    assert run.status == "done" and run.plan.id == plan.id
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert run.state.loss == run.metrics()[-1]["loss"]
    frame = run.frame()
    assert list(frame["step"]) == [1, 2, 3, 4, 5, 6] and frame["loss"].iloc[-1] == run.state.loss
    assert [event.step for event in run.events("checkpoint")][:3] == [2, 4, 6]
    assert [entry.step for entry in run.checkpoints()] == [2, 4, 6]
    assert f"step 6 of 6 · loss {run.state.loss:.4f}" in run._repr_html_() and "<polyline" in run._repr_html_()
    weights = dict(run.model("2").named_parameters())
    assert sum(weight.numel() for weight in weights.values()) == plan.content.parameters.total
    assert all(math.isfinite(float(weight.detach().sum())) for weight in weights.values())
    first, second = (run.generate(["What"], 5, seed=seed) for seed in (1, 1))
    assert first == second
    assert xtrain.open_run(run.directory).metrics() == run.metrics()


def test_a_run_that_cannot_begin(spec: Path) -> None:
    plan = xtrain.load(spec).plan()
    Path("notes.txt").unlink()
    with pytest.raises(xtrain.RunFailed, match=r"notes\.txt") as caught:
        plan.run(show=False)
    assert caught.value.exit_code == 3


@pytest.mark.slow
def test_a_run_is_stopped(spec: Path) -> None:
    """Begun without waiting, it goes on beside this process until it is stopped."""
    plan = xtrain.load(spec, {"experiment.budget": "4000 steps"}).plan()
    run = plan.run(wait=False, show=False)
    assert run.status in ("starting", "training")
    run.stop()
    assert run.wait() == "stopped"
    assert run.state.step < 4000


def test_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        xtrain.open_run(tmp_path)
