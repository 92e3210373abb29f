"""Every code a diagnostic can carry, with the page that `xtrain explain CODE` prints."""

from typing import Final

from .page import CodePage
from .pages_data import PAGES as DATA
from .pages_parts import PAGES as PARTS
from .pages_plan import PAGES as PLAN
from .pages_text import PAGES as TEXT
from .pages_values import PAGES as VALUES
from .suggest import closest

CODES: Final[dict[str, CodePage]] = {page.code: page for page in (*TEXT, *VALUES, *PLAN, *DATA, *PARTS)}


def near(code: str) -> str | None:
    """The existing code that a wrong one was probably meant to be."""
    upper = code.strip().upper()
    return upper if upper in CODES else closest(upper, CODES)
