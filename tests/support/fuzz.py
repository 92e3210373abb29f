"""Coverage-guided fuzzing of the language: texts that reach new branches are kept and mutated further.

    python tests/support/fuzz.py --seconds 60

Each text goes through lexer, parser, loader, checker, formatter and fixer; of one that is right, a plan is made. Exit
status 1 if anything but a diagnostic or a plan came of one; the shortest text for each finding is printed, and written
to `--out`. `--engine atheris` lets libFuzzer mutate, where the package atheris is installed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from instrument import install

ROOT = Path(__file__).parents[2]
ROOMS = ("blocks", "contracts", "dsl", "plan", "planner")
# What reads Python files of users and folders of models, to which texts alone do not come.
OF_FILES = (
    "blocks.layer_reader", "blocks.user_layer", "dsl.checking.config_json", "dsl.checking.model_folder",
    "dsl.user_parts", "plan.data", "plan.weight_files", "plan.weight_layout",
)  # fmt: skip
SLOWEST = 20  # seconds that one text may take
FRAGMENTS = (
    "{", "}", "(", ")", "[", "]", ",", "=", "==", ":", "->", '"', '"""', "'", "#", "\n", " ", "\t", "then", "every",
    "on", "let", "param", "include", "use", "%", "**", "*", "//", "/", "+", "-", ".", "1f1b", "9k", "10 steps", "\\",
    "\0", "é", "“", ";", "none", "auto", "true", "1e999", "0x1", "\\u{", "\ufeff", "\r\n", "\x0c", "\u2028", "😀", "٣",
    "0", "1", "-1", "2.5", "1e-300", "9" * 40, "4 steps", "20B tokens", "10%", "1 GiB", "30 min", "5 stpes", "8 k",
    "K", 'env("X", 1)', "min(1, 2)", "x = 1", "a { }", "= {", "{ a: 1 }", "[1, 2]", "every 1 step log",
    "on sigterm checkpoint then stop", "// c", "let a = b\nlet b = a", 'include "part.xtrain"',
    'include "spec.xtrain"', "parallel { tp = 2 }", '"\\u{0}"', f'"{"a" * 300}/*"',
    "\n# --set optimizer.lr=1", "\n# --set ", "--set parallel.tp=", "--set dataset.web.source=", "--set width=",
    "--set collate=", "--set batch.micro=(2",
)  # fmt: skip
# Names that no file has, or that none should.
NAMES = (
    "", ".", "/", "~", "**/*", "[", "models", "/dev/null", "a/" * 3000, "x" * 300, "x" * 300 + ".py", "\\u{0}", "a b",
)  # fmt: skip
Text = str


class Timeout(BaseException):
    """A text that takes far too long; no `except Exception` may swallow it."""


def seeds() -> list[Text]:
    """The corpus to begin with: every spec, starter and broken example there is."""
    folders = [
        ROOT / "specs", ROOT / "dsl" / "starters", ROOT / "tests" / "dsl" / "data", ROOT / "tests" / "dsl" / "gallery",
    ]  # fmt: skip
    return ["", *(path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.rglob("*.xtrain")))]


# What each text must bear ---------------------------------------------------------------------------------------------


