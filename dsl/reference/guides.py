"""Pages of the documentation, for `xtrain docs`: search by words, and a page or a section of it as text."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xtrain.lazy_attrs import frozen

DOCS: Final = Path(__file__).parents[2] / "docs"
_FENCE: Final = re.compile(r"^ *```")
# Words that stand in most sections, and endings that forms of a word differ in.
_COMMON: Final = frozenset(re.findall(r"\w+", "a an and are at be by do for from how i in is it my of on the to with"))
_ENDINGS: Final = ("ings", "ing", "ed", "es", "s", "er", "e")


@frozen
class PageSection:
    """Heading with the text up to the next one. path: of the page, `docs/data.md`; anchor: "" for a page's title."""

    path: str
    title: str
    anchor: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.path}#{self.anchor}" if self.anchor else self.path

    @property
    def line(self) -> str:
        """Its first sentence without markup; without prose, the first row of a list or table."""
        text = re.sub(r"```.*?```|<!--.*?-->", "", self.text, flags=re.DOTALL)
        prose = re.sub(r"^(?:[|]|    ).*$", "", text, flags=re.MULTILINE).strip() or text.strip()
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.partition("\n\n")[0].split()))
        plain = re.sub(r"^(?:[-|] *|\d+\. )", "", plain)
        return re.split(r"(?<=[.:]) (?=[A-Z`])| \| \| ", plain)[0].strip("| ").removesuffix(":")


def sections() -> Iterator[PageSection]:
    """Yield every section of every page; nothing where the pages are not installed."""
    for path in sorted(DOCS.rglob("*.md")):
        name = f"docs/{path.relative_to(DOCS)}"
        if name != "docs/index.md":
            yield from _sections(name, path.read_text(encoding="utf-8"))


def _sections(name: str, page: str) -> Iterator[PageSection]:
    title, anchor, lines, fenced = name, "", [], False
    for line in page.splitlines():
        fenced ^= bool(_FENCE.match(line))
        if not fenced and (head := re.match(r"#+ (.*)", line)):
            if lines or anchor:
                yield PageSection(name, title, anchor, "\n".join(lines))
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head[1]).replace("`", "")
            anchor = "" if line.startswith("# ") else re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            lines = []
        else:
            lines.append(line)
    yield PageSection(name, title, anchor, "\n".join(lines))


def search(words: str, most: int = 8) -> list[PageSection]:
    """Return the sections that words are about, best first.

    Sections with more of the words come first, and no section with fewer words than the best. The score is BM25
    (Robertson and Zaragoza 2009) with k1 = 1.2 and b = 0.5; a word of the heading counts eight times, of the page's
    title four times.
    """
    wanted = [word for word in dict.fromkeys(_words(words)) if word not in _COMMON] or _words(words)
    found: list[tuple[PageSection, Counter[str], Counter[str], Counter[str]]] = []
    title = ""
    for section in sections():
        title = section.title if not section.anchor else title
        own, page = Counter(_words(section.title)), Counter(_words(f"{title} {Path(section.path).stem}"))
        found.append((section, own, page, Counter(_words(section.text))))
    average = sum(text.total() for *_, text in found) / max(1, len(found))
    rarity = {}
    for word in wanted:
        having = sum(1 for _, own, page, text in found if own[word] or page[word] or text[word])
        rarity[word] = math.log(1 + (len(found) - having + 0.5) / (having + 0.5))
    scored: list[tuple[int, float, PageSection]] = []
    for section, own, page, text in found:
        length = 0.5 + 0.5 * text.total() / average
        times = {word: 8 * own[word] + 4 * page[word] + text[word] for word in wanted}
        score = sum(rarity[word] * count * 2.2 / (count + 1.2 * length) for word, count in times.items())
        scored.append((sum(map(bool, times.values())), score, section))
    best = max((count for count, *_ in scored), default=0)
    kept = [(score, section) for count, score, section in scored if count == best > 0]
    return [section for _, section in sorted(kept, key=lambda pair: -pair[0])[:most]]


def listing(found: list[PageSection], *, width: int, color: bool) -> str:
    """Return search results as text: heading and place, then the first sentence in one line."""
    lines = []
    for section in found:
        title = f"\x1b[1m{section.title}\x1b[0m" if color else section.title
        lines += [f"{title}  {section.place}"]
        lines += [f"  {textwrap.shorten(section.line, width - 2, placeholder=' …')}"] if section.line else []
    return "\n".join([*lines, "", f"to read one: xtrain docs {found[0].place.removeprefix('docs/')}"]) + "\n"


def _words(text: str) -> list[str]:
    """Return the stems of the words of a text. `fine-tune` gives the stems of `fine`, `tune` and `finetune`."""
    found = []
    for word in re.findall(r"[a-z0-9][a-z0-9_-]*", text.lower()):
        parts = [part for part in re.split(r"[-_]", word) if part]
        found += map(_stem, [*parts, "".join(parts)] if len(parts) > 1 else parts)
    return found


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def page(topic: str) -> str | None:
    """Return the text of `docs/data.md`, `data.md` or `data.md#reading`; None if there is no such page or section."""
    name, _, anchor = topic.removeprefix("docs/").partition("#")
    listed = {str(path.relative_to(DOCS)): path for path in DOCS.rglob("*.md")}
    if (path := listed.get(name)) is None:
        return None
    text = path.read_text(encoding="utf-8")
    if not anchor:
        return text
    parts = [section for section in _sections(f"docs/{name}", text) if section.anchor == anchor]
    return "".join(f"# {section.title}\n{section.text.rstrip()}\n" for section in parts) or None
