"""Every code a diagnostic can carry, with the page that `xtrain explain CODE` prints."""

from typing import Final

from xtrain.dsl.diagnostics.pages_language import DATA_PAGES as DATA
from xtrain.dsl.diagnostics.pages_language import PART_PAGES as PARTS
from xtrain.dsl.diagnostics.pages_language import SYNTAX_PAGES as TEXT
from xtrain.dsl.diagnostics.pages_language import VALUE_PAGES as VALUES
from xtrain.dsl.diagnostics.pages_language import CodePage
from xtrain.dsl.diagnostics.pages_plan import PAGES as PLAN
from xtrain.dsl.diagnostics.suggest import closest

CODES: Final[dict[str, CodePage]] = {page.code: page for page in (*TEXT, *VALUES, *PLAN, *DATA, *PARTS)}


def near(code: str) -> str | None:
    """The existing code that a wrong one was probably meant to be."""
    upper = code.strip().upper()
    return upper if upper in CODES else closest(upper, CODES)