def make_target(parts: dict[str, Text]) -> Callable[[Text, bool], None]:
    """A function that puts one text through everything; whatever it raises is a finding. The flag asks for fixes."""
    from xtrain.dsl.autofix import apply_fixes
    from xtrain.dsl.diagnostics.codes import CODES
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, SpecErrors, render
    from xtrain.dsl.load import load_spec
    from xtrain.dsl.spec_text import spec_json
    from xtrain.dsl.syntax.format import format_source
    from xtrain.dsl.syntax.parser import parse_file
    from xtrain.plan.serialise import dumps, from_json
    from xtrain.planner.load import check_from_spec, plan_from_loaded
    from xtrain.planner.rules.validate import check_spec

    def sets(text: Text) -> list[str]:
        """Overrides, which a text may have in its comments, as those of the gallery do."""
        return re.findall(r"^# --set (.*)$", text, re.MULTILINE)

    def checked(text: Text, others: dict[str, Text]) -> Diagnostics:
        return check_from_spec("spec.xtrain", sets(text), {**parts, "spec.xtrain": text, **others})

    def weight(found: Diagnostics) -> list[int]:
        codes = [diagnostic.code for diagnostic in found]
        return [sum(code.startswith(kind) for code in codes) for kind in ("X1", "X2", "X3", "X", "")]

    def formatted(text: Text) -> None:
        source = SourceText("spec.xtrain", text)
        found = Diagnostics()
        parse_file(source, found)
        try:
            once = format_source(source)
        except SpecErrors as errors:
            assert found.has_errors and errors.diagnostics.has_errors
            return
        assert not found.has_errors
        assert format_source(SourceText("spec.xtrain", once)) == once, "the formatter is not idempotent"

    def target(text: Text, fix: bool) -> None:
        text = text.encode(errors="replace").decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        formatted(text)
        loaded = load_spec("spec.xtrain", sets(text), {**parts, "spec.xtrain": text})
        assert (loaded.spec is None) == loaded.diagnostics.has_errors
        found = Diagnostics()
        found.extend(loaded.diagnostics)
        found.extend(check_spec(loaded.draft, None, loaded.unknown_settings) if loaded.draft is not None else ())
        for diagnostic in found:
            assert diagnostic.code in CODES
            assert render(diagnostic) and render(diagnostic, color=True)
            json.dumps(diagnostic.to_json())
            if diagnostic.fix is not None:
                span = diagnostic.fix.span
                assert 0 <= span.start <= span.end <= len(span.source.text)
                assert span.text != diagnostic.fix.text, "a fix that changes nothing"
        if loaded.spec is not None:
            json.dumps(spec_json(loaded.spec))
            again = load_spec("s", (), {"s": loaded.resolved_text()})
            assert again.spec == loaded.spec, "the resolved text says something else"
            if not found.has_errors:
                compiled = plan_from_loaded(loaded)
                assert (compiled.plan is None) == compiled.diagnostics.has_errors
                if compiled.plan is not None:
                    assert from_json(json.loads(dumps(compiled.plan))) == compiled.plan, "the plan is read as another"
        if fix and any(d.fix for d in found):
            result = apply_fixes(lambda others: checked(text, dict(others)))
            assert bool(result.texts) == bool(result.fixed)
            if result.texts:
                formatted(result.texts.get("spec.xtrain", text))
                left = checked(text, dict(result.texts))  # the overrides are those of the first text
                assert left.render() == result.diagnostics.render()
                assert weight(left) < weight(found), "a fix that makes things worse"

    return target


# Mutation -------------------------------------------------------------------------------------------------------------


