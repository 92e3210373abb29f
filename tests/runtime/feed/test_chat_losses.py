"""What a chat template leaves out of a conversation: found by origin, counted by kind, refused where all is lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord, Unusable
from xtrain.runtime.feed.sources.fields import taker

pytestmark = pytest.mark.usefixtures("lean_forks")

# Roles that it does not know are left out, as are reasoning of earlier turns and text beside a call.
PARTIAL = """
{%- if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|u|>' + m.content }}
{%- elif m.role == 'tool' -%}{{ '<|t|>' + m.content }}
{%- elif m.role == 'assistant' -%}
{{ '<|a|>' }}{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif -%}
{%- if m.tool_calls -%}{{ m.tool_calls[0].function | tojson }}
{%- else -%}{{ m.content.split('</think>')[-1] }}{%- endif -%}{{ '<|e|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|a|>' }}{%- endif -%}
"""
MARKED = "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}{% endgeneration %}<|e|>{% endfor %}"
CALL = {"type": "function", "id": "c1", "function": {"name": "rain", "arguments": {"city": "Oslo", "days": 3}}}
SUN = {"type": "function", "function": {"name": "sun", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "rain", "description": "Tell if it rains"}}


def said(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, **({} if content is None else {"content": content}), **more}


def encoded(messages: list[Any], text: str, folder: Path, tools: Any = None, **reads: Any) -> TokenDocument | str:
    (folder / "t.jinja").write_text(text)
    reads = {"form": "chat", "template": str(folder / "t.jinja"), "tools": "tools", **reads}
    content = taker(Reads.of(reads))({"messages": messages, "tools": tools})
    assert not isinstance(content, Unusable), content
    (found,) = DocumentEncoder(ByteTokenizer(), reads).encode([SourceRecord(content, "here")])
    assert not isinstance(found, tuple)
    return found.reason if isinstance(found, BadRecord) else found


Q, A = said("user", "Rain?"), said("assistant", "No.")
LOSSES: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "nothing": ([Q, A], ()),
    "white space": ([Q, said("assistant", " No. ")], ()),
    "reasoning that is written": ([Q, said("assistant", "No.", reasoning="Hm")], ()),
    "reasoning by another name": ([Q, said("assistant", "No.", thinking="Hm")], ()),
    "reasoning of an earlier turn": ([Q, said("assistant", "No.", thinking="Hm"), Q, A],
                                     ("assistant reasoning_content",)),
    "thoughts inside a content": ([Q, said("assistant", "<think>Hm</think>No.")], ("part of assistant content",)),
    "text beside a call": ([Q, said("assistant", "Wait", tool_calls=[CALL]), said("tool", "no"), A],
                           ("assistant content",)),
    "a key that no template reads": ([{**Q, "mood": "sad"}, A], ("user mood",)),
    "a name of a call": ([Q, said("assistant", tool_calls=[CALL]), said("tool", "no", name="rain"), A], ()),
    "the same under two names": ([Q, said("assistant", "No.", reasoning_content="Hm", summary="Hm")], ()),
    "keys of training": ([Q, {**A, "weight": 1}], ()),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_kinds_of_what_is_lost(case: str, tmp_path: Path):
    messages, kinds = LOSSES[case]
    found = encoded(messages, PARTIAL, tmp_path)
    assert isinstance(found, TokenDocument) and found.lost == kinds
    refused = encoded(messages, PARTIAL, tmp_path, lost="error")
    assert isinstance(refused, str) == bool(kinds)
    if kinds:
        assert f"the template does not write the {kinds[0]}" in str(refused)


WHOLE: dict[str, tuple[list[Any], Any, str]] = {
    "a role": ([said("developer", "Be kind"), Q, A], None,
               "message 1: the template does not write the developer message"),
    "a second call": ([Q, said("assistant", tool_calls=[CALL, SUN])], None,
                      "message 2: the template does not write the assistant tool_calls"),
    "an answer": ([Q, said("assistant", reasoning="Hm"), Q, A], None,
                  "message 2: the template does not write the assistant message"),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_lost_as_a_whole_makes_a_bad_record(case: str, tmp_path: Path):
    messages, tools, reason = WHOLE[case]
    messages = [m if "content" in m or "tool_calls" in m else {**m, "content": " "} for m in messages]
    for lost in ("warn", "error"):
        assert encoded(messages, PARTIAL, tmp_path, tools, lost=lost) == reason
    found = encoded(messages, PARTIAL, tmp_path, tools, lost="allow")
    assert isinstance(found, TokenDocument) and found.lost == (reason.rpartition("write the ")[2],)


def test_what_a_template_writes_itself_or_changes_is_not_lost(tmp_path: Path):
    rewritten = """{%- for m in messages -%}{%- set said = m.content.split('</think>')[-1].lstrip() -%}
    {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '<think>' in m.content else '' -%}
    {{- m.role + ': ' + ('<think>\n' + thought + '\n</think>\n\n' if thought else '') + said + ';' -}}{%- endfor -%}"""
    found = encoded([Q, said("assistant", "<think>\nHm\n</think>\n\nNo.")], rewritten, tmp_path)
    assert isinstance(found, TokenDocument) and found.lost == ()
    changed = "{%- for m in messages -%}{{- m.role + ': ' + m.content | urlencode + ';' -}}{%- endfor -%}"
    found = encoded([said("user", "é?"), said("assistant", "ü ö")], changed, tmp_path)
    assert isinstance(found, TokenDocument) and found.lost == () and found.trained is not None
    assert "%C3%BC" in ByteTokenizer().decode(found.ids[found.trained])


def test_tools_that_are_lost_as_a_whole_or_in_part(tmp_path: Path):
    found = encoded([Q, A], PARTIAL, tmp_path, [TOOL])
    assert isinstance(found, TokenDocument) and found.lost == ("part of tools",)
    reason = encoded([Q, A], PARTIAL.replace("{%- if tools", "{%- if false"), tmp_path, [TOOL])
    assert reason == "the template does not write the definitions of tools"


def test_an_end_of_turn_outside_of_the_marks_is_reported(tmp_path: Path):
    marked = (
        "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}{% endgeneration %}<|e|>{% endfor %}"
    )
    found = encoded([Q, A], marked, tmp_path)
    assert isinstance(found, TokenDocument) and found.lost == ("<|e|> outside of {% generation %}",)
    whole = MARKED.replace("{% endgeneration %}<|e|>", "<|e|>{% endgeneration %}")
    for text in (whole, whole + "{{ eos_token }}"):  # as Phi-3 has it after its own end
        found = encoded([Q, A], text, tmp_path)
        assert isinstance(found, TokenDocument) and found.lost == ()


def test_a_mark_without_text_of_the_message_belongs_to_the_turn_before(tmp_path: Path):
    apart = MARKED.replace("{% endgeneration %}<|e|>", "{% endgeneration %}{% generation %}<|e|>{% endgeneration %}")
    found = encoded([Q, A, Q, said("assistant", "Yes.")], apart.replace("<|{{", "<|{{"), tmp_path, train_on="last")
    assert isinstance(found, TokenDocument) and found.trained is not None
    assert ByteTokenizer().decode(found.ids[found.trained]) == "Yes.<|e|>"


def test_forms_of_contents_and_arguments_are_tried(tmp_path: Path):
    parts = [{"type": "text", "text": "Rain "}, {"type": "text", "text": "now?"}]
    asked = [said("user", parts), A]
    lists = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %};{% endfor %}"
    texts = "{% for m in messages %}{{ m.content + ';' }}{% endfor %}"
    reprs = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    for text, expected in ((lists, "[Rain ][now?];[No.];"), (texts, "Rain now?;No.;"), (reprs, "Rain now?;No.;")):
        found = encoded(asked, text, tmp_path)
        assert isinstance(found, TokenDocument) and ByteTokenizer().decode(found.ids) == expected
    call = "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    written = "{% for m in messages %}{{ m.content }}" + call + ";{% endfor %}"
    found = encoded([Q, said("assistant", tool_calls=[CALL])], written, tmp_path)
    assert isinstance(found, TokenDocument)
    assert ByteTokenizer().decode(found.ids) == 'Rain?;rain {"city": "Oslo", "days": 3};'


def test_weights_as_openai_has_them(tmp_path: Path):
    talk = [Q, {**A, "weight": 0}, Q, said("assistant", "Yes.", weight=1)]
    found = encoded(talk, PARTIAL, tmp_path)
    assert isinstance(found, TokenDocument) and found.trained is not None
    assert ByteTokenizer().decode(found.ids[found.trained]) == "Yes.<|e|>"
    talk[1]["weight"] = 0.5
    assert encoded(talk, PARTIAL, tmp_path) == (
        'message 2: `weight` is 0.5, neither 0 nor 1; set `message_weight = "weight"`'
    )


def test_template_arguments_are_given_and_have_to_be_read(tmp_path: Path):
    from xtrain.runtime.base.errors import DataError

    text = PARTIAL + "{%- if thinking_budget is defined %}{{ thinking_budget }}{% endif %}"
    found = encoded([Q, A], text, tmp_path, template_arguments={"thinking_budget": 7})
    assert isinstance(found, TokenDocument) and ByteTokenizer().decode(found.ids).endswith("7")
    with pytest.raises(DataError, match=r"does not read the argument `budget`"):
        encoded([Q, A], text, tmp_path, template_arguments={"budget": 7})
    covers = [json.dumps(
        DocumentEncoder(ByteTokenizer(), {"form": "chat", "template": str(tmp_path / "t.jinja"), **more}).covers,
    ) for more in ({}, {"template_arguments": {"thinking_budget": 7}}, {"lost": "error"})]  # fmt: skip
    assert len(set(covers)) == 3
