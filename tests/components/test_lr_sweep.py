"""The search for a learning rate: its rates, its running average, what it suggests, its plan, and a run of it."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forking import ForkedCommand

from xtrain.cli.main import main
from xtrain.components.actions.lr_sweep import RunningAverage, result, suggestions, swept
from xtrain.components.actions.lr_sweep_torch import sweep
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.optimizers import SCHEDULERS
from xtrain.dsl.spec_text import resolved_text
from xtrain.planner.compile import compile_plan
from xtrain.records.names import LR_SWEEP_FILE
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.batch import Step
from xtrain.tui.curves.canvas import ASCII
from xtrain.tui.pages.sweeps import lr_sweep_page

SPEC = """
experiment tiny { seed = 1, budget = 2 epochs }
model llama { dim = 16, layers = 1, heads = 2 }
tokenizer bytes
dataset a { source = text("*.txt") }
batch { sequence = 32, rows = 4, ramp_from = 2, ramp = 5 steps }
optimizer adamw { lr = 1e-3 }
scheduler cosine { warmup = 5% }
phase late { from = 1 epoch, lr_scale = 0.3 }
ema { decay = 0.9 }
every 3 steps checkpoint
on loss_spike stop
checkpoint { keep = 5 }
launch { device = cpu, stop_at = 1 epoch }
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("abcdefgh" * 20)
    (tmp_path / "tiny.xtrain").write_text(SPEC)
    return load_spec(tmp_path / "tiny.xtrain").require()


def test_rates_have_equal_ratios_from_the_first_to_the_last():
    rate = SCHEDULERS["exponential"].rate({"lr": 10.0, "start": 1e-3}, 5)
    assert [rate(step) for step in range(5)] == pytest.approx([1e-3, 1e-2, 1e-1, 1.0, 10.0], rel=1e-12)


def test_the_running_average_is_that_of_the_losses_so_far():
    average, losses = RunningAverage(0.8), [3.0, 1.0, 4.0, 1.5]
    for number, loss in enumerate(losses, start=1):
        average = average.add(loss)
        weights = [0.2 * 0.8 ** (number - 1 - place) for place in range(number)]
        mean = sum(w * each for w, each in zip(weights, losses, strict=False)) / sum(weights)
        assert average.value == pytest.approx(mean, rel=1e-12)


def test_suggested_are_the_steepest_descent_and_a_tenth_of_the_rate_of_the_least_loss():
    rates = [10.0 ** (place / 2 - 6) for place in range(13)]
    losses = [9.0, 5.0, 4.9, 4.8, 4.6, 4.2, 3.0, 2.5, 2.4, 2.6, 8.0, 3.0, 30.0]
    # The fall from the first to the second point is steeper, and is left out.
    assert suggestions(rates, losses) == {"steepest": rates[5], "minimum_tenth": rates[8] / 10}
    assert suggestions(rates, sorted(losses)) == {"steepest": None, "minimum_tenth": None}
    assert suggestions([], []) == {"steepest": None, "minimum_tenth": None}


def run_sweep(
    losses: list[float], tmp_path, cross_entropy: float | None = None
) -> tuple[list[int], dict[str, Any], list[Any]]:
    """The steps that end the run, what was written, and the events. cross_entropy: of every step, where something else
    is minimised."""
    events: list[Any] = []
    records: Any = SimpleNamespace(directory=tmp_path, event=events.append)
    feed: Any = SimpleNamespace(steps=len(losses))
    rank: Any = SimpleNamespace(is_first=True)
    progress, ends = Progress(), []
    call = sweep(feed, rank, records, progress, times=4.0, smoothing=0.5)
    for index, loss in enumerate(losses):
        progress.step = index + 1
        step = Step(index=index, loss=loss, grad_norm=1.0, lr=10.0 ** (index - 8))
        if cross_entropy is not None:
            step.loss, step.objective = cross_entropy, loss
        call(step)
        if step.stop:
            ends.append(progress.step)
            break
    return ends, json.loads((tmp_path / LR_SWEEP_FILE).read_text()), events


def test_a_loss_that_diverges_ends_the_run(tmp_path):
    ends, found, events = run_sweep([4.0, 3.0, 2.0, 3.0, 40.0, 2.0], tmp_path)
    assert ends == [5] and len(found["lr"]) == 5 and found["diverged"] is True
    assert events[0].points == 5 and events[0].steepest == found["steepest"] == pytest.approx(1e-7)
    assert found == result(list(zip(found["lr"], found["loss"], strict=True)), 0.5) | {"diverged": True}


