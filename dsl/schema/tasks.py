"""`task NAME { … }`: one of several adapters that are trained at once on one model, each on rows of its own."""

import re
from typing import Final

from attrs import frozen

from xtrain.dsl.schema.adapters import Adapter
from xtrain.dsl.schema.names import TextCheck
from xtrain.dsl.schema.optimizers import OF_STEP, Optimizer
from xtrain.dsl.schema.setting import label, setting

# What is done with all gradients alike, and not for each task.
_SHARED: Final = tuple(name for name in OF_STEP if name != "clip")


def _problem(text: str) -> str | None:
    """The name is a part of the names of parameters, which are separated by dots."""
    return None if re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII) else "must be letters, digits and `_`"


part_of_names: Final = TextCheck(
    "letters, digits and `_`", "write one word, such as `sql`", r"^[A-Za-z_][A-Za-z0-9_]*$", _problem
)


@frozen
class AdapterTask:
    """`task NAME { … }`: an adapter that is trained on the rows of some datasets alone, beside those of other tasks and
    over the same model; each trains as it would in a run of its own."""

    name: str = label(check=part_of_names)
    datasets: tuple[str, ...] = setting(
        "datasets whose rows go through its adapter; none are named: the one of its own name",
        default=(),
        example='["sql", "schemas"]',
    )
    adapter: Adapter = setting("its adapter", default=None, added=True, example="adapter lora { rank = 16 }")
    optimizer: Optimizer = setting(
        "an optimizer of its own, with its own `clip`; without it one as that of the spec",
        default=None,
        added=True,
        without=_SHARED,
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """The datasets whose rows train it."""
        return self.datasets or (self.name,)