class Mutator:
    """Makes new texts of old ones: words swapped, doubled, replaced; lines and whole pieces moved between texts."""

    def __init__(self, dice: random.Random) -> None:
        from spec_texts import write

        from xtrain.dsl.reference.reference import every_page
        from xtrain.dsl.schema import blocks

        self.dice, self.write = dice, write
        words = [field.name for page in every_page() for field in page.fields]
        words += [word for page in every_page() for field in page.fields for word in field.choices]
        self.words = (*FRAGMENTS, *words, *(page.name for page in every_page()), *blocks.EVENTS)

    def mutate(self, corpus: list[Text]) -> Text:
        text = min((self.dice.choice(corpus) for _ in range(3)), key=len)  # short texts run faster: try them more often
        for _ in range(self.dice.choice((1, 1, 1, 2, 2, 3, 5))):
            text = self.dice.choice(_MUTATIONS)(self, text, corpus)
        return text[:20_000]

    def pieces(self, text: Text) -> list[Text]:
        return re.findall(r"\w+|\s+|.", text, re.DOTALL)

    def place(self, items: list) -> int:
        return self.dice.randrange(len(items) + 1)

    def drop(self, text: Text, corpus: list[Text]) -> Text:
        parts = self.pieces(text)
        at = self.place(parts)
        return "".join(parts[:at] + parts[at + self.dice.choice((1, 1, 2, 5)) :])

    def insert(self, text: Text, corpus: list[Text]) -> Text:
        parts = self.pieces(text)
        parts.insert(self.place(parts), self.dice.choice(self.words))
        return "".join(parts)

    def replace(self, text: Text, corpus: list[Text]) -> Text:
        parts = self.pieces(text) or [""]
        parts[self.dice.randrange(len(parts))] = self.dice.choice(self.words)
        return "".join(parts)

    def swap(self, text: Text, corpus: list[Text]) -> Text:
        parts = self.pieces(text)
        if len(parts) > 1:
            a, b = self.dice.randrange(len(parts)), self.dice.randrange(len(parts))
            parts[a], parts[b] = parts[b], parts[a]
        return "".join(parts)

    def letter(self, text: Text, corpus: list[Text]) -> Text:
        at = self.dice.randrange(len(text) + 1)
        new = self.dice.choice(
            ("", text[at : at + 1] * 2, self.dice.choice("aZ_9 =\n{}\"'"), text[at : at + 1].swapcase())
        )
        return text[:at] + new + text[at + 1 :]

    def lines(self, text: Text, corpus: list[Text]) -> Text:
        """Lines of another text among those of this one."""
        own, other = text.split("\n"), self.dice.choice(corpus).split("\n")
        begin = self.dice.randrange(len(other))
        taken = other[begin : begin + self.dice.choice((1, 1, 2, 6))]
        at = self.place(own)
        return "\n".join(own[:at] + taken + own[at + self.dice.choice((0, 0, 1, 3)) :])

    def cut(self, text: Text, corpus: list[Text]) -> Text:
        at = self.dice.randrange(len(text) + 1)
        return text[:at] if self.dice.random() < 0.6 else text[at:]

    def nest(self, text: Text, corpus: list[Text]) -> Text:
        many = self.dice.choice((2, 5, 60, 1200))
        opener, closer = self.dice.choice(("()", "[]", "{}", ("a {", "}"), ("-", ""), ("f(", ")"), ("{x:", "}")))
        at = self.dice.randrange(len(text) + 1)
        return text[:at] + opener * many + self.dice.choice(("1", "", "a = 1")) + closer * many + text[at:]

    def grammar(self, text: Text, corpus: list[Text]) -> Text:
        piece = self.write(random.Random(self.dice.random()))
        return f"{text}\n{piece}" if self.dice.random() < 0.7 else piece

    def name(self, text: Text, corpus: list[Text]) -> Text:
        """Another text in quotes, for what takes the name of a file."""
        quoted = list(re.finditer(r'"[^"\n]*"', text))
        if not quoted:
            return self.insert(text, corpus)
        found = self.dice.choice(quoted)
        return f'{text[: found.start()]}"{self.dice.choice(NAMES)}"{text[found.end() :]}'

    def double(self, text: Text, corpus: list[Text]) -> Text:
        begin = self.dice.randrange(len(text) + 1)
        piece = text[begin : begin + self.dice.choice((3, 20, 200))]
        return text[:begin] + piece * self.dice.choice((2, 2, 7)) + text[begin + len(piece) :]


_MUTATIONS = (
    Mutator.drop, Mutator.insert, Mutator.replace, Mutator.swap, Mutator.letter, Mutator.letter, Mutator.lines,
    Mutator.lines, Mutator.name, Mutator.cut, Mutator.nest, Mutator.grammar, Mutator.double,
)  # fmt: skip


# The loop -------------------------------------------------------------------------------------------------------------


