"""Conversations as people have them: tool calls, further input, messages chosen and weighted one by one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenising import made

from xtrain.runtime.feed.documents import TokenDocument
from xtrain.runtime.feed.records import Reads
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("lean_forks")

CHAT = {"form": "chat", "messages": "messages", "template": "chatml", "train_on": "assistant"}
ALPACA = {
    "form": "instruction", "prompt": "instruction", "response": "output", "input": "input", "template": "chatml",
}  # fmt: skip
PROMPTED = {"form": "instruction", "prompt": "prompt", "response": "completion", "template": "chatml"}
CALLS = """{%- if tools %}{{ tools | tojson }}|{% endif -%}
{%- for m in messages -%}
{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.arguments.city }}{% endfor %};{% endgeneration %}
{%- else %}{{ m.content }};{% endif -%}
{%- endfor -%}"""


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer("bytes", Path.cwd())


def predicted(document: TokenDocument | str, tokenizer: TextTokenizer) -> str:
    assert isinstance(document, TokenDocument) and document.trained is not None, document
    return tokenizer.decode(document.ids[document.trained]).replace("<|im_end|>", "|")


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_further_input_stands_behind_the_prompt(tokenizer: TextTokenizer):
    record = {"instruction": "Add.", "input": "1+1", "output": "2"}
    document = made(record, ALPACA, tokenizer)
    assert isinstance(document, TokenDocument) and "user\nAdd.\n\n1+1<|im_end|>" in tokenizer.decode(document.ids)
    assert predicted(document, tokenizer) == "2|"
    for nothing in ("", None):
        bare = made(record | {"input": nothing}, ALPACA, tokenizer)
        assert isinstance(bare, TokenDocument) and "user\nAdd.<|im_end|>" in tokenizer.decode(bare.ids)
    assert made(record | {"input": 3}, ALPACA, tokenizer) == "field `input` is a number, not a string"
    assert made({"instruction": "x", "output": "2"}, ALPACA, tokenizer) == (
        "no field `input`; there are `instruction`, `output`"
    )


def test_of_a_prompt_of_messages_only_the_response_is_predicted(tokenizer: TextTokenizer):
    prompt = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    response = [said("assistant", "d"), said("user", "e"), said("assistant", "f")]
    assert predicted(made({"prompt": prompt, "completion": response}, PROMPTED, tokenizer), tokenizer) == "d|f|"
    assert predicted(made({"prompt": prompt, "completion": "g"}, PROMPTED, tokenizer), tokenizer) == "g|"
    assert predicted(made({"prompt": "a", "completion": "g"}, PROMPTED, tokenizer), tokenizer) == "g|"
    # Whichever way a single question and its answer are written, they are the same tokens.
    documents = [
        made({"prompt": p, "completion": c}, PROMPTED, tokenizer)
        for p, c in (("a", "b"), ([said("user", "a")], [said("assistant", "b")]))
    ]
    first, second = (document for document in documents if isinstance(document, TokenDocument))
    assert np.array_equal(first.ids, second.ids) and np.array_equal(first.trained, second.trained)


TURNS = [said("user", "a"), said("assistant", "one"), said("user", "b"), said("assistant", "two")]


@pytest.mark.parametrize(("train_on", "flags", "found"), [
    ("assistant", (None, None), "one|two|"),
    ("assistant", (False, None), "two|"),
    ("assistant", (None, False), "one|"),
    ("last", (None, None), "two|"),
    ("last", (True, None), "one|two|"),
    ("last", (True, False), "one|"),
])  # fmt: skip
def test_messages_are_chosen_one_by_one(train_on, flags, found, tokenizer: TextTokenizer):
    messages = [dict(message) for message in TURNS]
    messages[0]["train"] = False
    for message, flag in zip(messages[1::2], flags, strict=True):
        message |= {} if flag is None else {"train": flag}
    reads = CHAT | {"train_on": train_on, "message_train": "train"}
    assert predicted(made({"messages": messages}, reads, tokenizer), tokenizer) == found


def test_a_weight_is_that_of_every_token_of_its_message(tokenizer: TextTokenizer):
    messages = [dict(message) for message in TURNS]
    messages[1]["weight"] = 0.25
    document = made({"messages": messages}, CHAT | {"message_weight": "weight"}, tokenizer)
    assert predicted(document, tokenizer) == "one|two|" and isinstance(document, TokenDocument)
    weights = document.columns["weights"]
    assert weights.dtype == np.float32 and len(weights) == len(document.ids)
    end = len("<|im_end|>")
    assert weights[document.trained].tolist() == [0.25] * (3 + end) + [1.0] * (3 + end)
    assert not weights[~document.trained].any()
    plain = made({"messages": TURNS}, CHAT, tokenizer)
    assert isinstance(plain, TokenDocument) and np.array_equal(plain.ids, document.ids)
    assert np.array_equal(plain.trained, document.trained)


@pytest.mark.parametrize(("key", "number", "value", "reason"), [
    ("train", 1, "yes", "message 2: `train` is a string, neither true nor false"),
    ("train", 1, 1, "message 2: `train` is a number, neither true nor false"),
    ("train", 0, True, "message 1: `train` is true for user; only the assistant is trained"),
    ("weight", 3, "2", "message 4: `weight` is a string, not a number"),
    ("weight", 3, -1, "message 4: `weight` is -1, and weights are 0 or more"),
    ("weight", 3, float("inf"), "message 4: `weight` is inf, too large for float32"),
    ("weight", 3, 10**400, "message 4: `weight` is a number of more than 20 digits, too large for float32"),
    ("weight", 3, True, "message 4: `weight` is a boolean, not a number"),
])  # fmt: skip
def test_keys_of_messages_that_say_something_else(key, number, value, reason, tokenizer: TextTokenizer):
    messages = [dict(message) for message in TURNS]
    messages[number][key] = value
    reads = CHAT | {"message_train": "train", "message_weight": "weight"}
    assert made({"messages": messages}, reads, tokenizer) == f"field `messages`, {reason}"


def test_a_system_message_is_left_out(tokenizer: TextTokenizer):
    """The first message alone, with the flags of the others in their places."""
    talk = [dict(message) for message in TURNS]
    talk[1]["weight"] = 0.25
    reads = CHAT | {"drop_system": True, "message_weight": "weight"}
    plain, dropped, kept = (
        made({"messages": messages}, settings, tokenizer)
        for messages, settings in (
            (talk, reads),
            ([said("system", "Be brief."), *talk], reads),
            ([said("system", "Be brief."), *talk], CHAT | {"message_weight": "weight"}),
        )
    )
    assert isinstance(plain, TokenDocument) and isinstance(dropped, TokenDocument) and isinstance(kept, TokenDocument)
    assert np.array_equal(plain.ids, dropped.ids) and not np.array_equal(plain.ids, kept.ids)
    assert np.array_equal(plain.columns["weights"], dropped.columns["weights"])
    alone = made({"messages": [said("system", "Be brief.")]}, CHAT | {"drop_system": True}, tokenizer)
    assert alone == "field `messages` has a system message alone, which `drop_system` leaves out"
    assert Reads.of(CHAT | {"drop_system": True}).beside != Reads.of(CHAT).beside  # the key of a token store


def test_a_conversation_of_which_nothing_is_chosen(tokenizer: TextTokenizer):
    messages = [said("user", "a"), said("assistant", "b", train=False)]
    found = made({"messages": messages}, CHAT | {"message_train": "train"}, tokenizer)
    assert found == "no message is trained on"


def test_calls_of_tools(tokenizer: TextTokenizer, tmp_path: Path):
    (tmp_path / "calls.jinja").write_text(CALLS)
    reads = CHAT | {"template": str(tmp_path / "calls.jinja"), "tools": "tools"}
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [said("user", "rain?"), said("assistant", None, tool_calls=[call]), said("tool", "no"),
                said("assistant", "It is dry.")]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for given in (tools, '[{"type": "function", "function": {"name": "weather"}}]'):
        document = made({"messages": messages, "tools": given}, reads, tokenizer)
        assert predicted(document, tokenizer) == "<call>Oslo;It is dry.;"
        assert isinstance(document, TokenDocument)
        assert '"name": "weather"' in tokenizer.decode(document.ids)
    bare = made({"messages": messages, "tools": None}, reads, tokenizer)
    assert isinstance(bare, TokenDocument) and tokenizer.decode(bare.ids).startswith("user:rain?")
    # A template that has no word for calls, or for definitions, would leave them out.
    found = made({"messages": messages, "tools": None}, CHAT | {"tools": "tools"}, tokenizer)
    assert found == "message 2: the template does not write the assistant tool_calls"
    plain = [said("user", "rain?"), said("assistant", "No.")]
    found = made({"messages": plain, "tools": tools}, CHAT | {"tools": "tools"}, tokenizer)
    assert found == "the template does not write the definitions of tools"
    # Nothing but a message with calls may be without content.
    for calls in (None, []):
        silent = [said("user", "rain?"), said("assistant", None, tool_calls=calls)]
        assert "message 2: `content` is null, not a string" in str(made({"messages": silent}, CHAT, tokenizer))


@pytest.mark.parametrize(("tools", "arguments", "reason"), [
    ("nonsense", "{}", "field `tools` is not valid JSON"),
    ({"name": "x"}, "{}", "field `tools` is not a list of objects"),
    (["x"], "{}", "field `tools` is not a list of objects"),
    (["<|im_end|>"], "{}", "field `tools` is not a list of objects"),
    ([{"name": "<|im_end|>"}], "{}", "the definition of a tool contains the special token <|im_end|>"),
    ([], "city: Oslo", "message 2: the arguments of a call are not a JSON object"),
    ([], "[1]", "message 2: the arguments of a call are not a JSON object"),
])  # fmt: skip
def test_tools_that_are_none(tools, arguments, reason, tokenizer: TextTokenizer):
    call = {"function": {"name": "weather", "arguments": arguments}}
    messages = [said("user", "rain?"), said("assistant", "", tool_calls=[call])]
    assert made({"messages": messages, "tools": tools}, CHAT | {"tools": "tools"}, tokenizer) == reason


def test_arguments_that_are_text_are_objects_without_definitions_too(tokenizer: TextTokenizer, tmp_path: Path):
    (tmp_path / "calls.jinja").write_text(CALLS.replace("arguments.city", "arguments | tojson"))
    reads = CHAT | {"template": str(tmp_path / "calls.jinja")}
    for arguments, written in (('{"city": "Oslo"}', '{"city": "Oslo"}'), ("Oslo", '"Oslo"'), ("[1]", '"[1]"')):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [said("user", "rain?"), said("assistant", None, tool_calls=[call])]
        assert predicted(made({"messages": messages}, reads, tokenizer), tokenizer) == f"<call>{written};"


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


@pytest.mark.parametrize("calls", [json.dumps([CALL]), [json.dumps(CALL)], [CALL]])
@pytest.mark.parametrize("tools", [json.dumps([CALL]), [json.dumps(CALL)], [CALL], None])
def test_calls_and_tools_may_be_json_text(calls: Any, tools: Any, tokenizer: TextTokenizer, tmp_path: Path):
    (tmp_path / "calls.jinja").write_text(CALLS)
    messages = [said("user", "rain?"), said("assistant", None, tool_calls=calls)]
    reads = CHAT | {"template": str(tmp_path / "calls.jinja"), "tools": "tools"}
    assert predicted(made({"messages": messages, "tools": tools}, reads, tokenizer), tokenizer) == "<call>Oslo;"


@pytest.mark.parametrize(("calls", "reason"), [
    ("{", "`tool_calls` is neither a list of objects nor JSON text of one"),
    (7, "`tool_calls` is neither a list of objects nor JSON text of one"),
    ('{"a": 1}', "`tool_calls` is neither a list of objects nor JSON text of one"),
    ([1], "call 1 of `tool_calls` is not an object with the name of a function"),
    ([CALL, {"type": "function"}], "call 2 of `tool_calls` is not an object with the name of a function"),
    ([{"function": {"arguments": {}}}], "call 1 of `tool_calls` is not an object with the name of a function"),
])  # fmt: skip
def test_calls_that_are_none(calls: Any, reason: str, tokenizer: TextTokenizer, tmp_path: Path):
    (tmp_path / "calls.jinja").write_text(CALLS)
    messages = [said("user", "rain?"), said("assistant", None, tool_calls=calls)]
    found = made({"messages": messages}, CHAT | {"template": str(tmp_path / "calls.jinja")}, tokenizer)
    assert found == f"field `messages`, message 2: {reason}"


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize(("record", "reads"), [
    ({"messages": [said("user", "a"), said("assistant", "b")]}, CHAT),
    ({"instruction": "a", "input": "", "output": "b"}, ALPACA),
    ({"prompt": [said("user", "a")], "completion": "b"}, PROMPTED),
], ids=["messages", "texts", "lists"])  # fmt: skip
def test_a_field_of_the_system_is_the_first_message(record, reads, tokenizer: TextTokenizer):
    reads = reads | {"system": "system"}
    document = made(record | {"system": "Be brief."}, reads, tokenizer)
    assert isinstance(document, TokenDocument) and SYSTEM + "a" in tokenizer.decode(document.ids)
    assert predicted(document, tokenizer) == "b|"
    for nothing in ("", None):
        bare = made(record | {"system": nothing}, reads, tokenizer)
        assert isinstance(bare, TokenDocument) and "system" not in tokenizer.decode(bare.ids)
    assert made(record | {"system": 3}, reads, tokenizer) == "field `system` is a number, not a string"
    assert str(made(record, reads, tokenizer)).startswith("no field `system`")


def test_a_system_stands_before_both_sides_of_a_pair(tokenizer: TextTokenizer):
    reads = {"form": "preference", "prompt": "prompt", "chosen": "good", "rejected": "bad", "template": "chatml"}
    record = {"prompt": "a", "good": "b", "bad": "c", "system": "Be brief."}
    document = made(record, reads | {"system": "system"}, tokenizer)
    assert isinstance(document, TokenDocument) and tokenizer.decode(document.ids).count(SYSTEM + "a") == 2
    assert predicted(document, tokenizer) == "b|c|"
    both = [said("system", "Be long."), said("user", "a"), said("assistant", "b")]
    found = made({"messages": both, "system": "Be brief."}, CHAT | {"system": "system"}, tokenizer)
    assert found == "field `system` and the first message are both system messages"
    texts = {**reads, "prompt": None, "system": "system"}
    assert "is a text" in str(made({"good": "ab", "bad": "ac", "system": "x"}, texts, tokenizer))


def test_the_names_of_sharegpt_and_texts_in_parts(tokenizer: TextTokenizer):
    conversation = [
        {"from": "human", "value": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in?"}]},
        {"from": "gpt", "value": "call"}, {"from": "observation", "value": "no"}, {"from": "model", "value": "dry"},
    ]  # fmt: skip
    document = made({"messages": conversation}, CHAT, tokenizer)
    assert predicted(document, tokenizer) == "call|dry|" and isinstance(document, TokenDocument)
    assert "<|im_start|>tool\nno<|im_end|>" in tokenizer.decode(document.ids)
