"""The reference of the language, by path, and as Markdown for an editor's windows."""

from functools import cache

from xtrain.dsl.diagnostics.codes import CODES
from xtrain.dsl.reference.reference import Field, ReferencePage, every_page
from xtrain.dsl.reference.topics import TopicWord, words


@cache
def _pages() -> dict[str, list[ReferencePage]]:
    found: dict[str, list[ReferencePage]] = {}
    for page in every_page():
        found.setdefault(page.path, []).append(page)
    return found


@cache
def _words() -> dict[tuple[str, str], TopicWord]:
    return {(word.kind, word.name): word for word in words()}


def read_reference() -> None:
    """Build the reference, which once takes some tenths of a second."""
    _pages()
    _words()


def page_of(path: str, block: type | None) -> ReferencePage | None:
    """Return the page of a block, action, source or link; if several have the name, the page of the class."""
    pages = _pages().get(path, [])
    return next(
        (page for page in pages if block is not None and issubclass(block, page.block)), pages[0] if pages else None
    )


def field_of(path: str, block: type | None, name: str, label: str = "") -> Field | None:
    """Return a setting of a block, as it applies to the component with this label."""
    page = page_of(path, block)
    found = [each for each in page.fields if each.name in (name, "NAME")] if page is not None else []
    exact = [each for each in found if each.name == name] or found
    return next((each for each in exact if label in each.only), exact[0] if exact else None)


def field_text(field: Field) -> str:
    """Return the text of a setting: type, range, default and purpose."""
    facts = [field.kind, field.values, f"default `{field.default}`" if field.default is not None else "must be given"]
    if field.only:
        facts.append("only of " + ", ".join(field.only))
    lines = [f"**{field.path}** · " + " · ".join(fact for fact in facts if fact), "", field.doc]
    return "\n".join([*lines, *(["", f"`{field.usage}`"] if field.usage else [])])


def page_text(page: ReferencePage) -> str:
    """Return the text of a block, action, source or link: syntax and purpose."""
    lines = [f"{page.written}: {page.summary}", *page.more[:1]]
    names = [field.name for field in page.fields] + [inner.name for inner in page.inner]
    if names:
        lines.append("Settings: " + ", ".join(f"`{name}`" for name in names))
    return "\n\n".join(lines)


def word_text(kind: str, name: str) -> str | None:
    """Return the text of a word without a page: a statement, function, unit, multiplier, constant or event."""
    word = _words().get((kind, name))
    return f"`{word.written}`\n\n{word.meaning}" if word is not None else None


def word_line(kind: str, name: str) -> str:
    """Return the meaning of a word, without its syntax."""
    word = _words().get((kind, name))
    return word.meaning if word is not None else ""


def words_of(kind: str) -> list[TopicWord]:
    """Return all words of a kind."""
    return [word for (of, _), word in _words().items() if of == kind]


def code_page(code: str) -> str | None:
    """Return the page of a code as Markdown."""
    page = CODES.get(code)
    if page is None:
        return None
    lines = [f"# {page.code}: {page.title}", *(" ".join(each.split()) for each in page.meaning.strip().split("\n\n"))]
    for heading, text in (("Wrong", page.wrong), ("Right", page.right)):
        if text:
            lines.append(f"{heading}:\n\n```xtrain\n" + text.strip("\n") + "\n```")
    return "\n\n".join(lines) + "\n"
