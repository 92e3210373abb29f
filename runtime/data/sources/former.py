"""The order in which earlier versions took the options of a source into its fingerprint: that of a plan in memory.

They had another fingerprint where a plan was read back from a run directory, which has its keys sorted. That one is
today's.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, permutations, product
from typing import Any, Final

MOST: Final = 720  # orders that are tried of the arguments of a user's function: all there are of six


def options_before(order: Sequence[str], options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`options` in each order that they may have had. order: that of their names; none if they never had another.

    The arguments of a user's function had that of its parameters, and maps among them that of the spec, which a plan
    that was read back has lost.
    """
    if not order:
        return
    ordered = {name: options[name] for name in order if name in options}
    for arguments in _orders(ordered.get("arguments", {})):
        yield {**ordered, **({"arguments": arguments} if arguments else {})}


def _orders(value: Any) -> Iterator[Any]:
    """A JSON value with the keys of its mappings in every order, as it stands first; MOST at most."""
    if isinstance(value, Mapping):
        found = (
            dict(zip(names, items, strict=True))
            for names in permutations(value)
            for items in product(*(_orders(value[name]) for name in names))
        )
        yield from islice(found, MOST)
    elif isinstance(value, list | tuple):
        yield from islice((list(items) for items in product(*map(_orders, value))), MOST)
    else:
        yield value
