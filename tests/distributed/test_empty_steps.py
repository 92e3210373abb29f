"""Steps without a token to learn from: so many in a row, and a run that has no other steps, fail on all ranks alike."""

import json

import pytest
from forked_ranks import RanksFailed
from projects import events, records

from xtrain.planner.load import plan_from_path

SLOW = pytest.mark.slow

PARTS = '''
import torch
from attrs import evolve
from xtrain import IGNORE_INDEX, collator

@collator(takes="microbatch")
def mask(batch):
    return evolve(batch, labels_BS=torch.full_like(batch.labels_BS, IGNORE_INDEX))

@collator(takes="microbatch")
def mask_some(batch):
    """Mask about one row in three."""
    if int(batch.input_ids_BS.sum()) % 3:
        return batch
    return evolve(batch, labels_BS=torch.full_like(batch.labels_BS, IGNORE_INDEX))
'''
SPEC = """
use "parts.py"
experiment empty {{ seed = 3, budget = {steps} steps }}
model {model}
tokenizer bytes
dataset lines {{ source = jsonl("lines.jsonl"), holdout = 10% }}
batch {{ sequence = 32, micro = 1, rows = 4 }}
collate = to_tensor -> flatten -> shift_tokens -> pack{links}
optimizer adamw {{ lr = 1e-2 }}
checkpoint {{ keep = 1 }}
{more}
"""
DENSE = "llama { dim = 16, layers = 2, heads = 2, kv_heads = 2, ffn = 32 }"
MOE = "qwen3_moe { dim = 16, layers = 2, heads = 2, kv_heads = 2, experts = 4, experts_per_token = 2, expert_ffn = 16 }"
SILENT = """
dataset silent { source = jsonl("silent.jsonl"), messages = "messages", template = "chatml", oversized = truncate }
mixture { lines = 1, silent = 1 }
every 2 steps log
"""


@pytest.fixture(scope="module")
def train(lab, tmp_path_factory):
    """Train for so many steps under `--set` texts as the job `name`; links: collators behind `pack`."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "parts.py").write_text(PARTS)
    lines = [{"text": f"line {i} " + "abc " * (1 + i % 4)} for i in range(60)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(name, *sets, steps=12, links=" -> mask", more="every 1 step log", model=DENSE):
        (folder / "empty.xtrain").write_text(SPEC.format(steps=steps, links=links, more=more, model=model))
        compiled = plan_from_path(folder / "empty.xtrain", sets)
        assert compiled.plan is not None, compiled.diagnostics.render()
        run.directory = folder / "jobs" / name
        return lab.ranks.run(compiled.plan, folder, name=name)

    return run


def failed(train, name, *sets, **given):
    """The run's directory and its one failure, which all ranks have agreed on."""
    with pytest.raises(RanksFailed):
        train(name, *sets, **given)
    (failure,) = events(train.directory, "failure")
    assert failure["agreed"] and failure["exit_code"] == 1 and failure["traceback"] == ""
    assert not events(train.directory, "model") and not (train.directory / "checkpoints" / "model").exists()
    assert not events(train.directory, "eval"), "what is to happen at the end of a run has not come"
    return train.directory, failure


def steps_of(directory, kind):
    return [event["step"] for event in events(directory, kind)]


LAYOUTS = {
    "fsdp, read in the step": (("parallel.fsdp=2", "batch.prefetch=0"), DENSE),
    "workers and pipeline": (("parallel.pp=2", "batch.workers=1", "batch.prefetch=2"), DENSE),
    "expert and context parallel": (("parallel.ep=2", "parallel.cp=2"), MOE),
}


@pytest.mark.parametrize("layout", [pytest.param(n, marks=SLOW if i else ()) for i, n in enumerate(LAYOUTS)])
def test_ten_steps_in_a_row_without_a_label_end_the_run_on_all_ranks(train, layout):
    sets, model = LAYOUTS[layout]
    more = "every 4 steps checkpoint\non finish eval lines"
    directory, failure = failed(train, layout.replace(" ", "-"), *sets, more=more, model=model)
    assert steps_of(directory, "skipped") == list(range(1, 10)) and failure["step"] == 9
    assert "10 steps in a row without a valid token" in failure["error"]
    assert "no step had a valid token" in failure["error"]
    assert "fault_tolerance { empty_steps = 10 }" in failure["error"]
    (last, *_) = events(directory, "skipped")[-1:]
    assert last["reason"] == "no rank has a valid token; 9 in a row of 10"


@pytest.mark.slow
def test_the_number_is_a_setting_and_a_run_that_is_shorter_fails_at_its_end(train):
    directory, failure = failed(train, "three", "fault_tolerance.empty_steps=3")
    assert failure["step"] == 2 and "3 steps in a row" in failure["error"]
    directory, failure = failed(train, "short", steps=4, more="every 1 step log\non finish eval lines")
    assert failure["step"] == 4 and "all 4 steps of the run were skipped" in failure["error"]
    assert "had no valid token" in failure["error"]
    assert len(records(directory, "metrics")) == 4


def test_a_run_that_is_stopped_in_between_goes_on_counting(train):
    more = "every 1 step log\nevery 3 steps checkpoint"
    with pytest.raises(RanksFailed, match="stopped"):
        train("stopped", "launch.stop_at=6 steps", more=more)
    directory, failure = failed(train, "stopped", more=more)
    assert failure["step"] == 9 and steps_of(directory, "skipped") == list(range(1, 10))
    # What goes on with labels is well again.
    train("stopped", links="", more=more)
    assert steps_of(directory, "run_end")[-1] == 12 and (directory / "checkpoints" / "model").exists()


def test_steps_that_learn_begin_the_count_anew(train):
    outcome = train("some", "batch.rows=1", "fault_tolerance.empty_steps=4", steps=16, links=" -> mask_some")
    learned = {step for step, *_ in outcome.curve}
    left_out = steps_of(outcome.directory, "skipped")
    assert len(left_out) >= 4 and len(learned) >= 4 and learned.isdisjoint(left_out)
    assert steps_of(outcome.directory, "run_end") == [16]


def test_numbers_that_are_none_in_every_step_are_no_success_either(train):
    """`on nan skip` bears ten steps whose loss is infinite, and the run has six."""
    more = "on nan skip\nloss cross_entropy { z_loss = 1e300 }"
    _, failure = failed(train, "nan", "optimizer.clip=none", steps=6, links="", more=more)
    assert failure["step"] == 6 and "all 6 steps of the run were skipped" in failure["error"]
    assert "had a non-finite loss" in failure["error"]


@pytest.mark.slow
def test_a_dataset_of_a_mixture_without_labels_is_reported_once(train):
    """Of its conversations rows hold the beginning alone, and nobody answers there."""
    talk = [{"role": "user", "content": "a long question " * 4}, {"role": "assistant", "content": "no"}]
    path = train.directory.parent.parent / "silent.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(40)))
    outcome = train("mixed", steps=26, links="", more=SILENT)
    warnings = [event["message"] for event in events(outcome.directory, "warning") if "masked" in event["message"]]
    assert len(warnings) == 1 and warnings[0].startswith("dataset silent has given 5"), warnings
    assert len(outcome.curve) == 13
