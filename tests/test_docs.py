"""The pages of the documentation: navigation, links, search, and the commands in them, which are run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import xtrain
from doc_pages import COMMAND, DOCS, ROOT, blocks_of, run_page

from xtrain.dsl.reference.guides import search, sections

PAGES = sorted(DOCS.rglob("*.md"))
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
LINK = re.compile(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)")
# Run by default; the others with `-m slow`.
QUICK = ("README.md",)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without blocks of code and code in a line."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Names of headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        head = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head)
        found.add(re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    wrong = []
    for target, anchor in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            wrong.append(target)
        elif DOCS in page.parents and (file.is_dir() or not file.is_relative_to(DOCS)):
            wrong.append(f"{target}: no page of the site")
        elif anchor and anchor not in anchors(file):
            wrong.append(f"{target}#{anchor}")
    assert not wrong


def test_every_page_is_in_the_navigation_and_in_the_index():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r"([\w/]+\.md)", navigation)
    pages = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(listed) == pages
    index = [target for target, _ in LINK.findall(prose(DOCS / "index.md"))]
    assert sorted(dict.fromkeys(index)) == [page for page in pages if page != "index.md"]


def test_the_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= 8 * 1024


def undeclared(page: Path) -> Iterator[str]:
    """Blocks with commands that are neither run nor marked as not run."""
    for block in blocks_of(page):
        if not block.is_run and block.title is None and block.skipped is None and COMMAND.search(block.text):
            yield f"{name_of(page)}:{block.line}"
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^|\n\n)((?:    .*\n)+)", text):
        if COMMAND.search(re.sub(r"^    ", "", block, flags=re.MULTILINE)):
            yield f"{name_of(page)}: {block.strip().splitlines()[0]}"


def test_every_block_of_commands_is_run_or_says_why_not():
    assert [place for page in READ for place in undeclared(page)] == []


@pytest.mark.parametrize("page", [
    pytest.param(page, id=name_of(page), marks=() if name_of(page) in QUICK else pytest.mark.slow)
    for page in READ
    if any(block.is_run and block.title is None for block in blocks_of(page))
])  # fmt: skip
@pytest.mark.timeout(900)
def test_commands_do_what_the_page_says(page, tmp_path):
    assert run_page(page, tmp_path) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_tunes_exports_and_asks_a_model_of_transformers(tmp_path):
    assert run_page(ROOT / "README.md", tmp_path, slow=True) > 0
    assert (tmp_path / "adapters" / "tuned" / "adapter_model.safetensors").exists()
    config = json.loads((tmp_path / "models" / "tuned" / "config.json").read_text())
    assert config["architectures"] == ["ApertusForCausalLM"]


@pytest.mark.parametrize(("words", "place"), [
    ("learning rate", "docs/numerics.md#learning-rate"),
    ("fine-tune", "docs/tutorial/chat.md"),
    ("finetuning", "docs/tutorial/chat.md"),
    ("resume on other ranks", "docs/tutorial/resume.md#resume-on-other-ranks"),
    ("running out of memory", "docs/profiling.md#when-memory-runs-out"),
    ("kubernetes", "docs/launch.md#kubernetes"),
    ("NaN loss", "docs/nonfinite.md"),
    ("wandb", "docs/logging.md#weights--biases"),
])  # fmt: skip
def test_words_find_the_sections_that_are_about_them(words, place):
    assert place in [section.place for section in search(words)[:4]]


def test_every_section_is_found_by_its_place():
    places = [section.place for section in sections() if "#" in section.place]
    for page in PAGES:
        found = {place.partition("#")[2] for place in places if place.startswith(f"{name_of(page)}#")}
        assert found <= anchors(page)
    assert len(places) > 200


@pytest.mark.parametrize(("topic", "said"), [
    ("learning rate", "docs/numerics.md#learning-rate\n"),
    ("lora", "docs/adapters.md"),
    ("parallel.fsdp.reduce", "setting\n"),
    ("data.md#reading", "# Reading\n"),
    ("docs/tutorial/chat.md", "# Fine-tune a chat model\n"),
    ("index.md", "## Reference\n"),
])  # fmt: skip
def test_docs_prints_topics_pages_and_results(topic, said):
    done = xtrain("docs", *topic.split())
    assert (done.returncode, done.stderr) == (0, "") and said in done.stdout


@pytest.mark.parametrize(("topic", "said"), [
    ("optimzer", "there is no topic `optimzer`; did you mean `xtrain docs optimizer`?"),
    ("xyzzy plugh", "there is no topic `xyzzy plugh`; `xtrain docs` lists all topics"),
    ("datas.md", "there is no page `datas.md`; `xtrain docs index.md` lists all pages"),
    ("data.md#nothing", "there is no page `data.md#nothing`; `xtrain docs index.md` lists all pages"),
    ("../README.md", "there is no page `../README.md`; `xtrain docs index.md` lists all pages"),
])  # fmt: skip
def test_docs_says_where_nothing_is_found(topic, said):
    done = xtrain("docs", *topic.split())
    assert (done.returncode, done.stderr) == (2, f"xtrain docs: {said}\n")
