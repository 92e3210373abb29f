"""Twenty shapes of conversations in templates that are built as published ones are: placed, compared, nothing lost."""

import re
from pathlib import Path
from typing import Any

import pytest
from conversation_shapes import SHAPES, Shape, word_faults
from published_templates import SKIP, Comparison, folder, table

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.feed.chat.template import ChatTemplate
from xtrain.runtime.feed.chat.turns import Turns
from xtrain.runtime.feed.chat.writer import ConversationWriter
from xtrain.runtime.feed.records import Conversation, Reads

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}


# The header stands after results too, where no prompt asks for it.
# As that of Mistral 7B v0.3: a system only where the question is last.
TEMPLATES["brackets at the end"] = TEMPLATES["brackets"].replace(
    "if system and loop.index0 == ns.last", "if system and loop.last"
)
TEMPLATES["inside again"] = TEMPLATES["inside"].replace("if not (role == 'model' and ns.before == 'result')", "if true")


def template(name: str, shape: Shape) -> ChatTemplate:
    return ChatTemplate(text=TEMPLATES[name], origin=name, bos_token="<s>", eos_token="</s>", tools=shape.tools)


def marked(name: str, label: str) -> str:
    """What a template writes from the first question on, with « and » around what the assistant says."""
    shape = SHAPES[label]
    turns = Turns(template(name, shape), shape.messages, re.compile(r"<[|]?[a-zA-Z]+[|]?>|</s>|\[/?[A-Z]+\]"))
    parts, at = [], 0
    for start, end in turns.spans():
        parts += [turns.text[at:start], "«", turns.text[start:end], "»"]
        at = end
    text = "".join([*parts, turns.text[at:]])
    return text[text.index("askone") :]


PLACED = {
    ("history", "reasoning"): "askone<|close|>\n<|open|>assistant\n«answerone<|close|>»\n<|open|>user\nasktwo"
    "<|close|>\n<|open|>assistant\n«<think>\nthoughttwo\n</think>\n\nanswertwo<|close|>»\n",
    ("history", "a call"): "askone<|close|>\n<|open|>assistant\n«<think>\n\n</think>\n\n<call>"
    '{"name": "weather", "arguments": {"city": "Lisbon"}}</call><|close|>»\n<|open|>user\n<result>sunnyresult</result>'
    "<|close|>\n<|open|>assistant\n«<think>\n\n</think>\n\nanswerone<|close|>»\n",
    ("brackets", "a call"): 'askone[/INST]«[CALLS] [{"name": "weather", "arguments": {"city": "Lisbon"}, "id": '
    '"abcdefg01"}]</s>»[RESULT] {"content": sunnyresult}[/RESULT] «answerone</s>»',
    ("brackets at the end", "a system"): "askone[/INST] «answerone</s>»[INST] asktwo[/INST] «answertwo</s>»",
    ("final_eos", "two turns"): "askone<|end|>\n<|assistant|>\n«answerone<|end|>»\n<|user|>\nasktwo<|end|>\n"
    "<|assistant|>\n«answertwo<|end|>\n</s>»",
    ("no_end", "text and a call"): "askone<|assistant|>«\n<think></think>\nanswerone<call>weather<key>city</key>"
    "<value>Lisbon</value></call><|observation|>»<result>sunnyresult</result><|assistant|>«\n<think></think>\n"
    "answertwo<|user|>»\nasktwo<|assistant|>«\n<think></think>\nanswerthree»",
    ("no_end", "two answers"): "askone<|assistant|>«\n<think></think>\nanswerone»<|assistant|>«\n<think></think>\n"
    "answertwo<|user|>»\nasktwo<|assistant|>«\n<think></think>\nanswerthree»",
    ("inside", "a call"): 'askone<turn|>\n<|turn>model\n«<|call>call:weather{city:<|"|>Lisbon<|"|>}<call|>»'
    '<|result>result:weather{value:<|"|>sunnyresult<|"|>}<result|>«answerone<turn|>»\n',
    ("inside", "text and a call"): 'askone<turn|>\n<|turn>model\n«<|call>call:weather{city:<|"|>Lisbon<|"|>}<call|>»'
    '<|result>result:weather{value:<|"|>sunnyresult<|"|>}<result|>«answerone<turn|>»\n<|turn>model\n«answertwo<turn|>»\n'
    "<|turn>user\nasktwo<turn|>\n<|turn>model\n«answerthree<turn|>»\n",
    ("inside", "a call last"): 'askone<turn|>\n<|turn>model\n«<|call>call:weather{city:<|"|>Lisbon<|"|>}<call|>»'
    "<|result>",
    ("inside again", "text and a call"): 'askone<turn|>\n<|turn>model\n«<|call>call:weather{city:<|"|>Lisbon<|"|>}'
    '<call|>»<|result>result:weather{value:<|"|>sunnyresult<|"|>}<result|>«answerone<turn|>»\n<|turn>model\n«answertwo<turn|>»\n'
    "<|turn>user\nasktwo<turn|>\n<|turn>model\n«answerthree<turn|>»\n",
    ("inside again", "a call"): 'askone<turn|>\n<|turn>model\n«<|call>call:weather{city:<|"|>Lisbon<|"|>}<call|>»'
    '<|result>result:weather{value:<|"|>sunnyresult<|"|>}<result|><|turn>model\n«answerone<turn|>»\n',
    ("channels", "a call"): "askone<|end|><|start|>assistant« to=weather<|message|>"
    '{"city": "Lisbon"}<|call|>»<|start|>weather to=assistant<|message|>"sunnyresult"<|end|>'
    "<|start|>assistant«<|channel|>final<|message|>answerone<|return|>»",
    ("channels", "two turns"): "askone<|end|><|start|>assistant«<|channel|>final<|message|>answerone<|end|>»"
    "<|start|>user<|message|>asktwo<|end|><|start|>assistant«<|channel|>final<|message|>answertwo<|return|>»",
    ("recipients", "two answers"): "askone<|eot|><|start|>assistant« to=user<|message|>answerone<|eom|>»"
    "<|start|>assistant« to=user<|message|>answertwo<|eot|>»<|start|>user<|message|>asktwo<|eot|><|start|>assistant"
    "« to=user<|message|>answerthree<|eot|>»",
    ("prefilled", "two turns"): "askone<|A|>«answerone<|E|>»<|U|>asktwo<|A|>«answertwo<|E|>»",
    ("gathered", "two calls at once"): "askone<|end|>\n<|assistant|>\n«<|c|>weather(city='Lisbon')<|/c|>\n"
    "<|c|>currency(amount=17, unit='guilder')<|/c|><|end|>»\n<|tool|>\nsunnyresult<|end|>\n<|tool|>\ndearresult"
    "<|end|>\n<|assistant|>\n«answerone<|end|>»\n",
    ("marked", "reasoning"): "askone<|end|>\n<|assistant|>«<think>thoughtone</think>»«answerone»«<|end|>»\n"
    "<|user|>asktwo<|end|>\n<|assistant|>«<think>thoughttwo</think>»«answertwo»«<|end|>»\n",
}  # fmt: skip