def test_what_is_minimised_is_what_diverges(tmp_path):
    losses = [0.7, 0.6, 0.5, 0.6, 9.0, 0.5]
    ends, found, _ = run_sweep(losses, tmp_path, cross_entropy=2.0)
    assert ends == [5] and found["loss"] == losses[:5]
    # One that is negative diverges as well, and not where it falls.
    ends, found, _ = run_sweep([-0.1, -0.2, -0.4, -0.3, 9.0], tmp_path, cross_entropy=2.0)
    assert ends == [5]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_so_does_one_that_is_no_number_and_is_no_point(tmp_path, loss):
    ends, found, _ = run_sweep([4.0, 3.0, loss, 2.0], tmp_path)
    assert ends == [3] and found["loss"] == [4.0, 3.0]


def test_one_that_does_not_diverge_is_written_at_the_end(tmp_path):
    ends, found, events = run_sweep([4.0, 3.0, 3.5], tmp_path)
    assert ends == [] and found["diverged"] is False and len(events) == 1


def test_the_plan_of_a_sweep_is_a_spec_of_its_own(spec, tmp_path):
    changed = swept(spec, low=1e-5, high=2.0, steps=40)
    compiled = compile_plan(changed, spec_text=resolved_text(changed))
    plan = compiled.plan
    assert plan is not None, compiled.diagnostics.render()
    assert [each.code for each in compiled.diagnostics.warnings] == []
    assert plan.node("setup.scheduler").args == {"kind": "exponential", "lr": 2.0, "steps": 40, "start": 1e-5}
    timeline = plan.timeline
    assert timeline.steps == 40 and not timeline.stretches and timeline.stop_at is None
    assert len(timeline.phases) == 1 and all(node.op != "setup.ema" for node in plan.nodes)
    sweeps = [tick for tick in timeline.ticks if "tick.lr_sweep" in tick.nodes]
    assert [tick.steps for tick in sweeps] == [1] and "tick.checkpoint" not in {node.id for node in plan.nodes}
    assert plan.workspace["lineage"] == "tiny-find-lr"
    assert changed.alerts.loss_spike is None  # a sweep ends where the loss diverges
    (tmp_path / "again.xtrain").write_text(plan.spec_text)
    assert load_spec(tmp_path / "again.xtrain").require() == changed


@pytest.mark.parametrize("kind", ["adamw", "schedule_free"])
def test_groups_keep_the_ratio_of_rates(spec, kind):
    text = SPEC.replace("optimizer adamw", f"optimizer {kind}").replace("cosine", "constant")
    text += 'workspace { lineage = "base" }\ngroup "layers.0" { optimizer sgd { lr = 0.04 } }'
    Path("groups.xtrain").write_text(text)
    changed = swept(load_spec("groups.xtrain").require(), low=1e-5, high=2.0, steps=40)
    assert changed.workspace.lineage == "base-find-lr"
    assert changed.groups["layers.0"].optimizer.lr == pytest.approx(80.0, rel=1e-12)
    compiled = compile_plan(changed, spec_text=resolved_text(changed))
    assert compiled.plan is not None, compiled.diagnostics.render()
    assert "sgd" in compiled.plan.node("setup.group.layers.0").does


@pytest.mark.slow
def test_the_command_trains_shows_and_shows_again(spec, tmp_path, capsys):
    command = ForkedCommand([
        "find-lr", "tiny.xtrain", "--steps", "12", "--to", "100", "--json",
    ], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    out, err = command.communicate(timeout=300)
    assert command.wait() == 0, out + err
    found = json.loads(out)
    assert 2 <= len(found["lr"]) <= 12 and found["lr"][0] == 1e-7 and "tiny-find-lr" in found["directory"]
    assert main(["find-lr", found["directory"]]) == 0
    shown = capsys.readouterr().out
    assert "log10 of the rate" in shown and f"after {len(found['lr'])} steps" in shown
    assert main(["find-lr", str(tmp_path)]) == 2 and LR_SWEEP_FILE in capsys.readouterr().err


def test_wrong_command_lines(spec, capsys):
    assert main(["find-lr", "tiny.xtrain", "--from", "1", "--to", "1"]) == 2
    for wrong in (["--from", "0"], ["--steps", "3"]):
        with pytest.raises(SystemExit):
            main(["find-lr", "tiny.xtrain", *wrong])
    assert "use 10 or more" in capsys.readouterr().err


def test_a_page_without_points_and_without_a_suggestion():
    assert "smaller rate" in lr_sweep_page({"lr": [], "loss": [], "smoothed": []}, 80, ASCII)[0]
    flat = result([(10.0**place, 2.0) for place in range(-5, 0)], 0.5)
    page = "\n".join(lr_sweep_page(flat, 80, ASCII))
    assert "never decreases" in page and max(map(len, page.splitlines())) <= 110
