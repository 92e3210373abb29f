"""What a spec names on this machine: what is missing may come, what is something else is a mistake of the plan."""

import json
from pathlib import Path

import pytest

MODEL = {"model": {"vocab": {"<s>": 0, "</s>": 1, "a": 2}}, "added_tokens": []}
PAIRS = 'source = jsonl("qa.jsonl"), prompt = "q", response = "r"'
TALKS = 'source = jsonl("qa.jsonl"), messages = "m"'
FULL, WEIGHTS = "checkpoints/ckpt-s000000000002", "checkpoints/model-s000000000002"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("qa.jsonl", "texts/one.txt", "nameless/a", "run/plan.json", "old/checkpoints/latest"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("ckpt-s000000000002")
    for name in (f"old/{FULL}", f"old/{WEIGHTS}", f"ended/{WEIGHTS}"):
        Path(name).mkdir(parents=True)
        (Path(name) / "state.json").write_text("{}")
    for name, beside in (
        ("plain", {}),
        ("chatty", {"chat_template": "{{ messages }}"}),
        ("broken", {"chat_template": [{"name": "tools", "template": "t"}]}),
        ("no ends", {"bos_token": None, "eos_token": None}),
    ):
        Path(name).mkdir()
        (Path(name) / "tokenizer.json").write_text(json.dumps(MODEL))
        (Path(name) / "tokenizer_config.json").write_text(json.dumps(beside))
    Path("no vocabulary").mkdir()
    Path("no vocabulary/tokenizer.json").write_text("{}")
    return tmp_path


def dataset(text: str, tokenizer: str = "bytes") -> dict[str, str]:
    return {"dataset": f"dataset it {{ {text} }}", "tokenizer": f"tokenizer {tokenizer}"}


def begins(text: str) -> dict[str, str]:
    return {"checkpoint": f"checkpoint {{ {text} }}"}


MISTAKES = {
    "pairs without a template": (dataset(PAIRS), "X507", "`prompt` needs a template, and `tokenizer bytes` has no"),
    "conversations without one": (dataset(TALKS), "X507", "`messages` needs a template"),
    "a tokenizer without one": (dataset(TALKS, '"plain"'), "X507", "`tokenizer plain` has no chat template"),
    "a tokenizer with several": (dataset(TALKS, '"broken"'), "X507", "its chat templates have no `default`"),
    "a folder as a template": (dataset(f'{TALKS}, template = "texts"'), "X507", "template texts is not a file"),
    "an argument of a built-in template": (
        dataset(f'{TALKS}, template = "chatml", template_arguments = {{ enable_thinking: false }}'), "X507",
        "chatml does not read `enable_thinking`"),
    "an argument that a template does not read": (
        dataset(f"{TALKS}, template_arguments = {{ enable_thinkin: false }}", '"chatty"'), "X507",
        "the template of tokenizer chatty does not read `enable_thinkin`"),
    "a folder of texts": (dataset('source = text("texts")'), "X507", 'folders match "texts"'),
    "a password in a URL": (dataset('source = text("s3://me:secret@bucket/*.txt")'), "X507", "store them in plans"),
    "a signed URL": (dataset('source = text("https://a.b/x?X-Amz-Signature=1")'), "X507", "store them in plans"),
    "an unknown scheme": (dataset('source = text("s4://bucket/*.txt")'), "X507", "no file system is named s4"),
    "a bucket alone": (dataset('source = text("s3://bucket/")'), "X507", '"s3://bucket/" names no object'),
    "a file of the hub": (dataset('source = huggingface("./qa.jsonl")'), "X507", "is a file, not a folder"),
    "a separator": (dataset('source = tokens("a.npy", separator = 258)'), "X507",
        "separator 258 is not one of the 258 token ids"),
    "no begin and no end": (dataset('source = text("texts/*")', '"no ends"'), "X505", "neither a bos nor an eos"),
    "another folder": (begins('pretrained = "texts"'), "X720", "texts is neither a checkpoint nor a run"),
    "a file": (begins('from = "qa.jsonl"'), "X720", "qa.jsonl is neither a checkpoint nor a run"),
    "weights alone": (begins('from = "ended"'), "X720", "ended holds only weights"),
}  # fmt: skip
LATER = {
    "a tokenizer that is missing": (dataset(TALKS, '"nowhere"') | {"model": ""}, "W505"),
    "a template that is missing": (dataset(f'{TALKS}, template = "nowhere"'), "W501"),
    "a folder that is missing": (dataset('source = huggingface("./nowhere")'), "W501"),
    "a path that is no name of the hub": (dataset('source = huggingface("a/b/c")'), "W501"),
    "weights that are missing": (begins('pretrained = "nowhere"'), "W501"),
    "a run that has saved nothing yet": (begins('from = "run"'), "W501"),
}
GOOD = {
    "a built-in template": dataset(f'{PAIRS}, template = "plain"'),
    "the template of the tokenizer": dataset(TALKS, '"chatty"'),
    "a token store": dataset('source = tokens("texts", separator = 257)'),
    "a run": begins('from = "old"'),
    "a checkpoint": begins(f'from = "old/{FULL}"'),
    "a pointer": begins('from = "old/checkpoints/latest"'),
    "the weights of a run": begins('pretrained = "ended"'),
    "weights": begins(f'pretrained = "ended/{WEIGHTS}"'),
}
VOCAB = "model llama { dim = 64, layers = 4, heads = 8, kv_heads = 4, vocab = 300 }"


@pytest.mark.parametrize(("blocks", "code", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_is_there_and_is_something_else_is_a_mistake(compiled, blocks, code, says):
    found = list(compiled(**blocks).diagnostics.errors)
    assert [(error.code, says in error.message) for error in found] == [(code, True)], found
    assert found[0].hint


@pytest.mark.parametrize(("blocks", "code"), LATER.values(), ids=LATER.keys())
def test_what_is_missing_may_come(compiled, blocks, code):
    result = compiled(**blocks | ({"model": VOCAB} if blocks.get("model") == "" else {}))
    assert result.plan is not None and [d.code for d in result.diagnostics] == [code], result.diagnostics.render()


@pytest.mark.parametrize("blocks", GOOD.values(), ids=GOOD.keys())
def test_nothing_is_said_of_what_can_be_used(compiled, blocks):
    result = compiled(**blocks)
    assert result.plan is not None and not list(result.diagnostics), result.diagnostics.render()


def test_a_tokenizer_that_is_none_is_a_mistake_whatever_the_vocabulary(compiled):
    (error,) = compiled(**dataset('source = text("texts/*")', '"no vocabulary"'), model=VOCAB).diagnostics.errors
    assert error.code == "X505" and "has no vocabulary" in error.message


def test_a_run_that_has_saved_does_not_need_what_it_began_with(compiled):
    blocks = begins('from = "texts"')
    assert [error.code for error in compiled(**blocks).diagnostics.errors] == ["X720"]
    Path(f"runs/tiny/0123/{FULL}").mkdir(parents=True)
    result = compiled(**blocks)
    assert result.plan is not None and [d.code for d in result.diagnostics] == ["W501"]
    anew = compiled(**begins('from = "texts", resume = false'))
    assert [error.code for error in anew.diagnostics.errors] == ["X720"], "a run that begins anew needs it"