@pytest.mark.parametrize(("name", "label"), PLACED)
def test_turns_are_where_the_model_writes(name: str, label: str):
    assert marked(name, label) == PLACED[name, label]


@pytest.mark.parametrize("name", ["history", "brackets", "inside", "recipients", "no_end"])
def test_turns_of_long_conversations_are_placed_without_writing_each_beginning(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    shapes = [SHAPES[label].messages for label in ("two turns", "two calls in a row", "text and a call", "a call")]
    shape = Shape([message for number in range(30) for message in shapes[number % 4]])
    written = 0

    def render(self: ChatTemplate, messages: list[Any], *, prompt: bool = False) -> str:
        nonlocal written
        written += 1
        return whole(self, messages, prompt=prompt)

    whole = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", render)
    reserved = re.compile(r"<[|]?[a-zA-Z]+[|]?>|</s>|\[/?[A-Z]+\]")
    found, few = Turns(template(name, shape), shape.messages, reserved).spans(), written
    monkeypatch.setattr("xtrain.runtime.feed.chat.turns.ALIKE", 10**9)
    each = Turns(template(name, shape), shape.messages, reserved)
    assert found == each.spans() and len(found) >= len(each.spoken)
    assert few < 70 <= len(each.spoken) < written - few


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_trained_and_nothing_else_and_losses_are_reported(name: str):
    found: dict[str, list[str]] = {}
    written = 0
    for label, shape in SHAPES.items():
        conversation = Conversation(messages=shape.messages, tools=shape.tools)
        writer = ConversationWriter(ByteTokenizer(), Reads(form="chat", lost="allow"), template(name, shape))
        result = writer.written(conversation)
        if isinstance(result, str):
            assert "the template refuses it" in result or "the assistant says nothing" in result
            continue
        written += 1
        said = " ".join(result.text[start:end] for start, end in result.spans)
        if wrong := word_faults(shape, result.text, said, result.lost):
            found[label] = wrong
    assert found == {} and written >= 9


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_write_what_they_write_in_transformers(name: str, monkeypatch: pytest.MonkeyPatch):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    compared = 0
    for shape in SHAPES.values():
        try:
            ((theirs,), spans) = utils.render_jinja_template(
                [utils._normalize_chat_messages(shape.messages)], tools=shape.tools, chat_template=TEMPLATES[name],
                bos_token="<s>", eos_token="</s>", return_assistant_tokens_mask=name == "marked",
            )  # fmt: skip
        except Exception:  # a template may fail in any way
            continue
        ours = template(name, shape)
        assert ours.render(shape.messages) == ours.trace(shape.messages).text == theirs
        if name == "marked":
            assert Turns(ours, shape.messages, re.compile("x")).spans() == spans[0]
        compared += 1
    assert compared >= (1 if name == "lists" else 8)


@pytest.mark.slow
def test_published_templates(tmp_path: Path):
    if (templates := folder()) is None:
        pytest.skip(SKIP)
    comparison = Comparison(templates, tmp_path)
    rows = [comparison.row(name) for name in comparison.paths]
    assert {row.name: row.faults for row in rows if row.faults} == {}
    assert all(row.as_marked == row.marked for row in rows)
    assert table(rows) in Path("docs/chat_templates.md").read_text(), (
        "python tests/support/published_templates.py --write"
    )
