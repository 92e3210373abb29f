"""Folders of tokenizers: every way in which files beside `tokenizer.json` add tokens, as transformers reads them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from xtrain.components.tokenizers.folder import Folder
from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.dsl.load import load_spec
from xtrain.plan.vocabulary import read_vocabulary
from xtrain.planner.compile import compile_plan

SIGNS = "abcdefghijklmnopqrstuvwxyz<>|_/Ġ"
TEXT = "ab <|x|> c<|y|><think>d</s><|pad|> <|im_end|>"
CONFIG, SPECIALS, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True, **flags,
    }  # fmt: skip


def folder_of(
    path: Path, files: dict[str, Any], *, model: str = "BPE", padding: Any = None, own: Any = ("</s>",)
) -> Path:
    path.mkdir(exist_ok=True)
    vocabulary = {sign: index for index, sign in enumerate(SIGNS)}
    kinds = {
        "BPE": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "WordLevel": {"type": "WordLevel", "vocab": {**vocabulary, "ab": 40}, "unk_token": "a"},
        "Unigram": {"type": "Unigram", "vocab": [[sign, -1.0] for sign in SIGNS], "unk_id": 0},
    }
    added = [
        {"id": len(SIGNS) + index, **(each if isinstance(each, dict) else token(each))}
        for index, each in enumerate(own)
    ]
    content = {
        "version": "1.0", "truncation": None, "padding": padding, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": BYTES, "post_processor": None, "decoder": BYTES, "model": kinds[model],
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(content))
    for name, each in files.items():
        (path / name).write_text(json.dumps(each))
    return path


def compared(folder: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a folder, of which all ids are those of transformers'."""
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    ours = HuggingFaceTokenizer(folder)
    assert read_vocabulary(str(folder)).ids == theirs.get_vocab()
    assert Folder.size(str(folder)) == ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.encode_rendered([TEXT])[0].ids.tolist() == theirs(TEXT, add_special_tokens=False).input_ids
    plain = theirs(TEXT, add_special_tokens=False, split_special_tokens=True).input_ids
    assert ours.encode(TEXT).tolist() == plain
    flagged = {id for id, each in theirs.added_tokens_decoder.items() if each.special}
    assert ours.specials == flagged | {ours.bos, ours.eos}
    if theirs.eos_token is not None:
        assert ours.eos == theirs.eos_token_id
    if theirs.bos_token is not None:
        assert ours.bos == theirs.bos_token_id
    return ours


PADDING = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "<|pad|>",
}  # fmt: skip
MARKED = {"__type": "AddedToken", **token("<|x|>")}
EXTRA, BEFORE = "extra_special_tokens", "additional_special_tokens"


