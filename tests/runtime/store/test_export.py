"""Exports: what is written, that it is all or nothing, and what cannot be written."""

import fcntl
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import examples
import pytest
import torch
from faulty_disk import FULL, FaultyDisk
from safetensors import safe_open
from safetensors.torch import load_file
from small_runs import LLAMA, MIXTRAL, drawn, make_run, plan_of, save
from torch import Tensor

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.dsl.checking.model_folder import settings_in_folder
from xtrain.plan.exported_config import not_written, read_differences, with_tokens
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import read_weight_files
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault, ExportFailed
from xtrain.runtime.store import export_weights as weights
from xtrain.runtime.store.adapter_export import check_sound, export_of
from xtrain.runtime.store.export import Exported
from xtrain.runtime.store.reading import WholeTensors

OPENED = Path("/proc/self/fd")


def export(
    directory: Path,
    plan: Plan,
    to: Path,
    *,
    checkpoint: str | None = None,
    averaged: bool | None = None,
    dtype: str | None = None,
    most: int = 10**9,
) -> Exported:
    found = export_of(plan, directory, checkpoint=checkpoint, averaged=averaged, dtype=dtype, most=most)
    check_sound(found.tensors)
    return found.write(to, lambda *progress: None)


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def in_files(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a llama under the names of its files."""
    return {name if name.startswith("lm_head") else f"model.{name}": value for name, value in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Plan]:
    plan = plan_of()
    return make_run(plan, tmp_path / "run", tmp_path), plan


def test_weights_of_a_checkpoint_of_either_form(run: tuple[Path, Plan], tmp_path: Path):
    directory, plan = run
    both = drawn(plan), drawn(plan, seed=1)
    save(plan, directory, both[0], step=10, metrics={"eval/lines/loss": 2.5}, made_by={"xtrain": "0.1.0"})
    save(plan, directory, both[1], step=20, backend="file")
    (directory / "metrics.jsonl").write_text('{"step": 10, "loss": 3.25}\n{"step": 20, "loss": 1.0}\n')
    export(directory, plan, tmp_path / "in" / "parents", checkpoint="10")
    export(directory, plan, tmp_path / "latest")
    assert same(stored(tmp_path / "in" / "parents"), in_files(both[0]))
    assert same(stored(tmp_path / "latest"), in_files(both[1]))
    card = (tmp_path / "in" / "parents" / "README.md").read_text()
    said = (plan.id, "lines", "`eval/lines/loss` | 2.5000", "| 3.2500 nats", "| 10 of 40 |", "xtrain 0.1.0", "640")
    assert all(each in card for each in said), card


def test_each_file_is_as_large_as_asked_for_and_the_index_names_all(run: tuple[Path, Plan], tmp_path: Path):
    directory, plan = run
    tensors = drawn(plan)
    save(plan, directory, tensors)
    exported = export(directory, plan, tmp_path / "out", most=20_000)
    assert same(stored(tmp_path / "out"), in_files(tensors))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = sum(tensor.numel() for tensor in tensors.values())
    assert index["metadata"] == {"total_size": 4 * total, "total_parameters": total}
    files = set(index["weight_map"].values())
    assert len(files) == exported.files > 2
    assert files == {f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)}
    sizes = {file: sum(t.numel() * 4 for t in load_file(tmp_path / "out" / file).values()) for file in files}
    largest = max(tensor.numel() * 4 for tensor in tensors.values())
    assert largest > 20_000 and all(size <= 20_000 or size == largest for size in sizes.values())
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as opened:  # by the library, which checks the header
            assert opened.metadata() == {"format": "pt"}
        assert int.from_bytes((tmp_path / "out" / file).read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_weights_are_rounded_to_what_was_asked_for(run: tuple[Path, Plan], tmp_path: Path, dtype: str, monkeypatch):
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1000)  # many chunks of each
    type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[dtype]
    directory, plan = run
    tensors = drawn(plan)
    save(plan, directory, tensors)
    export(directory, plan, tmp_path / "out", dtype=dtype)
    assert same(stored(tmp_path / "out"), {name: value.to(type) for name, value in in_files(tensors).items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == str(type).removeprefix("torch.")


def test_experts_are_written_one_by_one(tmp_path: Path):
    plan = plan_of(MIXTRAL)
    directory, tensors = make_run(plan, tmp_path / "run", tmp_path), drawn(plan)
    save(plan, directory, tensors)
    export(directory, plan, tmp_path / "out", most=5_000)
    found = stored(tmp_path / "out")
    for name, matrix in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        for expert in range(3):
            theirs = found[f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"]
            assert torch.equal(theirs.t(), tensors[f"layers.1.mlp.experts.{matrix}"][expert])
    assert torch.equal(found["model.layers.0.block_sparse_moe.gate.weight"], tensors["layers.0.mlp.gate.weight"])


def test_one_parameter_is_in_memory_at_a_time(run: tuple[Path, Plan], tmp_path: Path, monkeypatch):
    directory, plan = run
    save(plan, directory, drawn(plan))
    alive: list[weakref.ref] = []
    most = 0
    read = WholeTensors.read

    def watched(self: WholeTensors, name: str) -> Tensor:
        nonlocal most
        most = max(most, sum(each() is not None for each in alive))
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(WholeTensors, "read", watched)
    export(directory, plan, tmp_path / "out")
    assert len(alive) == len(plan.parameters.tensors) and most == 0


# Which weights -------------------------------------------------------------------------------------------------------


def test_averaged_weights_are_taken_where_they_are_asked_for_or_published(tmp_path: Path):
    plan = plan_of(more="ema { publish = true }")
    directory = make_run(plan, tmp_path / "run", tmp_path)
    trained, averages = drawn(plan), drawn(plan, seed=1)
    said = {"decay": 0.9, "every": 1, "eval": True, "publish": True, "updates": 5}
    save(plan, directory, trained, averages=averages, step=10, ema=said)
    save(plan, directory, trained, averages=averages, step=20, ema={**said, "publish": False})
    save(plan, directory, averages, step=30, alone=True, weights="averaged")
    expected = [
        (("10", None), averages),
        (("10", False), trained),
        (("20", None), trained),
        (("20", True), averages),
        ((None, None), averages),  # of the finished run
        (("model", True), averages),
    ]
    for number, ((checkpoint, averaged), wanted) in enumerate(expected):
        to = tmp_path / f"out{number}"
        export(directory, plan, to, checkpoint=checkpoint, averaged=averaged)
        assert same(stored(to), in_files(wanted)), (checkpoint, averaged)
        word = "averaged" if wanted is averages else "trained"
        assert f"| weights | {word}, " in (to / "README.md").read_text()
    with pytest.raises(ExportFailed, match="model-s000000000030 holds averaged weights alone"):
        export(directory, plan, tmp_path / "none", averaged=False)


@pytest.mark.parametrize(("state", "why"), [({}, "its run has no `ema`"), ({"ema": {"updates": 0}}, "never updated")])
def test_there_may_be_no_averages_to_export(run: tuple[Path, Plan], tmp_path: Path, state: dict, why: str):
    directory, plan = run
    save(plan, directory, drawn(plan), **state)
    with pytest.raises(ExportFailed, match=why):
        export(directory, plan, tmp_path / "out", averaged=True)


# What cannot be written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "why"),
    [(float("nan"), None, "has NaN in the checkpoint"),
        (float("-inf"), "bf16", "has an infinite value in the checkpoint"),
        (1e5, "fp16", "has values above 65504, the largest of this format")],
)  # fmt: skip
def test_a_value_that_is_no_weight_is_named(run: tuple[Path, Plan], tmp_path: Path, value: float, dtype: Any, why: str):
    directory, plan = run
    tensors = drawn(plan)
    tensors["layers.1.mlp.down_proj.weight"][3, 5] = value
    save(plan, directory, tensors)
    with pytest.raises(ExportFailed, match=f"`model.layers.1.mlp.down_proj.weight` {why}"):
        export(directory, plan, tmp_path / "out", dtype=dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_damaged_checkpoint_is_named_by_its_file(run: tuple[Path, Plan], tmp_path: Path):
    directory, plan = run
    path = save(plan, directory, drawn(plan)) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(EnvironmentFault, match=r"__0_0\.distcp has changed since it was written"):
        export(directory, plan, tmp_path / "out")
    found = export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=10**9)
    path.write_bytes(bytes(len(content)))  # what torch says of it is of no use either
    with pytest.raises(ExportFailed, match=r"ckpt-s000000000020: `model\.embed_tokens\.weight` cannot be read"):
        found.write(tmp_path / "out", lambda *progress: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "number", "which"),
    [(memoryview, 3, r"`model\.layers\.0.*` in model\.safetensors"), (bytes, 3, r"config\.json"),
        (bytes, 5, "README.md")],
)  # fmt: skip
def test_what_the_disk_has_changed_is_found(
    run: tuple[Path, Plan], tmp_path: Path, monkeypatch, kind: type, number: int, which: str
):
    """In the chunks of tensors, and in what is written as a whole."""
    directory, plan = run
    save(plan, directory, drawn(plan))
    append, target = durable.append, number

    def changed(fd: int, content: Any) -> None:
        nonlocal target
        target -= isinstance(content, kind)
        if target == 0:
            target, content = -1, bytearray(content)
            content[-1] ^= 1
        append(fd, content)

    monkeypatch.setattr(durable, "append", changed)
    with pytest.raises(ExportFailed, match=f"{which} does not match what was written"):
        export(directory, plan, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_whichever_change_of_a_file_fails_there_is_all_or_nothing(tmp_path: Path, monkeypatch):
    plan = plan_of("llama { dim = 4, layers = 1, heads = 1, head_dim = 2, ffn = 4 }")
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    found = export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=5_000)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # dozens of exports
    counting = FaultyDisk()
    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", counting)
        found.write(tmp_path / "whole", lambda *progress: None)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    outcomes, opened = set(), len([*OPENED.iterdir()])
    for number in range(0, counting.count, 1 if examples.is_long else 3):
        to = tmp_path / "out"
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FaultyDisk(number, FULL))
            try:
                found.write(to, lambda *progress: None)
            except ExportFailed as failure:
                assert os.strerror(FULL) in str(failure)
                assert not (tmp_path / "out.partial").exists()
        outcomes.add(to.exists())
        assert len([*OPENED.iterdir()]) == opened
        if to.exists():  # only what comes behind the name has failed
            assert sorted(path.name for path in to.iterdir()) == names
            durable.clear(to)
    assert False in outcomes


def test_a_disk_without_room_is_found_before_anything_is_written(run: tuple[Path, Plan], tmp_path: Path, monkeypatch):
    directory, plan = run
    save(plan, directory, drawn(plan))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ExportFailed, match=r"the export takes .* and 1000 B are free in"):
        export(directory, plan, tmp_path / "out")


def test_nothing_is_overwritten(run: tuple[Path, Plan], tmp_path: Path):
    directory, plan = run
    save(plan, directory, drawn(plan))
    to, partial = tmp_path / "out", tmp_path / "out.partial"
    makers: dict[str, Callable[[], Any]] = {
        "a folder": to.mkdir, "a file": lambda: to.write_text("x"), "a link": lambda: to.symlink_to("nowhere")
    }  # fmt: skip
    for what, make in makers.items():
        make()
        with pytest.raises(ExportFailed, match="already exists"):
            export(directory, plan, to)
        assert os.path.lexists(to), what
        to.rmdir() if what == "a folder" else to.unlink()
    partial.mkdir()
    (partial / "mine.txt").write_text("of somebody else")
    with pytest.raises(ExportFailed, match=r"out\.partial is in the way"):
        export(directory, plan, to)
    assert (partial / "mine.txt").exists()
    # As an export leaves it that writes, and one that was killed.
    lock = (partial / ".export.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ExportFailed, match="another process is writing"):
        export(directory, plan, to)
    lock.close()
    export(directory, plan, to)
    assert not partial.exists() and not (to / "mine.txt").exists() and not (to / ".export.lock").exists()


@pytest.mark.parametrize(("model", "why"), [
    (MIXTRAL.replace(" }", ", router { score = sigmoid } }"), '`router.score` is "sigmoid"'),
    (MIXTRAL.replace(" }", ", router { bias_speed = 0.1 } }"), "of `router.bias_speed`"),
    (MIXTRAL.replace(" }", ", shared_experts = 1 }"), "`shared_experts` is 1"),
    (LLAMA.replace(" }", ", qk_norm = true }"), "`qk_norm` is true"),
])  # fmt: skip
def test_a_model_that_no_config_describes_is_not_exported(tmp_path: Path, model: str, why: str):
    plan = plan_of(model)
    problem = not_written(plan.architecture)
    assert problem is not None and why in problem[0]
    with pytest.raises(ExportFailed) as failure:
        export(make_run(plan, tmp_path / "run", tmp_path), plan, tmp_path / "out")
    assert failure.value.code == "X525"


# Tokenizers ----------------------------------------------------------------------------------------------------------


def test_the_bytes_tokenizer_is_one_that_the_library_reads(run: tuple[Path, Plan], tmp_path: Path):
    directory, plan = run
    save(plan, directory, drawn(plan))
    export(directory, plan, tmp_path / "out")
    ours, theirs = ByteTokenizer(), HuggingFaceTokenizer(tmp_path / "out")
    for text in ("", "def f(x):\n\treturn x", "naïve 日本 🙂\0\x7f\r\n", "".join(map(chr, range(0x800)))):
        assert theirs.encode(text).tolist() == ours.encode(text).tolist()
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.bos, theirs.eos, theirs.vocab_size, theirs.special_names) == (256, 257, 258, ours.special_names)
    backend = theirs._backend
    assert backend.encode("ab").ids == [256, 97, 98]  # as a prompt begins


def vocabulary(folder: Path, **config: Any) -> None:
    """A tokenizer of words."""
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<|im_start|>": 4, "<|im_end|>": 5}
    tokens = [{"id": n, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": True} for word, n in words.items() if word.startswith("<")]  # fmt: skip
    model = {"type": "WordLevel", "vocab": words, "unk_token": "a"}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": tokens, "model": model}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_files_of_a_tokenizer_are_those_of_its_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vocabulary(tmp_path / "words", bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}")
    (tmp_path / "words" / "merges.txt").write_text("m")
    (tmp_path / "words" / "notes.txt").write_text("not of it")
    (tmp_path / "words" / "additional_chat_templates").mkdir()
    (tmp_path / "words" / "additional_chat_templates" / "tools.jinja").write_text("tools")
    plan = plan_of(tokenizer='"words"')
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    monkeypatch.chdir("/")  # its paths start where the run was started
    export(directory, plan, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "words" / name).read_bytes()
    assert not (tmp_path / "out" / "notes.txt").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (0, 1, 6)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, 1)


def test_a_tokenizer_without_a_config_gets_one_and_the_template_of_the_run(tmp_path: Path, monkeypatch):
    """By whose turns the model ends what it writes."""
    monkeypatch.chdir(tmp_path)
    vocabulary(tmp_path / "words")
    more = 'dataset talks { source = jsonl("*.jsonl"), messages = "messages", template = "chatml" }\n'
    plan = plan_of(tokenizer='"words/tokenizer.json"', more=f"{more}mixture {{ talks = 1 }}")
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    export(directory, plan, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert "<|im_start|>" in (tmp_path / "out" / "chat_template.jinja").read_text()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, [1, 5])


@pytest.mark.parametrize(("given", "begin", "ends", "found"), [
    ({}, 1, [2], (1, 2)),
    ({"bos_token_id": 1, "eos_token_id": [9, 2]}, 1, [2], (1, [9, 2])),
    ({"bos_token_id": 1, "eos_token_id": 2}, 1, [2, 5], (1, [2, 5])),
    ({"bos_token_id": 7, "eos_token_id": 8}, 1, [2], (1, 2)),  # of another tokenizer
    ({"bos_token_id": 7, "eos_token_id": 2}, 2, [2], (7, 2)),  # the tokenizer itself has no bos
    ({"bos_token_id": None, "eos_token_id": None}, 2, [2], (2, 2)),
])  # fmt: skip
def test_ids_that_begin_and_end_a_text(given: dict, begin: int, ends: list[int], found: tuple):
    config = with_tokens({"other": 1, **given}, begin, ends)
    assert (config["bos_token_id"], config["eos_token_id"], config["other"]) == (*found, 1)


# config.json ---------------------------------------------------------------------------------------------------------


QWEN_MOE = MIXTRAL.replace("mixtral", "qwen3_moe")
ROPES = {
    "linear": ({"factor": 4.0}, 64),
    "dynamic": ({"factor": 2.0}, 96),
    "llama3": ({"factor": 8.0, "original_max_position_embeddings": 96, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
               768),
}  # fmt: skip


@pytest.mark.parametrize("model", [
    LLAMA,
    LLAMA.replace("llama", "qwen3"),
    LLAMA.replace("llama", "mistral").replace(" }", ", window = 7 }"),
    LLAMA.replace("llama", "qwen3").replace(" }", ", window = 7, full_layers = [1] }"),
    LLAMA.replace("llama", "qwen2").replace(" }", ", rope { scaling = linear, factor = 2 } }"),
    LLAMA.replace("llama", "olmo2").replace(" }", ", attention_bias = true }"),
    LLAMA.replace("llama", "smollm3").replace(" }", ", no_rope = [0], mlp_bias = true }"),
    MIXTRAL,
    MIXTRAL.replace("mixtral", "qwen2_moe").replace(" }", ", shared_ffn = 20, qkv_bias = false }"),
    MIXTRAL.replace("mixtral", "qwen3_moe").replace(" }", ", expert_every = 2 }"),
    QWEN_MOE.replace(" }", ", dense_layers = [1] }"),
])  # fmt: skip
def test_a_new_config_is_read_as_the_same_model(tmp_path: Path, model: str):
    more = "rope_theta = 5e5, norm_eps = 1e-4, head_dim = 10, tie_embeddings = true"
    model = f"{model.removesuffix('}')}, {more} }}"
    plan = plan_of(model)
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    export(directory, plan, tmp_path / "out")
    means, diagnostics = settings_in_folder(str(tmp_path / "out"))
    assert not diagnostics.has_errors
    arch = plan.architecture
    for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "vocab", "rope_theta", "norm_eps", "tie_embeddings"):
        assert means[name] == getattr(arch, name), name
    assert not read_differences(arch, means)
    assert {name: means.get(name) for name in arch.own} == arch.own
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    assert config.get("mlp_only_layers", []) == ([1] if "dense_layers" in model else [])
    assert "lm_head.weight" not in read_weight_files(str(tmp_path / "out")).tensors


@pytest.mark.parametrize(
    "more", ["window = 7, full_layers = [2, 0, 2]", "full_layers = [1]", "no_rope = [2, 0]", "no_rope = [1, 1]"]
)
def test_numbers_of_layers_that_a_config_says_otherwise(tmp_path: Path, more: str):
    """In another order, twice, and where they mean nothing."""
    family = "smollm3" if "no_rope" in more else "qwen3"
    plan = plan_of(f"{family} {{ dim = 32, layers = 3, heads = 4, ffn = 48, {more} }}")
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    export(directory, plan, tmp_path / "out")
    means, _ = settings_in_folder(str(tmp_path / "out"))
    assert read_differences(plan.architecture, means) == []
    others = {"full_layers": [0]} if "window" in more else {"window": 7} if family == "qwen3" else {"no_rope": [0]}
    assert read_differences(plan.architecture, {**means, **others})


@pytest.mark.parametrize("scaling", [*ROPES, "yarn"])
def test_scaled_positions_are_said_as_transformers_says_them(tmp_path: Path, scaling: str):
    original = "" if scaling == "linear" else ", original = 96"
    factor = ROPES.get(scaling, ({"factor": 3.0}, 0))[0]["factor"]
    plan = plan_of(LLAMA.replace(" }", f", rope {{ scaling = {scaling}, factor = {factor}{original} }} }}"))
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save(plan, directory, drawn(plan))
    export(directory, plan, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    means, _ = settings_in_folder(str(tmp_path / "out"))
    assert means["rope.scaling"] == scaling and means["rope.factor"] == factor
    if scaling in ROPES:
        keys, context = ROPES[scaling]
        assert config["rope_scaling"] == {"rope_type": scaling, **keys}
        assert config["max_position_embeddings"] == context
    else:
        assert config["rope_scaling"].keys() >= {"original_max_position_embeddings", "beta_fast", "attention_factor"}
        assert config["max_position_embeddings"] == 288 and "rope.truncate" in means
    assert read_differences(plan.architecture, means) == []
    assert read_differences(plan.architecture, {**means, "rope.factor": 2.5})
    assert read_differences(plan.architecture, {**means, "heads": 8}) == ["heads 8 instead of 4"]
