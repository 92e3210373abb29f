"""Test files that are likely to notice a fault of a line, for tests/mutants.py: by names, imports and words."""

import ast
import math
import re
from collections import Counter
from functools import cached_property
from pathlib import Path

from rooms import ROOMS, ROOT

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,}|[A-Z]\d{3}")
# Tests of all that a room says, which notice most of what changes it. They follow the first few of the others.
PLANS = ("tests/planner/test_golden.py",)
TEXTS = ("tests/dsl/test_gallery.py", "tests/dsl/test_docs.py")
RUNS = ("tests/test_quickstart.py",)
WHOLE = {
    "dsl": (*TEXTS, *PLANS),
    **dict.fromkeys(("plan", "blocks", "contracts", "planner"), (*PLANS, TEXTS[0])),
    "components": (*PLANS, *TEXTS, *RUNS),
    "runtime": RUNS,
}
FEW = 3
# Points of a test file, in nats of the words that it shares with the fault's function.
OF_ITS_NAME, IMPORTS, NEAR, STARTS_RANKS = 60.0, 15.0, 4.0, -15.0
OF_THE_LINE = 3.0  # times a word of the function


class RelatedTests:
    """Every test file of a checkout with its words."""

    @cached_property
    def texts(self) -> dict[str, str]:
        return _texts("tests", "test_*.py")

    @cached_property
    def words(self) -> dict[str, set[str]]:
        return {name: set(WORD.findall(text)) for name, text in self.texts.items()}

    @cached_property
    def frequent(self) -> Counter[str]:
        return Counter(word for words in self.words.values() for word in words)

    @cached_property
    def product(self) -> dict[str, str]:
        return {name: text for room in ROOMS for name, text in _texts(room, "*.py").items()}

    def of(self, path: str, text: bytes, line: int) -> list[str]:
        """Return all test files that share anything with a line, the likeliest first."""
        stem = Path(path).stem.strip("_").removesuffix("_run").removesuffix("_torch")
        whole = WHOLE.get(Path(path).parts[0], ())
        weights = self.weights(path, text, line)
        direct = _importing(path)
        users = [name for name, other in self.product.items() if direct.search(other)]
        indirect = [_importing(user) for user in users]
        places, folders = Path("tests", path).parents, Path(path).parts[1:-1]

        def points(name: str) -> float:
            own = Path(name).stem.removeprefix("test_")
            named = OF_ITS_NAME * (own == stem) + OF_ITS_NAME / 2 * (own in stem or stem in own or own in folders)
            imports = IMPORTS * bool(direct.search(self.texts[name]))
            imports += IMPORTS / 3 * any(module.search(self.texts[name]) for module in indirect)
            near = NEAR * sum(place in Path(name).parents for place in places)
            ranks = STARTS_RANKS * name.startswith("tests/distributed")
            shared = sum(weights.get(word, 0.0) for word in self.words[name])
            return named + imports + near + ranks + shared / (0.5 + len(self.words[name]) / 800)

        ranked = sorted(self.texts.keys() - set(whole), key=points, reverse=True)
        return [*ranked[:FEW], *whole, *ranked[FEW:]]

    def weights(self, path: str, text: bytes, line: int) -> dict[str, float]:
        """Return the words of a line and of the names of what it stands in, with their rarity among test files."""
        inside, function = [Path(path).stem], ""
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.lineno <= line <= (node.end_lineno or 0):
                inside.append(node.name)
                if not isinstance(node, ast.ClassDef):
                    function = ast.get_source_segment(text.decode(), node) or ""
        statement = text.decode().split("\n")[line - 1]
        weights = dict.fromkeys(WORD.findall(function), 1.0)
        weights |= dict.fromkeys((*WORD.findall(statement), *WORD.findall(" ".join(inside))), OF_THE_LINE)
        rare = {word: math.log(len(self.words) / self.frequent[word]) for word in weights if self.frequent[word]}
        return {word: weights[word] * nats for word, nats in rare.items()}


def _texts(folder: str, pattern: str) -> dict[str, str]:
    paths = sorted((ROOT / folder).rglob(pattern))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def _importing(path: str) -> re.Pattern[str]:
    """Return what an import of a module looks like, absolute or relative."""
    folder, _, name = path.removesuffix(".py").replace("/", ".").rpartition(".")
    parent = re.escape(folder.rpartition(".")[2])
    among = rf"from ([.\w]*\b{parent}|\.+) import .*\b{name}\b"
    return re.compile(rf"from [.\w]*(\.|\b{parent}\.){name} import|{among}")
