"""Examples and small cases that one test walks through."""

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import settings

# Many small cases in one test -----------------------------------------------------------------------------------------


def each(cases: Iterable[tuple[str, tuple[Any, ...]]], check: Callable[..., None]) -> None:
    """Call `check` with the arguments of every case, by its name. Raises AssertionError with every case that fails."""
    failed, count = [], 0
    for name, arguments in cases:
        count += 1
        try:
            check(*arguments)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {count} cases fail\n\n" + "\n\n".join(failed)
    assert count, "there is no case"


# How many random examples a test draws --------------------------------------------------------------------------------


# Whether this session runs the long suite; set before any test is loaded.
is_long = False


def drawn(few: int, many: int, **others: Any) -> settings:
    """The settings of a test that draws its cases: `many` of them in the long suite, to which it then belongs too."""
    return settings(max_examples=many if is_long else few, deadline=None, **others)
