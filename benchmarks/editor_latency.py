"""How long diagnostics take from a keystroke, as an editor sees them: through a real client of `xtrain lsp`.

    OMP_NUM_THREADS=1 python benchmarks/editor_latency.py [--strokes 200] [--lines 200] [--mistakes]

The spec has one setting a line, as `xtrain fmt` leaves it. Each keystroke is sent when the one before has been
answered. With --mistakes the line that is typed is never finished, so that every text is broken. Prints milliseconds
from sending a keystroke to the arrival of its diagnostics: median, 90 %, 99 % and the longest; the same of completion;
and milliseconds of the server's processor time a keystroke, which another load on the machine leaves as they are.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from editor import Editor
from lsprotocol import types as t

from xtrain.dsl.load import load_spec

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "specs" / "curriculum.xtrain"


def spec_of(lines: int) -> str:
    """The curriculum with every setting written out, and as many datasets as it takes."""
    text = load_spec(SPEC).resolved_text().replace('"specs/sums.py"', '"sums.py"')
    number = 0
    while text.count("\n") < lines:
        text += f"\ndataset more_{number} {{\n  source = synthetic(documents = {number + 2}k)\n  holdout = 100%\n}}\n"
        number += 1
    return "\n".join(text.split("\n")[:lines]) if text.count("\n") == lines else text


def processor(stat: Path) -> float:
    """Seconds of processor time that a process has used."""
    fields = stat.read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strokes", type=int, default=200)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--mistakes", action="store_true")
    arguments = parser.parse_args()
    text = spec_of(arguments.lines)
    editor = Editor(ROOT)
    uri = editor.open(SPEC.with_name("measured.xtrain"), text)
    found = editor.diagnostics(uri)
    last = text.count("\n")
    print(f"{last} lines, {len(text):,} characters, {len(found)} diagnostics")
    editor.ask("completion", uri, (3, 2))  # the first one reads the reference
    server = Path(f"/proc/{editor.client._server.pid}/stat")
    used = processor(server)
    line = "batch { rows = 1 + " if arguments.mistakes else "# what is typed here"
    typed, checked, completed = "", [], []
    for _ in range(arguments.strokes):
        letter = line[len(typed)] if len(typed) < len(line) else "1"
        at = t.Position(last, len(text.split("\n")[-1]) + len(typed))
        begun = time.perf_counter()
        editor.change(uri, letter, t.Range(at, at))
        editor.diagnostics(uri)
        checked.append(1e3 * (editor.arrived[uri][2] - begun))
        typed += letter
    used = processor(server) - used
    for _ in range(20):
        begun = time.perf_counter()
        editor.ask("completion", uri, (3, 2))
        completed.append(1e3 * (time.perf_counter() - begun))
    editor.stop()
    for name, times in (("diagnostics", checked), ("completion", completed)):
        parts = statistics.quantiles(times, n=100)
        print(f"{name}: {parts[49]:.1f} ms, 90 % {parts[89]:.1f}, 99 % {parts[98]:.1f}, longest {max(times):.1f}")
    print(f"processor: {1e3 * used / arguments.strokes:.1f} ms a keystroke")
    return 0


if __name__ == "__main__":
    sys.exit(main())
