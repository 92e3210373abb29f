"""How many random examples a test draws: few by default, many in the long suite, `pytest -m "slow or matrix"`."""

from typing import Any

from hypothesis import settings

# Whether this session runs the long suite; set before any test is loaded.
is_long = False


def drawn(few: int, many: int, **others: Any) -> settings:
    """The settings of a test that draws its cases: `many` of them in the long suite, to which it then belongs too."""
    return settings(max_examples=many if is_long else few, deadline=None, **others)
