"""`llms.txt`: the index of the documentation for language models (llmstxt.org), made from docs/index.md.

`python tests/support/llms.py --write` writes it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "llms.txt"


def text() -> str:
    """Return the index with links from the root, its first paragraph as the summary."""
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    title, _, rest = index.partition("\n\n")
    summary, _, rest = rest.partition("\n\n")
    linked = re.sub(r"\]\((?!\w+:)([^)#]+)", r"](docs/\1", rest)
    return f"{title}\n\n> {' '.join(summary.split())}\n\n{linked}"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    FILE.write_text(text(), encoding="utf-8")
