"""Specs, plans and runs from Python: what the commands say of them, as objects."""

import math
from pathlib import Path

import numpy as np
import pytest

import xtrain
from xtrain.cli.main import main

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


@pytest.mark.parametrize("value", [object(), b"1", 1j, [object()], {"a": {1}}])
def test_what_no_spec_has_is_no_setting(spec: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"optimizer.lr: a setting is a number, .* not"):
        xtrain.load(spec, {"optimizer.lr": value})


def test_numbers_of_numpy_and_paths_are_settings(spec: Path) -> None:
    given = {"optimizer.lr": np.float64(0.5), "batch.micro": np.int64(1), "optimizer.betas": np.array([0.5, 0.75])}
    given |= {"model.tie_embeddings": np.bool_(True), "optimizer.eps": np.float32(0.25), "workspace.root": Path("a b")}
    assert xtrain.load(spec, given).sets == (
        "optimizer.lr=0.5", "batch.micro=1", "optimizer.betas=[0.5, 0.75]", "model.tie_embeddings=true",
        "optimizer.eps=0.25", 'workspace.root="a b"',
    )  # fmt: skip


def test_a_sweep_is_not_part_of_a_plan_and_said_so(spec: Path) -> None:
    dataset = 'dataset notes { source = text("notes.txt"), holdout = 50% }\nevery 2 steps eval notes\n'
    spec.write_text(SPEC.replace('dataset notes { source = text("notes.txt") }\n', dataset))
    xtrain.load(spec)
    spec.write_text(spec.read_text() + "sweep { optimizer.lr in [0.1, 0.2], objective = eval.notes.loss }\n")
    with pytest.warns(xtrain.SpecWarning, match=r"which `xtrain run small.xtrain` trains"):
        assert xtrain.load(spec).plan().content.node("setup.optimizer").args["lr"] == 1e-2


def test_wrong_arguments_are_told_of(spec: Path) -> None:
    loaded = xtrain.load(spec)
    with pytest.raises(TypeError, match="world is a number of ranks, not '2'"):
        loaded.plan("2")  # pyright: ignore[reportArgumentType]
    assert loaded.plan().page("memory") == loaded.plan().page(["memory"])
    with pytest.raises(xtrain.SpecErrors, match=r"nowhere\.json"):
        xtrain.load("nowhere.json")
    Path("begun").mkdir()
    Path("begun/plan.json").write_text("")
    Path("begun/metrics.jsonl").write_text('{"loss": 2.5}\n[1]\n{"step": 1, "loss": 2.0, "time": 1}\n')
    begun = xtrain.open_run("begun")
    assert "2.0000" in begun._repr_html_() and len(begun.metrics()) == 2
    with pytest.raises(xtrain.PlanError, match="is not JSON"):
        print(begun.plan)
    for wrong in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"min_p": 2.0}, {"tokens": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must "):
            begun.generate("a", **wrong)
    with pytest.raises(ValueError, match="not 'tpu'"):
        begun.model(device="tpu")
    with pytest.raises(ValueError, match="not 'arrow'"):
        begun.frame("arrow")  # pyright: ignore[reportArgumentType]
    with pytest.raises(xtrain.EnvironmentFault, match="no checkpoint"):
        begun.generate("a")


def test_what_check_warns_of_is_a_warning(spec: Path) -> None:
    with pytest.warns(xtrain.SpecWarning, match="W501"):
        xtrain.load(spec, {"checkpoint.pretrained": '"nowhere"'})


def test_a_plan_as_page_and_as_file(spec: Path) -> None:
    plan = xtrain.load(spec).plan(world=2)
    assert "small: 6 steps on 2 ranks" in str(plan)
    assert plan.page(["mesh"]).count("\n") < str(plan).count("\n") < plan.page(full=True).count("\n")
    shown = plan._repr_html_()
    assert plan.id in shown and "small: 6 steps on 2 ranks" in shown and "→" in shown and "a <" not in shown
    shown = xtrain.load(spec, {"optimizer.lr": 0.5})._repr_html_()
    assert "optimizer.lr=0.5" in shown and "source = text(&#34;notes.txt&#34;)" in shown
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
    shown = run._repr_html_()
    assert "6 of 6" in shown and f"<td>{run.state.loss:.4f}</td>" in shown and 'class="curve c0"' in shown
    weights = dict(run.model("2").named_parameters())
    assert sum(weight.numel() for weight in weights.values()) == plan.content.parameters.total
    assert all(math.isfinite(float(weight.detach().sum())) for weight in weights.values())
    first, second = (run.generate(["What"], 5, seed=seed) for seed in (1, 1))
    assert first == second
    assert xtrain.open_run(run.directory).metrics() == run.metrics()
    (run.directory / "plan.json").write_text("")
    with pytest.raises(xtrain.PlanError, match="is not JSON"):
        run.model()
    assert main(["generate", str(run.directory), "--prompt", "a"]) == 3
    assert "is not JSON" in capsys.readouterr().err


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
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        xtrain.open_run(tmp_path)
