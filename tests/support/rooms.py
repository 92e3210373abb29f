"""The rooms of the package: every folder at the top that is imported."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = tuple(sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
