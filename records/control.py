"""The files of `control/`, by which another process asks a live run to do something; its answers are events."""

from typing import Annotated, Any

from msgspec import Struct

from xtrain.records.control_words import ControlWord
from xtrain.records.record import doc, one_of


class ControlRequest(Struct, frozen=True, omit_defaults=True):
    """A file of `control/`, named by the request's id."""

    command: Annotated[str, doc(one_of(ControlWord))]
    time: Annotated[float | None, doc("when it was asked for, since 1970 (UTC)", "s")] = None
    arg: Annotated[Any, doc("dataset of `eval`, number of steps of `profile`")] = None
