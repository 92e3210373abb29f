"""The files for editors that are made of the table of lexemes.

`python tests/support/grammars.py --write` renews them; a test holds them against the table.
"""

import json
import sys
from pathlib import Path

from xtrain.lsp.lexemes import textmate

ROOT = Path(__file__).parents[2]


def files() -> dict[Path, str]:
    """Path → what the file has to hold."""
    return {
        ROOT / "editors" / "vscode" / "syntaxes" / "xtrain.tmLanguage.json": json.dumps(textmate(), indent=2) + "\n",
    }


if __name__ == "__main__" and "--write" in sys.argv:
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
