"""Imported configurations of TRL train as TRL's own command line does. TRL has to be importable (`pip install trl`)."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support import tiny_chat_model, trl_runs
from tests.support.commands import xtrain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]

CONFIG = """\
model_name_or_path: models/tiny
output_dir: out
datasets:
  - path: json
    data_files: {data}.jsonl
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
num_train_epochs: 5
learning_rate: 1e-3
lr_scheduler_type: constant
bf16: false
use_cpu: true
gradient_checkpointing: false
logging_steps: 1
save_strategy: "no"
report_to: none
max_length: 64
seed: 3
"""
TALKS = [("What is 3 plus 4?", "The answer is 7."), ("How much is 12 + 30?", "The answer is 42."),
         ("What is 1 plus 1?", "2"), ("How much is 99 plus 1?", "The answer is 100.")]  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# Every step takes all four records, in whatever order.
DATA = {
    "talks": [{"messages": [user(asked), assistant(said)]} for asked, said in TALKS],
    "answers": [{"prompt": f"{asked} ", "completion": said} for asked, said in TALKS],
    "pairs": [{"prompt": [user(asked)], "chosen": [assistant(said)], "rejected": [assistant(f"{number} is it")]}
              for number, (asked, said) in enumerate(TALKS)],
    "labels": [{"prompt": [user(asked)], "completion": [assistant(said)], "label": number % 2 == 0}
               for number, (asked, said) in enumerate(TALKS)],
}  # fmt: skip
# Name → command, data, and lines of the configuration.
RUNS = {
    "conversations": ("sft", "talks", "weight_decay: 0.1\nadam_beta2: 0.98\nadam_epsilon: 1e-5\nmax_grad_norm: 0.5\n"),
    "answers": ("sft", "answers", ""),
    "whole_answers": ("sft", "answers", "completion_only_loss: false\n"),
    "sgd": ("sft", "talks", "optim: sgd\nlearning_rate: 1e-2\n"),
    "dpo": ("dpo", "pairs", "beta: 0.2\n"),
    "ipo": ("dpo", "pairs", "beta: 0.1\nloss_type: [ipo]\n"),
    "hinge": ("dpo", "pairs", "beta: 0.1\nloss_type: [hinge]\n"),
    "robust": ("dpo", "pairs", "beta: 0.1\nlabel_smoothing: 0.1\nloss_type: [robust]\n"),
    "apo": ("kto", "labels", "beta: 0.1\nloss_type: apo_zero_unpaired\ndesirable_weight: 1.5\n"),
}


def configuration(data, lines):
    own = {line.partition(":")[0] for line in lines.splitlines()}
    kept = [line for line in CONFIG.format(data=data).splitlines() if line.partition(":")[0] not in own]
    return "\n".join(kept) + "\n" + lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model, the data and the configurations; `theirs.json` has what TRL logged for each."""
    place = tmp_path_factory.mktemp("runs")
    tiny_chat_model.make(place / "models/tiny")
    # TRL counts the line break after an answer in pairs and labels, xtrain does not.
    template = place / "models/tiny/chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>\\n", "<|im_end|>"))
    for name, records in DATA.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, (_, data, lines) in RUNS.items():
        (place / f"{name}.yml").write_text(configuration(data, lines))
    runs = [f"{command}={name}.yml" for name, (command, *_) in RUNS.items()]
    with (place / "trl.log").open("w") as log:
        subprocess.run(
            [sys.executable, trl_runs.__file__, "theirs.json", *runs], cwd=place, stdout=log, stderr=log, check=True
        )
    return place


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_trl(folder, monkeypatch, name):
    theirs = json.loads((folder / "theirs.json").read_text())[f"{name}.yml"]
    done = xtrain("import", f"{name}.yml", "--from", "trl", "--to", f"{name}.xtrain", cwd=folder)
    assert done.returncode == 0 and "has a plan for 1 ranks" in done.stderr, done.stderr
    monkeypatch.chdir(folder)
    from xtrain import load

    frame = load(folder / f"{name}.xtrain").run(show=False).metrics()
    dpo = "objective" in frame[0]
    ours = [[line["objective" if dpo else "loss"], line["grad_norm"], line["lr"]] for line in frame]
    assert len(ours) == len(theirs) == 5, theirs
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
