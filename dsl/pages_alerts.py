"""Pages of what is found in `alerts`, and in what is declared for them."""

from typing import Final

from .page import Code

PAGES: Final = (
    Code("X226", "an action with the wrong brackets", """
        `notify("…")` takes one text in round brackets: a command, as one would type it into a shell. It may be put
        together of constants. Other actions take a name, or settings in braces, and no round brackets.
        """, 'on finish notify "./page-me.sh"', 'on finish notify("./page-me.sh")'),
    Code("X617", "more than a command for ranks that are stalled", """
        `on stalled` tells somebody that nothing gets on, and that is all: what ranks do, they do together, and some of
        them do not come. `fault_tolerance { stuck }` says when such a run is ended, and `restarts` how often it is then
        started again.
        """, "on stalled checkpoint", 'on stalled notify("./page-me.sh")'),
    Code("W607", "an alert that the end of the run comes before", """
        After `fault_tolerance.stuck` without progress a run is ended. An alert about ranks that make none is only of
        use before; left to itself it comes after 60 s, or after half of `stuck` if that is shorter.
        """, "fault_tolerance { stuck = 5 min }\nalerts { stalled = 10 min }",
        "fault_tolerance { stuck = 20 min }\nalerts { stalled = 10 min }"),
)  # fmt: skip
