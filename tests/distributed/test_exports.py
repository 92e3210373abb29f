"""Exports of runs on several ranks: what every layout has is put together, by the action and by the command."""

import json
from pathlib import Path

import pytest
import torch
from forked_ranks import ForkedRanks
from projects import events
from reference_models import CONFIGS, make
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from trials import Laboratory

from xtrain.cli.main import main
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.inspect.rank_jobs import RanksFailed

# The rate is so small that no weight changes.
SPEC = """
experiment {name} {{ seed = 3, budget = 2 steps }}
model "{folder}" {{ {model} }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl") }}
batch {{ sequence = 64, micro = 2, rows = 4 }}
optimizer sgd {{ lr = 1e-300, momentum = 0 }}
every 1 step export {{ to = "{name}/step-{{step}}", shard_size = 30 KiB }}
on finish export {{ to = "{name}/end" }}
"""


@pytest.fixture(scope="module")
def desk(lab: Laboratory, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("exports")
    words = [f"line {i} " + "abc def ghi "[: i % 13] * (1 + i % 5) for i in range(150)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
    return folder, lab.ranks


TP_PP = ("parallel.tp=2", "parallel.pp=2", "batch.micro=1")
FSDP_EP = ("parallel.fsdp=2", "parallel.ep=2")
NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS = ("deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
ORDINARY = (("mixtral", "plain", FSDP_EP),)
MORE = [("llama", "odd heads, tied", ("parallel.pp=2", "batch.micro=1"))]
MORE += [
    (family, name, layout)
    for family, each in CONFIGS.items()
    for name, keys in each.items()
    for layout in ((*((TP_PP,) if keys["num_key_value_heads"] % 2 == 0 else ()), ("parallel.fsdp=2",), *(
        ((*FSDP_EP,),) if (next((keys[each] for each in NUMBERS if each in keys), 1) or 1) % 2 == 0 else ()
    ))) if (family, name, layout) not in ORDINARY
]  # fmt: skip


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize(
    ("family", "name", "layout"), [*ORDINARY, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE)]
)
def test_every_layout_exports_what_it_has_read(
    desk: tuple[Path, ForkedRanks], family: str, name: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    folder, ranks = desk
    label = f"{family}_{len(list(folder.iterdir()))}"
    base, spec = folder / f"{label} base", folder / f"{label}.xtrain"
    make(family, name, base)
    model = "router { aux_loss = 0 }" if family in EXPERTS else ""
    spec.write_text(SPEC.format(name=label, folder=base, model=model))
    compiled = plan_from_spec(spec, layout)
    assert compiled.plan is not None, compiled.diagnostics.render()
    taken = folder / label / "step-2"
    taken.mkdir(parents=True)
    outcome = ranks.run(compiled.plan, folder, name=label)
    directory = outcome.directory

    before = stored(base)
    assert same(before, stored(folder / label / "step-1")) and same(before, stored(folder / label / "end"))
    assert len(list((folder / label / "step-1").glob("*.safetensors"))) > 1
    assert list(taken.iterdir()) == []
    (warning,) = (each for each in events(directory, "warning") if each.get("code") == "X723")
    assert "step-2 already exists" in warning["message"] and warning["step"] == 2
    first, end = events(directory, "export")
    assert (first["step"], first["path"], first["weights"]) == (1, f"{label}/step-1", "trained")
    assert end["bytes"] == sum(each.nbytes for each in before.values()) == end["formats"]["fp32"]
    assert not list(directory.glob("*.partial"))
    card = (folder / label / "end" / "README.md").read_text()
    assert "| made by | xtrain " in card
    losses = {step: loss for step, loss, _ in outcome.curve}
    for name, loss in (("step-1", losses[1]), ("end", losses[2])):  # of which no record is in its file yet
        assert f"| loss in training | {loss:.4f} nats a token |" in (folder / label / name / "README.md").read_text()

    (directory / "metadata").mkdir(exist_ok=True)
    (directory / "metadata" / "environment.json").write_text(json.dumps({"folder": str(folder)}))
    assert main(["export", str(directory), "--to", str(folder / label / "command")]) == 0
    for file in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        ours, theirs = ((folder / label / each / file).read_bytes() for each in ("end", "command"))
        assert ours == theirs, file


TO_LLAMA_CPP = """
experiment {name} {{ budget = 1 step }}
model llama {{ dim = 32, layers = 2, heads = 4, kv_heads = 2 }}
tokenizer {tokenizer}
dataset lines {{ source = jsonl("data.jsonl") }}
batch {{ sequence = 64, rows = 2 }}
optimizer adamw {{ lr = 1e-3 }}
on finish export {{ to = "ours/m.gguf", dtype = fp16 }}
"""


def test_a_run_writes_a_gguf_file(desk, monkeypatch: pytest.MonkeyPatch):
    """It is the command's; a tokenizer that llama.cpp does not have ends the run before its first step."""
    pytest.importorskip("gguf")
    folder, ranks = desk
    monkeypatch.chdir(folder)
    words = Tokenizer(BPE({chr(32 + i): i for i in range(95)}, [], unk_token=" "))
    words.pre_tokenizer = Whitespace()
    Path("words").mkdir()
    words.save("words/tokenizer.json")
    Path("words/tokenizer_config.json").write_text('{"eos_token": "~"}')
    plans = []
    for name, tokenizer in (("bytes", "bytes"), ("words", '"words"')):
        Path(f"{name}.xtrain").write_text(TO_LLAMA_CPP.format(name=name, tokenizer=tokenizer))
        plans.append(plan_from_spec(Path(f"{name}.xtrain")).plan)
    ranks.run(plans[0], folder, name="gguf")
    assert main(["export", "jobs/gguf", "--to", "theirs/m.gguf", "--dtype", "fp16"]) == 0
    ours, theirs = (Path(name, "m.gguf").read_bytes() for name in ("ours", "theirs"))
    assert ours == theirs and len(ours) > 100_000
    with pytest.raises(RanksFailed, match=r"llama\.cpp has no name for its tokenizer"):
        ranks.run(plans[1], folder, name="no-gguf")
    assert not Path("jobs/no-gguf/metrics.jsonl").exists() or not Path("jobs/no-gguf/metrics.jsonl").read_text()
