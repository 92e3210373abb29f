"""Records in the forms of files as they are found: tokens and masks are those that transformers gives for them.

A record of each form, shortened: UltraChat 200k, Alpaca, ShareGPT as Vicuna has it, SlimOrca, Hermes' function calls,
calls as LLaMA-Factory and OpenAI write them, and texts in parts.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_chat_model import SPECIALS, WORDS
from tokenising import made

from xtrain.runtime.feed.documents import TokenDocument
from xtrain.runtime.feed.sources.fields import settings_for
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}
{%- endif %}{{ '\\n' }}
{%- endfor %}"""

QUESTION, ANSWER = "Is it going to rain in Oslo?", "No, it stays dry."
USER, ASSISTANT = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
CALL = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALLED = {
    "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}],
}  # fmt: skip
RESULT = {"role": "tool", "content": '{"rain": 0}'}
CALLS = [USER, CALLED, RESULT, ASSISTANT]
SYSTEM = {"role": "system", "content": "You are a function calling AI model. <tools>[]</tools>"}
HERMES_CALL = "<tool_call>\n{'arguments': {'city': 'Oslo'}, 'name': 'weather'}\n</tool_call>"


def openai_call(**more: Any) -> dict[str, Any]:
    return {
        "id": "call_1",
        "type": "function",
        "function": {**CALL, "arguments": json.dumps(CALL["arguments"])},
        **more,
    }


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# Name → record, settings, and the messages and tools that it means.
FOUND: dict[str, tuple[dict[str, Any], dict[str, str], list[dict[str, Any]], Any]] = {
    "ultrachat 200k": ({"prompt": QUESTION, "prompt_id": "f0e3", "messages": [USER, ASSISTANT, USER, ASSISTANT]},
        {"messages": "messages"}, [USER, ASSISTANT, USER, ASSISTANT], None),
    "alpaca": ({"instruction": "Sort.", "input": "3, 1", "output": "1, 3", "text": "Below is an instruction …"},
        {"prompt": "instruction", "response": "output", "input": "input"},
        [{"role": "user", "content": "Sort.\n\n3, 1"}, {"role": "assistant", "content": "1, 3"}], None),
    "alpaca without input": ({"instruction": QUESTION, "input": "", "output": ANSWER},
        {"prompt": "instruction", "response": "output", "input": "input"}, [USER, ASSISTANT], None),
    "sharegpt": ({"id": "QWJhYvA_0", "conversations": [
                {"from": "human", "value": QUESTION, "markdown": None, "text": None},
                {"from": "gpt", "value": ANSWER, "markdown": None, "text": None}]}, {"messages": "conversations"},
        [USER, ASSISTANT], None),
    "slimorca": ({"conversations": [{"from": "system", "value": "You are helpful.", "weight": None},
                {"from": "human", "value": QUESTION, "weight": 0.0}, {"from": "gpt", "value": ANSWER, "weight": 1.0}]},
        {"messages": "conversations", "message_weight": "weight"},
        [{"role": "system", "content": "You are helpful."}, USER, ASSISTANT], None),
    "hermes function calling": (
        {"id": "8f3a", "conversations": [
                {"from": "system", "value": SYSTEM["content"]},
                {"from": "human", "value": QUESTION},
                {"from": "gpt", "value": HERMES_CALL},
                {"from": "tool", "value": RESULT["content"]},
                {"from": "gpt", "value": ANSWER},
            ], "tools": json.dumps(TOOLS), "category": "Weather", "task": "Forecast"},
        {"messages": "conversations", "tools": "tools"},
        [SYSTEM, USER, {"role": "assistant", "content": HERMES_CALL}, RESULT, ASSISTANT],
        TOOLS,
    ),
    "llama factory": ({"conversations": [
                {"from": "human", "value": QUESTION},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": RESULT["content"]},
                {"from": "gpt", "value": ANSWER},
            ], "tools": json.dumps(TOOLS)}, {"messages": "conversations", "tools": "tools"}, CALLS, TOOLS),
    "openai": ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [openai_call()]},
                {**RESULT, "tool_call_id": "call_1"}, ASSISTANT], "tools": TOOLS},
        {"messages": "messages", "tools": "tools"}, CALLS, TOOLS),
    "openai without definitions": ({"messages": [USER,
                {"role": "assistant", "content": None, "tool_calls": [openai_call()]},
                {**RESULT, "tool_call_id": "call_1"}, ASSISTANT]}, {"messages": "messages"}, CALLS, None),
    "llama factory with a system": ({"conversations": [
                {"from": "human", "value": QUESTION},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": RESULT["content"]},
                {"from": "gpt", "value": ANSWER},
            ], "system": SYSTEM["content"], "tools": json.dumps(TOOLS)},
        {"messages": "conversations", "tools": "tools", "system": "system"}, [SYSTEM, *CALLS], TOOLS),
    "openorca": ({"id": "flan.1", "system_prompt": SYSTEM["content"], "question": QUESTION, "response": ANSWER},
        {"prompt": "question", "response": "response", "system": "system_prompt"}, [SYSTEM, USER, ASSISTANT], None),
    "openai before tools": ({"messages": [USER,
                {"role": "assistant", "content": None, "function_call": openai_call()["function"]},
                {"role": "function", "name": "weather", "content": RESULT["content"]}, ASSISTANT]},
        {"messages": "messages"}, CALLS, None),
    "texts in parts": ({"messages": [{"role": "user", "content": [text_part(QUESTION[:9]), text_part(QUESTION[9:])]},
                {"role": "assistant", "content": [text_part(ANSWER)]}]}, {"messages": "messages"}, [USER, ASSISTANT],
        None),
    "messages on both sides": ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
        {"prompt": "prompt", "response": "completion"}, [SYSTEM, USER, ASSISTANT], None),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = [*WORDS, QUESTION, ANSWER, "tool_call", "function"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(words * 4, trainer)
    end, start, turn = SPECIALS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=turn, pad_token=end, additional_special_tokens=[start]
    )
    tokenizer.chat_template = TEMPLATE
    to = tmp_path_factory.mktemp("found") / "tokenizer"
    tokenizer.save_pretrained(to)
    return to


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return load_tokenizer(str(folder), folder.parent)


