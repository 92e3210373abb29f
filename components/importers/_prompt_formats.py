"""Prompt formats without roles, such as Alpaca's, as chat templates of a spec."""

import re
from typing import Final

from xtrain.dsl.spec_text import value_text

_INTRODUCTIONS: Final = tuple(
    f"Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    for paired in (", paired with an input that provides further context", "")
)


def _introduced(with_input: str, without: str) -> tuple[str, str]:
    given, alone = _INTRODUCTIONS
    return with_input.replace("{intro}", given), without.replace("{intro}", alone)


# Style of Alpaca's prompt (github.com/tatsu-lab/stanford_alpaca, and axolotl's other styles) → the text before an
# answer with and without input.
ALPACA: Final = {
    "instruct": _introduced(
        "{intro}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "{intro}\n\n### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "chat": _introduced(
        "SYSTEM: {intro}\nUSER: {instruction}\n{input}\nASSISTANT:",
        "SYSTEM: {intro}\nUSER: {instruction}\nASSISTANT:",
    ),
    "chatml": _introduced(
        "<|im_start|>system\n{intro}<|im_end|>\n<|im_start|>user\n{instruction}\n{input}<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|im_start|>system\n{intro}<|im_end|>\n<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": _introduced(
        "<|system|>\n{intro}<|end|>\n<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|system|>\n{intro}<|end|>\n<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
}


def prompt_template(with_input: str, without: str) -> str:
    """Return a chat template for records of an instruction, an input and an answer.

    The formats have `{instruction}` and `{input}`. The input comes as the message of the system, which xtrain leaves
    out where the field is empty.
    """

    def expression(text: str) -> str:
        names = {"{instruction}": "message.content", "{input}": "found.input"}
        parts = re.split(r"(\{instruction\}|\{input\})", text)
        return " + ".join(names.get(part) or value_text(part) for part in parts if part) or "''"

    return (
        "\n{%- set found = namespace(input = '') -%}\n"
        "{%- for message in messages -%}\n"
        "{%- if message.role == 'system' -%}{%- set found.input = message.content -%}\n"
        "{%- elif message.role == 'assistant' -%}{{- message.content -}}\n"
        f"{{%- elif found.input -%}}{{{{- {expression(with_input)} -}}}}\n"
        f"{{%- else -%}}{{{{- {expression(without)} -}}}}\n"
        "{%- endif -%}\n"
        "{%- endfor -%}\n"
    )
