"""Where the chat template of a tokenizer stands: in a file of its own, or in its settings."""

import json
from pathlib import Path
from typing import Any

from ..errors import DataError

# The first that has one decides.
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def find_chat_template(folder: Path) -> str | None:
    """The text of the template beside a `tokenizer.json`; None if there is none.

    Of several named ones it is the `default`. Raises DataError for a file that cannot be read as what it is.
    """
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content: Any = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                content = json.loads(content)
                content = content.get("chat_template") if isinstance(content, dict) else None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", path=path) from error
        template = _default(content, path)
        if template is not None:
            return template
    return None


def _default(content: Any, path: Path) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        content = {each.get("name"): each.get("template") for each in content}
    if isinstance(content, dict) and isinstance(content.get("default"), str):
        return content["default"]
    raise DataError("its chat templates have no `default`", path=path, remedy="Name the file of one as `template`.")
