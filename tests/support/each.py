"""Many small cases in one test: all that do not hold are told, not the first of them."""

from collections.abc import Callable, Iterable
from typing import Any


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
