"""The template of conversations beside a `tokenizer.json`, and why a tokenizer cannot be read."""

import json
import re
from pathlib import Path
from typing import Any, Final

# Of chat templates; the first that has one decides.
CHAT_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# Texts with which templates set turns apart, and which so should be tokens: `<|im_start|>`, `<start_of_turn>`.
_MARKERS: Final = re.compile(r"<[|｜][^<>|｜\s'\"+{}~]+[|｜]>|</?[a-z]+_of_[a-z]+>")
_COMMENTS: Final = re.compile(r"\{#.*?#\}", re.DOTALL)


class TokenizerUnreadable(Exception):
    """A file is missing, is no tokenizer, or stands beside one and is not what it should be; the text says which."""

    def __init__(self, message: str, path: Path | None = None, remedy: str | None = None) -> None:
        super().__init__(message if path is None else f"{path.as_posix()}: {message}")
        self.message, self.path, self.remedy = message, path, remedy


class TokenizerMissing(TokenizerUnreadable):
    """Nothing can be read at its path; another machine may have it, or this one later."""


def find_chat_template(folder: Path) -> str | None:
    """The text of the template beside a `tokenizer.json`; None if there is none.

    Of several named ones it is the `default`. Raises TokenizerUnreadable for a file that cannot be read as what it is.
    """
    for name in CHAT_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content: Any = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                content = json.loads(content)
                content = content.get("chat_template") if isinstance(content, dict) else None
        except (OSError, ValueError, RecursionError) as error:
            raise TokenizerUnreadable(f"cannot be read: {error}", path=path) from error
        template = _default(content, path)
        if template is not None:
            return template
    return None


def markers(template: str) -> tuple[str, ...]:
    """Return the texts with which a template sets turns apart, in their order, as far as they stand in it."""
    return tuple(dict.fromkeys(_MARKERS.findall(_COMMENTS.sub("", template))))


def _default(content: Any, path: Path) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        content = {each.get("name"): each.get("template") for each in content}
    if isinstance(content, dict) and isinstance(content.get("default"), str):
        return content["default"]
    raise TokenizerUnreadable(
        "its chat templates have no `default`", path=path, remedy="Name the file of one as `template`."
    )