def decoder(tokens: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {CONFIG: {**CLASS, "added_tokens_decoder": tokens, **more}}


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "eos in the config": ({CONFIG: {**CLASS, "eos_token": "</s>"}}, {}),
    "eos as an object": ({CONFIG: {**CLASS, "eos_token": {"__type": "AddedToken", **token("</s>")}}}, {}),
    "decoder": (decoder({"33": token("<|x|>"), "34": token("<|y|>")}), {}),
    "decoder with other ids": (decoder({"99": token("<|x|>"), "50": token("<|y|>")}), {}),
    "decoder, not special": (decoder({"33": token("<think>", special=False)}), {}),
    "decoder of own tokens": (decoder({"32": token("</s>", special=False)}), {}),
    "decoder, named": (decoder({"33": token("<|x|>", special=False)}, bos_token="<|x|>"), {}),
    "additional": ({CONFIG: {**CLASS, BEFORE: ["<|x|>", "<|y|>"]}}, {}),
    "additional, null": ({CONFIG: {**CLASS, BEFORE: None}}, {}),
    "extra": ({CONFIG: {**CLASS, EXTRA: ["<|x|>", "<|y|>"]}}, {}),
    "extra and additional": ({CONFIG: CLASS | {EXTRA: ["<|x|>"], BEFORE: ["<|y|>"]}}, {}),
    "extra of objects": ({CONFIG: {**CLASS, EXTRA: [MARKED]}}, {}),
    "extra with names": ({CONFIG: {**CLASS, EXTRA: {"image_token": "<|x|>", "boi_token": "<|y|>"}}}, {}),
    "own name": ({CONFIG: {**CLASS, "image_token": "<|x|>", "eos_token": "</s>"}}, {}),
    "own name as an object": ({CONFIG: {**CLASS, "image_token": MARKED}}, {}),
    "pad that is not there": ({CONFIG: {**CLASS, "pad_token": "<|pad|>", "eos_token": "</s>"}}, {}),
    "pad of the padding": ({}, {"padding": PADDING}),
    "bos that is not there": ({CONFIG: {**CLASS, "bos_token": "<|x|>", "eos_token": "<|im_end|>"}}, {}),
    "bos of the model": ({CONFIG: {**CLASS, "bos_token": "b"}}, {}),
    "added": ({ADDED: {"<|x|>": 33, "<|y|>": 34}}, {}),
    "added in another order": ({ADDED: {"<|y|>": 34, "<|x|>": 33}}, {}),
    "added beside a decoder": ({CONFIG: {**CLASS, "added_tokens_decoder": {}}, ADDED: {"<|x|>": 33}}, {}),
    "added with the id of another": ({ADDED: {"<|x|>": 32, "<|y|>": 33}}, {}),
    "added, special": ({CONFIG: {**CLASS, EXTRA: ["<|x|>"]}, ADDED: {"<|x|>": 34, "<|y|>": 33}}, {}),
    "map": ({SPECIALS: {"bos_token": "<|x|>", "eos_token": token("</s>")}}, {}),
    "map over config": ({CONFIG: {**CLASS, "eos_token": "</s>"}, SPECIALS: {"eos_token": "<|im_end|>"}}, {}),
    "map beside a decoder": (
        {CONFIG: {**CLASS, "eos_token": "</s>", "added_tokens_decoder": {}}, SPECIALS: {"eos_token": "<|im_end|>"}}, {},
    ),
    "map with additional": ({SPECIALS: {BEFORE: ["<|x|>", "<|y|>"]}}, {}),
    "map with extra": ({CONFIG: {**CLASS, EXTRA: ["<|y|>"]}, SPECIALS: {EXTRA: ["<|x|>", "<|y|>"]}}, {}),
    "map with names": ({SPECIALS: {EXTRA: {"image_token": "<|x|>"}}}, {}),
    "map with an own name": ({SPECIALS: {"image_token": "<|x|>"}}, {}),
    "lstrip": (decoder({"33": token("<|x|>", lstrip=True, rstrip=True)}), {}),
    "normalized": (decoder({"33": token("<|x|>", normalized=True, special=False)}), {}),
    "a model with holes": ({CONFIG: {**CLASS, EXTRA: ["<|x|>"]}}, {"model": "WordLevel"}),
    "unigram": ({CONFIG: {**CLASS, EXTRA: ["<|x|>"], "pad_token": "<|pad|>"}}, {"model": "Unigram"}),
    "own ids that are none": ({CONFIG: {**CLASS, EXTRA: ["<|x|>"]}}, {"own": (token("</s>") | {"id": 77},)}),
    "empty": ({CONFIG: {**CLASS, "unk_token": "", "eos_token": "</s>"}}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("files", "further"), SHAPES.values(), ids=SHAPES)
def test_tokens_are_those_of_transformers(files: dict[str, Any], further: dict[str, Any], tmp_path: Path):
    compared(folder_of(tmp_path / "tok", files, **further))


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files of a folder, of random tokens in random places."""
    dice = random.Random(seed)
    names = ["<|x|>", "<|y|>", "<think>", "</s>", "<|pad|>", "<|im_end|>", "a", "|"]

    def flags() -> dict[str, bool]:
        return {flag: dice.random() < 0.3 for flag in ("lstrip", "rstrip", "normalized", "special")}

    def some() -> list[str]:
        return dice.sample(names, dice.randrange(4))

    config: dict[str, Any] = dict(CLASS)
    for key in ("bos_token", "eos_token", "pad_token", "unk_token", "image_token"):
        if dice.random() < 0.3:
            content = dice.choice(names)
            config[key] = content if dice.random() < 0.6 else {"__type": "AddedToken", **token(content, **flags())}
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if dice.random() < 0.3:
            config[key] = some()
    if dice.random() < 0.4:
        config["added_tokens_decoder"] = {str(dice.randrange(28, 60)): token(each, **flags()) for each in some()}
    files: dict[str, Any] = {CONFIG: config} if dice.random() < 0.9 else {}
    if dice.random() < 0.4:
        files[ADDED] = {each: dice.randrange(28, 60) for each in some()}
    if dice.random() < 0.4:
        files[SPECIALS] = {
            key: dice.choice(names) for key in ("bos_token", "eos_token", "cls_token") if dice.random() < 0.5
        }
    own = tuple(dict.fromkeys(["</s>", *some()]))
    return files, {
        "model": dice.choice(["BPE", "WordLevel", "Unigram"]),
        "own": own,
        "padding": dice.choice([None, None, PADDING]),
    }


MARKED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<end_of_turn>{# <|no|> #}{{ '<|' + m.role + '|>' }}{% endfor %}"
)


@pytest.mark.parametrize(("template", "files", "apart"), [
    (MARKED_TEMPLATE, {}, "`<|im_start|>`, `<end_of_turn>`"),
    (MARKED_TEMPLATE, {ADDED: {"<|im_start|>": 33}}, "`<end_of_turn>`"),
    (MARKED_TEMPLATE, {CONFIG: {"extra_special_tokens": ["<|im_start|>", "<end_of_turn>"]}}, None),
    ("chatml", {}, "`<|im_start|>`, `<|im_end|>`"),
    ("chatml", {CONFIG: {"added_tokens_decoder": {"33": token("<|im_start|>"), "34": token("<|im_end|>")}}}, None),
    ("plain", {}, None),
])  # fmt: skip
@pytest.mark.parametrize("own", [True, False])
def test_a_marker_of_a_template_that_is_not_one_token_is_reported(
    template: str, files: dict[str, Any], apart: str | None, own: bool, tmp_path: Path
):
    folder = folder_of(tmp_path / "tok", files)
    named = f', template = "{template}"'
    if "{" in template:
        path = folder / "chat_template.jinja" if own else tmp_path / "t.jinja"
        path.write_text(template)
        named = "" if own else f', template = "{path}"'
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "s.xtrain").write_text(f"""
        experiment e {{ seed = 1, budget = 10 steps }}
        model qwen3 {{ dim = 32, layers = 1, heads = 2, kv_heads = 1, ffn = 64 }}
        tokenizer "{folder}"
        dataset d {{ source = jsonl("{tmp_path}/a.jsonl"), messages = "messages"{named} }}
        batch {{ sequence = 64, micro = 1 }}
        optimizer adamw {{ lr = 1e-3 }}
    """)
    spec = load_spec(tmp_path / "s.xtrain").spec
    assert spec is not None
    warned = [each.message for each in compile_plan(spec, world=1).diagnostics if each.code == "W507"]
    assert len(warned) == (apart is not None)
    if apart is not None:
        assert f"writes {apart}, which tokenizer {folder} splits into several tokens" in warned[0]


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(each, marks=pytest.mark.slow) for each in range(15, 40))])
def test_random_folders_are_those_of_transformers(seed: int, tmp_path: Path):
    files, further = drawn(seed)
    compared(folder_of(tmp_path / "tok", files, **further))
