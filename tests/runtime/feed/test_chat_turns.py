"""What the assistant said, in templates that do not say it themselves and write turns in all sorts of ways."""

import re
from pathlib import Path

import pytest
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.runtime.feed.chat.messages import conversation
from xtrain.runtime.feed.chat.template import TEMPLATES, ChatTemplate, TemplateRefusal
from xtrain.runtime.feed.chat.turns import Turns
from xtrain.runtime.feed.records import Message, Unusable

# Reasoning stays in the answer to the last question only, and every last answer gets a block for it.
THINKING = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
    {%- set thought, said = '', m.content -%}
    {%- if m.role == 'assistant' and '</think>' in m.content -%}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() -%}
        {%- set said = m.content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' and loop.index0 > ns.last -%}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- said + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# The prompt holds more than the header of a turn that is over, and reasoning is never kept.
PREFILLED = """
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- '<|U|>' + m.content -}}
    {%- else -%}{{- '<|A|>' + m.content.split('</think>')[-1] + '<|E|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|A|><think>\\n' -}}{%- endif -%}
"""
# No prompt at all, blanks trimmed.
BRACKETS = """
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- bos_token + '[INST] ' + m.content.strip() + ' [/INST]' -}}
    {%- else -%}{{- ' ' + m.content.strip() + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}
"""
# Only the last turn is ended.
ENDED_ONCE = """
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- 'Q: ' + m.content + '\\n' -}}
    {%- else -%}{{- 'A: ' + m.content -}}{{- eos_token if loop.last else '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'A: ' -}}{%- endif -%}
"""
# No beginning of a conversation is written as it is in the whole, and answers have something in front of them.
COUNTED = """
{{- messages | length | string + ' messages\\n' -}}
{%- for m in messages -%}
    {{- m.role[0] + ': ' + ('(so) ' if m.role == 'assistant' else '') + m.content + '.\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'a: ' -}}{%- endif -%}
"""
LINES = """
{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text=text, origin="here", bos_token="<s>", eos_token="</s>")


RESERVED = re.compile(r"<[|]?[A-Za-z_]+[|]?>|</s>")


def assistant_spans(template: ChatTemplate, messages: list[Message], *, last: bool = False):
    turns = Turns(template, messages, RESERVED)
    return turns.text, turns.spans(last=last)


def talk(*contents: str) -> list[Message]:
    """Messages of user and assistant in turn, or of the role before a colon."""
    found: list[Message] = []
    for index, content in enumerate(contents):
        role, colon, rest = content.partition(":")
        default = "assistant" if index % 2 else "user"
        found.append({"role": role if colon else default, "content": rest if colon else content})
    return found


def marked(text: str, messages: list[Message], *, last: bool = False) -> str:
    """The conversation with « and » around what the assistant said."""
    written, spans = assistant_spans(template(text), messages, last=last)
    parts, at = [], 0
    for start, end in spans:
        parts += [written[at:start], "«", written[start:end], "»"]
        at = end
    return "".join([*parts, written[at:]])


CASES = [
    (
        THINKING,
        talk("a", "b", "c", "d"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nd<|im_end|>»\n",
    ),
    (
        THINKING,
        talk("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nho\n</think>\n\nd"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n«<think>\nho\n</think>\n\nd<|im_end|>»\n",
    ),
    (
        THINKING,  # questions and answers that look alike, an answer without a question, two answers in a row
        talk("assistant:a", "user:a", "assistant:a", "assistant:a", "user:a"),
        "<|im_start|>assistant\n«a<|im_end|>»\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n"
        "<|im_start|>assistant\n«a<|im_end|>»\n<|im_start|>user\na<|im_end|>\n",
    ),
    (PREFILLED, talk("a", "b", "c", "d"), "<|U|>a<|A|>«b<|E|>»<|U|>c<|A|>«d<|E|>»"),
    (PREFILLED, talk("a", "hm</think>b", "c", "x > y</think>>d"), "<|U|>a<|A|>«b<|E|>»<|U|>c<|A|>«>d<|E|>»"),
    (BRACKETS, talk(" a ", " b\n", "c", "d"), "<s>[INST] a [/INST] «b </s>»<s>[INST] c [/INST] «d </s>»"),
    (BRACKETS, talk("assistant:a", "user:a", "assistant:a"), " «a </s>»<s>[INST] a [/INST] «a </s>»"),
    (ENDED_ONCE, talk("a", "b", "c", "d"), "Q: a\nA: «b»\nQ: c\nA: «d</s>»"),
    (COUNTED, talk("a", "b", "c", "d"), "4 messages\nu: a.\na: «(so) b.»\nu: c.\na: «(so) d.»\n"),
    (LINES, talk("a", "b\n", "c", "assistant: d"), "user: a\nassistant: «b»\n\nuser: c\nassistant: « d»\n"),
]


def written(start: str, user: str, answer: str, end: str, prompt: str, *, after: str = "") -> str:
    """A template of what stands before all messages, a question, an answer, after both, in a prompt, and at the end."""
    return (
        f"{start}{{%- for m in messages -%}}{{%- if m.role == 'user' -%}}{user}{{%- else -%}}{answer}{{%- endif -%}}"
        f"{end}{{%- endfor -%}}{{%- if add_generation_prompt -%}}{prompt}{{%- else -%}}{after}{{%- endif -%}}"
    )


Q = "{{- '<|u|>' + m.content -}}"
FOUR = talk("a", "b", "c", "d")
CASES += [
    # An end in the piece of the answer that is no token, and another one in the last turn.
    (written("", Q, "{{- '<|a|>' + m.content + (' fin' if loop.last else ' more') -}}", "", "{{- '<|a|>' -}}"), FOUR,
        "<|u|>a<|a|>«b more»<|u|>c<|a|>«d fin»"),
    # An end whose first piece all turns have.
    (written("", Q, "{{- '<|a|>' + m.content + ' (so)' -}}", "{{- ' (1)' if loop.last else ' (2)' -}}",
            "{{- '<|a|>' -}}"), FOUR, "<|u|>a (2)<|a|>«b (so)» (2)<|u|>c (2)<|a|>«d (so) (1)»"),
    # Nothing ends an answer, and the next turn begins with bos.
    (written("", "{{- bos_token + 'Q: ' + m.content -}}", "{{- ' A: ' + m.content -}}", "", "{{- ' A: ' -}}"), FOUR,
        "<s>Q: a A: «b»<s>Q: c A: «d»"),
    # The prompt begins a thought, which the template closes at once.
    (written("", Q, "{{- '<|a|>\n<think></think>' + m.content + '<|e|>' -}}", "", "{{- '<|a|>\n<think>\n' -}}"), FOUR,
        "<|u|>a<|a|>\n<think>«</think>b<|e|>»<|u|>c<|a|>\n<think>«</think>d<|e|>»"),
    # The prompt begins a thought that the template leaves out.
    (written("", Q, "{{- '<|a|>\n' + m.content + '<|e|>' -}}", "", "{{- '<|a|>\nSo:\n' -}}"), FOUR,
        "<|u|>a<|a|>\n«b<|e|>»<|u|>c<|a|>\n«d<|e|>»"),
    # A system by default, which the prompt of no message does not have.
    (written("{{- '<|o|>s\nkind<|e|>' if messages and messages[0].role != 'system' -}}", Q,
            "{{- '<|o|>a\n' + m.content -}}", "{{- '<|e|>' -}}", "{{- '<|o|>a\n' -}}"), talk("assistant:b", "user:c"),
        "<|o|>s\nkind<|e|><|o|>a\n«b<|e|>»<|u|>c<|e|>"),
    # Headers with names.
    (written("", Q, "{{- '<|a|>' + (' ' + m.name if m.name else '') + '\n' + m.content -}}", "{{- '<|e|>' -}}",
            "{{- '<|a|>\n' -}}"), [*talk("a"), {"role": "assistant", "name": "bob", "content": "b"}, *talk("c", "d")],
        "<|u|>a<|e|><|a|> bob\n«b<|e|>»<|u|>c<|e|><|a|>\n«d<|e|>»"),
    # Answers of functions in the message of the assistant.
    (
        written("", Q, "{{- '<|a|><|c|>' + m.tool_calls[0].name -}}"
                "{{- '<|r|>' + m.tool_responses[0].response + '<|/r|>' -}}{{- m.content -}}",
                "{{- '<|e|>' -}}", "{{- '<|a|>' -}}"),
        [*talk("a"), {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}],
                      "tool_responses": [{"response": "42"}]}],
        "<|u|>a<|e|><|a|>«<|c|>f»<|r|>42<|/r|>«b<|e|>»",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "messages", "expected"), CASES)
def test_turns_are_found_in_what_the_template_writes(text: str, messages: list[Message], expected: str):
    assert marked(text, messages) == expected
    said = [m for m in messages if m["role"] == "assistant"]
    if len(said) > 1 or expected.count("«") == 1:
        start = expected.rindex("«")
        assert (
            marked(text, messages, last=True) == expected[:start].replace("«", "").replace("»", "") + expected[start:]
        )


def test_a_marked_template_is_taken_at_its_word():
    text = TEMPLATES["chatml"].replace(
        "<|im_end|>' -}}{%- endgeneration -%}", "<|im_end|>' -}}{{- '\\n' -}}{%- endgeneration -%}"
    )
    assert marked(text, talk("a", "b")).endswith("assistant\n«b<|im_end|>\n»\n")


SEVERAL = """
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {%- for part in m.content.split('|') -%}
            {{- 'A: ' -}}{% generation %}{{- part -}}{% endgeneration %}{{- '; ' -}}
        {%- endfor -%}
    {%- else -%}{{- 'Q: ' + m.content + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'A: ' -}}{%- endif -%}
"""


def test_a_turn_may_have_several_marked_parts():
    assert marked(SEVERAL, talk("a", "b|c", "d", "e|f")) == "Q: a\nA: «b»; A: «c»; Q: d\nA: «e»; A: «f»; "
    assert marked(SEVERAL, talk("a", "b|c", "d", "e|f"), last=True) == "Q: a\nA: b; A: c; Q: d\nA: «e»; A: «f»; "


def test_marked_parts_are_found_in_what_a_template_trims():
    trims = "{% set all %}{% generation %} {{ messages[1].content }} {% endgeneration %}{% endset %}({{ all | trim }})"
    assert marked(trims, talk("a", "b")) == "(«b»)"


def test_what_a_marked_block_sets_is_not_seen_outside():
    text = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[1].content }}{{ x }}{% endgeneration %}{{ x }}"
    assert marked(text, talk("a", "b")) == "«b2»1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "aa«bb»"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | length }}\n{% endfor %}", "user: 1\nassistant: 1\n"),
        ("{% for m in messages %}{{ m.content | reverse }}{% if 'b' != m.content %}!{% endif %}{% endfor %}", "a!«b»")],
)  # fmt: skip
def test_a_turn_is_what_a_template_makes_of_a_message(text: str, expected: str):
    assert marked(text, talk("a", "b")) == expected


def test_without_origins_turns_are_found_where_they_stand_as_they_are(monkeypatch: pytest.MonkeyPatch):
    def trace(*_: object, **__: object):
        raise TemplateRefusal("no origins")

    monkeypatch.setattr(ChatTemplate, "trace", trace)
    assert marked(LINES, talk("a", "b", "c", "d")) == "user: a\nassistant: «b»\nuser: c\nassistant: «d»\n"
    with pytest.raises(TemplateRefusal, match=r"message 2 begins or ends .*\{% generation %\}"):
        assistant_spans(template(COUNTED), talk("a", "b"))


def test_what_a_template_refuses_is_reported_in_its_words():
    alternate = "{% if messages[0].role != 'user' %}{{ raise_exception('Users come first') }}{% endif %}"
    with pytest.raises(TemplateRefusal, match="the template refuses it: Users come first"):
        assistant_spans(template(alternate), talk("assistant:a"))
    for broken in ("{{ messages[7].content.strip() }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}"):
        with pytest.raises(TemplateRefusal, match="the template refuses it: "):
            assistant_spans(template(broken), talk("a", "b"))


@pytest.mark.parametrize("sly", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"])
def test_templates_cannot_leave_their_room(sly: str):
    with pytest.raises(TemplateRefusal):
        assistant_spans(template(sly), talk("a", "b"))


def test_templates_find_what_they_are_written_for():
    text = """
    {% for m in messages %}
        {% if m.role == 'tool' %}{% continue %}{% endif %}
{{ m | tojson }}
        {% if loop.index0 == 1 %}{% break %}{% endif %}
    {% endfor %}
{{ strftime_now('%d %b %Y') }} {{ bos_token }}{{ eos_token }}{{ tools }}{{ add_generation_prompt }}"""
    messages = talk("tool:x", "user:<é> & 'b'", "assistant:c")
    rendered = template(text).render(messages)
    assert rendered == '{"role": "user", "content": "<é> & \'b\'"}\n26 Jul 2024 <s></s>NoneFalse'.join(["\n", ""])


WORDS = st.text(alphabet="ab <>/\n:é", min_size=1, max_size=8).filter(lambda text: not text.isspace())


@given(contents=st.lists(WORDS, min_size=2, max_size=6), last=st.booleans())
@drawn(20, 400)
def test_without_its_marks_a_template_gives_the_same_turns(contents: list[str], last: bool):
    messages = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(contents)]
    for name in ("chatml", "llama3"):
        bare = TEMPLATES[name].replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
        assert assistant_spans(template(bare), messages, last=last) == assistant_spans(
            template(TEMPLATES[name]), messages, last=last
        )


@given(contents=st.lists(WORDS, min_size=2, max_size=6))
@drawn(20, 400)
def test_of_rewritten_turns_everything_but_headers_is_found(contents: list[str]):
    messages = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(contents)]
    written, spans = assistant_spans(template(THINKING), messages)
    assert len(spans) == len(messages) // 2
    for (start, end), message in zip(spans, messages[1::2], strict=True):
        assert written[:start].endswith("<|im_start|>assistant\n")
        assert written[start:end].removeprefix("<think>\n\n</think>\n\n") == message["content"] + "<|im_end|>"


USER = {"role": "user", "content": "a"}
CONVERSATIONS = [
    ([USER], [USER]),
    ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "system", "value": "c"}],
        [USER, {"role": "assistant", "content": "b"}, {"role": "system", "content": "c"}]),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}],
        [{**USER, "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]),
    ([{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}],
        [{"role": "assistant", "tool_calls": [{"name": "f"}]}]),
    ([{**USER, "name": None, "at": 3}], [{**USER, "at": 3}]),
    ([{"role": "system", "content": ""}], [{"role": "system", "content": ""}]),
]  # fmt: skip
NONE = [
    ("a", "it is a string, not a list of messages"),
    (None, "it is null, not a list of messages"),
    ([], "it has no messages"),
    ([USER, {"role": "assistant", "content": ""}], "it, message 2: the assistant says nothing"),
]
# The last message of those that begin with a proper one.
WRONG = [
    ("a", "a string, not an object"),
    ({"role": "user"}, "no `content`"),
    ({"content": "a"}, "no `role`"),
    ({"from": "human"}, "no `value`"),
    ({**USER, "content": None}, "`content` is null, not a string"),
    ({**USER, "content": 3}, "`content` is a number, not a string"),
    ({**USER, "content": {"text": "a"}}, "`content` is an object, not a string"),
    ({**USER, "content": [{"type": "image", "url": "u"}]}, "`content` has a part that is image, not text"),
    ({**USER, "content": [3]}, "`content` has a part that is a number, not text"),
    ({**USER, "content": "\ud800"}, "`content` has an unpaired surrogate at character 0"),
    ({**USER, "name": "\udfff"}, "has an unpaired surrogate at character 0"),
    ({**USER, "by": open}, "its value is neither JSON nor a date"),
    ({**USER, "role": "a\nb"}, "`role` is 'a\\nb', which is not a role name"),
    ({**USER, "role": 3}, "`role` is 3, which is not a role name"),
    (
        {"from": "bing", "value": "a"},
        "`from` is 'bing'; valid names are human, gpt, user, assistant, system, chatgpt, model, function_call, tool, "
        "function_response, observation",
    ),
]
CONVERSATIONS += [([USER, message], f"it, message 2: {reason}") for message, reason in WRONG] + NONE


@pytest.mark.parametrize(("value", "expected"), CONVERSATIONS)
def test_conversations_in_one_form_or_the_reason_why_not(value: object, expected: list[Message] | str):
    found = conversation(value, "it")
    assert (found.reason if isinstance(found, Unusable) else found) == expected


def test_templates_beside_a_tokenizer(tmp_path: Path):
    import json

    from xtrain.plan.data import TokenizerUnreadable, find_chat_template

    assert find_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": None}))
    assert find_chat_template(tmp_path) is None
    config.write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert find_chat_template(tmp_path) == "d"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert find_chat_template(tmp_path) == "j"
    (tmp_path / "chat_template.jinja").write_text("é")
    assert find_chat_template(tmp_path) == "é"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerUnreadable, match=r"chat_template\.jinja: cannot be read"):
        find_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": [{"name": "tools", "template": "t"}]}))
    with pytest.raises(TokenizerUnreadable, match="no `default`"):
        find_chat_template(tmp_path)