@pytest.mark.parametrize("name", FOUND)
def test_tokens_and_masks_are_those_of_transformers(name: str, folder: Path, tokenizer: TextTokenizer):
    from transformers import AutoTokenizer

    record, settings, messages, tools = FOUND[name]
    form = {"form": "chat"} if "messages" in settings else {"form": "instruction"}
    document = made(record, {**form, **settings, "template": "auto"}, tokenizer)
    assert isinstance(document, TokenDocument) and document.trained is not None, document
    theirs: Any = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert document.ids.tolist() == theirs["input_ids"]
    assert document.trained.astype(int).tolist() == theirs["assistant_masks"]
    assert 0 < document.trained.sum() < len(document.ids)
    if "message_weight" in settings:
        assert np.array_equal(document.columns["weights"], document.trained)


@pytest.mark.parametrize("name", FOUND)
def test_a_dataset_that_names_no_field_is_told_these_settings(name: str):
    record, settings, _, _ = FOUND[name]
    suggested = settings_for(record.keys())
    wanted = [f'{setting} = "{field}"' for setting, field in settings.items() if setting != "message_weight"]
    assert suggested == ", ".join(wanted)


@pytest.mark.parametrize(
    "text", ["weather(Oslo)", "[]", '"weather"', '{"arguments": {}}', '{"name": "a", "arguments": 3}']
)
def test_calls_that_are_none(text: str, tokenizer: TextTokenizer):
    talk = [{"from": "human", "value": QUESTION}, {"from": "function_call", "value": text}]
    reason = made({"conversations": talk}, {"form": "chat", "messages": "conversations"}, tokenizer)
    assert (
        isinstance(reason, str)
        and reason.startswith("field `conversations`, message 2: ")
        and "function_call" in reason
    )
