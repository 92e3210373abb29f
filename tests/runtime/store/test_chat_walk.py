"""A chat model of a folder is tuned on conversations, exported, and answers in transformers."""

import json
import shutil
from pathlib import Path

import pytest
from projects import Project
from tiny_chat_model import make

from xtrain.cli.main import main

pytestmark = pytest.mark.slow

SPEC = """
experiment tiny { seed = 3, budget = 30 steps }
model "models/tiny-chat" {}
tokenizer "models/tiny-chat"
use "specs/sums.py"
dataset talks { source = conversations(count = 500), messages = "messages" }
batch { sequence = 128, rows = 4 }
optimizer adamw { lr = 5e-3 }
on finish export { to = "models/tuned" }
"""


def test_what_transformers_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    project = Project(tmp_path)
    make(tmp_path / "models" / "tiny-chat")
    (tmp_path / "specs").mkdir()
    shutil.copy(Path(__file__).parents[3] / "specs" / "sums.py", tmp_path / "specs")
    (tmp_path / "tiny.xtrain").write_text(SPEC)
    directory = project.run("tiny.xtrain")
    question = "17 + 25?"
    more = ["--chat", "--temperature", "0", "--tokens", "16", "--json"]
    assert main(["generate", str(directory), "--prompt", question, *more]) == 0
    ours = json.loads(capsys.readouterr().out)["text"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "tuned")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "tuned")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == ours != ""
    assert not torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))
