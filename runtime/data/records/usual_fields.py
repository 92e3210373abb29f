"""What the fields of records are usually called, to say how a dataset of them is written."""

from collections.abc import Collection
from typing import Final

# Settings of a dataset → field of each; and those that are added where there is such a field.
_FORMS: Final[tuple[tuple[dict[str, str], dict[str, str]], ...]] = (
    ({"messages": "messages"}, {"tools": "tools", "system": "system"}),
    ({"messages": "conversations"}, {"tools": "tools", "system": "system"}),
    ({"messages": "conversation"}, {"tools": "tools", "system": "system"}),
    ({"chosen": "chosen", "rejected": "rejected"}, {"prompt": "prompt"}),
    ({"prompt": "prompt", "response": "completion"}, {"label": "label"}),
    ({"prompt": "prompt", "response": "response"}, {"label": "label"}),
    ({"prompt": "instruction", "response": "output"}, {"input": "input", "system": "system"}),
    ({"prompt": "instruction", "response": "response"}, {"input": "context"}),
    ({"prompt": "question", "response": "answer"}, {}),
    ({"prompt": "question", "response": "response"}, {"system": "system_prompt"}),
    ({"prompt": "problem", "response": "solution"}, {}),
    ({"tokens": "input_ids"}, {"mask": "labels"}),
    ({"tokens": "tokens"}, {"mask": "mask"}),
    ({"text": "content"}, {}),
)


def settings_for(fields: Collection[str]) -> str:
    """Settings of a dataset whose records have such fields, as a spec has them; empty if they are none of the usual."""
    for needed, further in _FORMS:
        if all(name in fields for name in needed.values()):
            found = needed | {setting: name for setting, name in further.items() if name in fields}
            return ", ".join(f'{setting} = "{name}"' for setting, name in found.items())
    return ""
