"""How a rank gets on, as its thread beside training sees it once a second."""

from attrs import frozen


@frozen
class Pace:
    """now: seconds of a clock that stands still while the machine does. idle: seconds without a mark. lasting: the rank
    is in a node that may take any time."""

    now: float
    idle: float
    lasting: bool