class Fuzzer:
    """marks: of the package under test. target: what each text goes through."""

    def __init__(self, marks, target: Callable[[Text, bool], None]) -> None:
        self.marks, self.target = marks, target
        self.seen = bytearray()
        self.corpus: list[Text] = []
        self.findings: dict[str, tuple[Text, str]] = {}
        self.executions = 0

    def run(self, mutator: Mutator, seconds: float, texts: int | None = None) -> None:
        """Try all seeds, then mutants for so many seconds of the processor, or so many of them."""
        for text in seeds():
            self.offer(text, fix=True)
        end = time.process_time() + seconds
        tried = 0
        while tried < texts if texts is not None else time.process_time() < end:
            tried += 1
            self.offer(mutator.mutate(self.corpus), fix=self.executions % 4 == 0)

    def offer(self, text: Text, *, fix: bool) -> None:
        """Run a text, and keep it if it has reached what none before it has."""
        finding = self.attempt(text, fix)
        new = self._reached()
        if finding is not None:
            key, shown = finding
            if key not in self.findings:
                self.findings[key] = (self.shortest(text, key, fix), shown)
        elif new:
            self.corpus.append(text)
            if not fix:
                self.attempt(text, True)

    def attempt(self, text: Text, fix: bool) -> tuple[str, str] | None:
        """What went wrong: where, to tell findings apart, and the traceback."""
        self.executions += 1
        signal.alarm(SLOWEST)
        try:
            self.target(text, fix)
        except (Exception, Timeout) as fault:
            frames = traceback.extract_tb(fault.__traceback__)
            own = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if str(ROOT) in f.filename][-2:]
            return f"{type(fault).__name__} at {' > '.join(own)}", "".join(traceback.format_exception(fault)[-6:])
        finally:
            signal.alarm(0)
        return None

    def _reached(self) -> bool:
        hits, seen = self.marks.hits, self.seen
        seen.extend(bytes(len(hits) - len(seen)))
        new = int.from_bytes(hits, "little") & ~int.from_bytes(seen, "little")
        if new:
            for at, hit in enumerate(hits):
                seen[at] |= hit
        hits[:] = bytes(len(hits))
        return bool(new)

    def shortest(self, text: Text, key: str, fix: bool) -> Text:
        """A shorter text with the same finding: pieces are left out, ever smaller ones, as long as it stays."""
        end = time.monotonic() + 20
        size = max(len(text) // 2, 1)
        while size and time.monotonic() < end:
            at = 0
            while at < len(text) and time.monotonic() < end:
                shorter = text[:at] + text[at + size :]
                found = self.attempt(shorter, fix)
                if found is not None and found[0] == key:
                    text = shorter
                else:
                    at += size
            size //= 2
        return text

    def report(self, seconds: float) -> str:
        reached, total = sum(self.seen), len(self.seen)
        lines = [
            f"{self.executions} executions in {seconds:.0f} s ({self.executions / max(seconds, 1):.0f}/s), corpus of "
            f"{len(self.corpus)} texts, {reached} of {total} branches, {len(self.findings)} findings"
        ]
        for key, (text, shown) in self.findings.items():
            lines += ["", f"== {key}", repr(text), shown]
        return "\n".join(lines)


def _alarm(*_) -> None:
    raise Timeout(f"more than {SLOWEST} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--texts", type=int, help="so many mutants instead, however long they take")
    parser.add_argument("--seed", type=int, default=None, help="of the mutations; without it, another one each time")
    parser.add_argument("--out", type=Path, help="folder for the texts of findings")
    parser.add_argument("--unreached", action="store_true", help="list the branches that no text has reached")
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    arguments = parser.parse_args()
    if arguments.engine == "atheris":
        return _atheris(arguments.seconds)
    signal.signal(signal.SIGALRM, _alarm)
    begin = time.monotonic()
    marks = install(ROOT, "xtrain", ROOMS, OF_FILES)
    parts = {"part.xtrain": "param shared = 4\nbatch { micro = shared }\n", "cluster.xtrain": "launch { nodes = 1 }\n"}
    fuzzer = Fuzzer(marks, make_target(parts))
    dice = random.Random(arguments.seed)
    mutator = Mutator(dice)
    with tempfile.TemporaryDirectory() as folder:  # patterns of datasets are looked up in the working folder
        shutil.copytree(ROOT / "tests" / "dsl" / "gallery" / "models", Path(folder, "models"))
        os.chdir(folder)
        fuzzer.run(mutator, arguments.seconds, arguments.texts)
        os.chdir(ROOT)
    print(fuzzer.report(time.monotonic() - begin))
    if arguments.unreached:
        missed = [place for place, hit in zip(marks.places, fuzzer.seen, strict=True) if not hit]
        print("\n".join(f"{Path(file).relative_to(ROOT)}:{line}" for file, line in missed))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for number, (text, shown) in enumerate(fuzzer.findings.values()):
            (arguments.out / f"{number}.xtrain").write_text(text, encoding="utf-8", errors="replace")
            (arguments.out / f"{number}.txt").write_text(shown)
    return 1 if fuzzer.findings else 0


def _atheris(seconds: float) -> int:
    """libFuzzer's mutations instead of ours; it ends the process at the first finding."""
    import atheris

    with atheris.instrument_imports(include=[f"xtrain.{room}" for room in ROOMS]):
        target = make_target({"part.xtrain": "param shared = 4\n"})
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(seeds()):
            Path(folder, f"seed{number}").write_text(text, encoding="utf-8")
        words = Path(folder).with_suffix(".words")
        lines = ["".join(f"\\x{byte:02x}" for byte in word.encode()) for word in FRAGMENTS]
        words.write_text("\n".join(f'"{line}"' for line in lines))
        limits = [f"-max_total_time={seconds:.0f}", f"-dict={words}", f"-timeout={SLOWEST}", "-max_len=4096"]
        count = iter(range(10**12))
        atheris.Setup([sys.argv[0], folder, *limits],
                      lambda data: target(data.decode(errors="replace"), next(count) % 4 == 0))  # fmt: skip
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
