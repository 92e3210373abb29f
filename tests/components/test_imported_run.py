"""An imported configuration trains as the program that it comes from: transformers' own trainer, on the same data."""

import json

import pytest

from tests.support import tiny_chat_model
from tests.support.commands import xtrain

CONFIG = """\
model_name_or_path: {model}
datasets:
  - path: json
    data_files: {data}
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
num_train_epochs: 5
learning_rate: 1e-3
weight_decay: 0.1
adam_beta2: 0.98
adam_epsilon: 1e-5
max_grad_norm: 0.5
lr_scheduler_type: constant
bf16: false
gradient_checkpointing: false
logging_steps: 1
save_strategy: "no"
max_length: 64
seed: 3
"""
TALKS = [("What is 3 plus 4?", "The answer is 7."), ("How much is 12 + 30?", "The answer is 42."),
         ("What is 1 plus 1?", "2"), ("How much is 99 plus 1?", "The answer is 100.")]  # fmt: skip


def trained_by_transformers(model, talks, folder):
    """Losses of transformers' trainer with the numbers of CONFIG; every step takes all records."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer.apply_chat_template(talk["messages"])["input_ids"] for talk in talks]

    def collate(batch):
        width = max(len(row) for row in batch)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        there = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
        return {"input_ids": ids, "attention_mask": there, "labels": ids.masked_fill(there == 0, -100)}

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=5,
        learning_rate=1e-3,
        weight_decay=0.1,
        adam_beta2=0.98,
        adam_epsilon=1e-5,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        seed=3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    network = AutoModelForCausalLM.from_pretrained(model)
    trainer = Trainer(network, arguments, data_collator=collate, train_dataset=rows)
    trainer.train()
    return [[line[key] for key in ("loss", "grad_norm", "learning_rate")] for line in trainer.state.log_history[:-1]]


@pytest.mark.slow
def test_losses_of_an_imported_configuration(tmp_path, monkeypatch):
    model, data = tmp_path / "tiny", tmp_path / "talks.jsonl"
    tiny_chat_model.make(model)
    talks = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
             for question, answer in TALKS]  # fmt: skip
    data.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (tmp_path / "c.yml").write_text(CONFIG.format(model=model, data=data))
    done = xtrain("import", "c.yml", "--to", "c.xtrain", cwd=tmp_path)
    assert done.returncode == 0 and "has a plan for 1 ranks" in done.stderr
    monkeypatch.chdir(tmp_path)
    from xtrain import load

    frame = load(tmp_path / "c.xtrain").run(show=False).metrics()
    ours = [[line[key] for key in ("loss", "grad_norm", "lr")] for line in frame]
    theirs = trained_by_transformers(model, talks, tmp_path / "out")
    assert len(ours) == len(theirs) == 5
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
