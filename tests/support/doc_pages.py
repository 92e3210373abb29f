"""Pages of the documentation as programs: files that they show, commands that they give, output that they promise.

A fence says what is done with its block:

- ```` ```… title="NAME" ````: the file NAME, written into the working folder;
- ```` ```sh ````: commands, run by bash until one fails;
- ```` ```console ````: commands after `$ `, each followed by its output. `…` stands for any text in a line,
  and alone in a line for any lines. Numbers with a point or a unit of time, and ids, may differ.

`<!-- not run: REASON -->` before a fence leaves the block out, with `SLOW` as the reason only by default. `<!-- set up:
COMMANDS -->` is run and not shown.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from attrs import evolve, frozen

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"\n]+)\")?\n"
    r"(?P<text>.*?)^(?P=indent)```$|<!-- set up:\n(?P<hidden>.*?)-->",
    re.MULTILINE | re.DOTALL,
)
SLOW = "a slow test does"
COMMAND = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:xtrain [a-z-]+(?= |$)|(?:python|torchrun|srun|pip|mkdocs|pytest) \S)", re.MULTILINE
)
# What differs from run to run: decimals, times, ids, the widths that follow from them.
VARYING = (
    (r"\b\d+(?:\.\d+)?(?:e[-+]?\d+)?(?: ?(?:s|ms|min|h))\b", "<time>"),
    (r"\b\d+\.\d+(?:e[-+]?\d+)?", "<number>"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{16}\b|\b[0-9a-f]{16}\b", "<id>"),
    (r"[█▇▆▅▄▃▂▁]+", "<curve>"),
    (r"[─]{3,}", "<rule>"),
)


@frozen
class Block:
    """A fenced block. language: of the fence, `set up` for a hidden one. skipped: the reason, None where it is run."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    skipped: str | None

    @property
    def is_run(self) -> bool:
        return self.skipped is None and (self.title is not None or self.language in ("sh", "console", "set up"))


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["hidden"] is not None:
            found.append(Block(page, line, "set up", None, match["hidden"], None))
        else:
            inner = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            found.append(Block(page, line, match["language"], match["title"], inner, match["reason"]))
    return found


def run_page(page: Path, folder: Path, *, slow: bool = False) -> int:
    """Run a page in a folder; return the number of blocks that ran commands. slow: run blocks marked `SLOW`, too.

    Raises AssertionError, with the place of the block, where a command fails or prints something else.
    """
    shutil.copytree(ROOT / "specs", folder / "specs", dirs_exist_ok=True)
    count = 0
    for block in blocks_of(page):
        if slow and block.skipped == SLOW:
            block = evolve(block, skipped=None)
        if not block.is_run:
            continue
        if block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
            continue
        count += 1
        if block.language == "console":
            for command, shown in _dialogue(block.text):
                _compare(block, command, shown, _bash(block, command, folder, fails=None))
        else:
            _bash(block, block.text, folder, fails=False)
    return count


def _bash(block: Block, script: str, folder: Path, *, fails: bool | None) -> str:
    """Run a script in the folder and return what it prints. fails: False if it must end with 0."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "CHECKOUT": str(ROOT), "COLUMNS": "100", "PATH": path}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    place = f"{block.page.relative_to(ROOT)}:{block.line}"
    assert fails is None or done.returncode == 0, f"{place}: exit code {done.returncode}\n{script}\n{done.stdout}"
    return done.stdout


def _dialogue(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a console block, each with the lines shown after it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            assert found, f"a console block begins with a command: {line}"
            found[-1][1].append(line)
    return found


def _compare(block: Block, command: str, shown: list[str], printed: str) -> None:
    """Compare shown lines with printed ones, in order; see the module for `…`."""
    lines = [_plain(line) for line in printed.splitlines() if line.strip()]
    place, at, anywhere = f"{block.page.relative_to(ROOT)}:{block.line}", 0, False
    for line in map(_plain, shown):
        if line == "…":
            anywhere = True
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        matching = next((i for i in range(at, len(lines)) if pattern.fullmatch(lines[i])), None)
        assert matching is not None and (anywhere or matching == at), (
            f"{place}: `{command}` does not print\n  {line}\nbut\n{printed}"
        )
        at, anywhere = matching + 1, False
    assert anywhere or at == len(lines) or not shown, f"{place}: `{command}` prints more:\n{printed}"


def _plain(line: str) -> str:
    """Return a line without what varies, and with single spaces."""
    for pattern, name in VARYING:
        line = re.sub(pattern, name, line)
    return " ".join(line.split())
