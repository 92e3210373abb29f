"""Pages of what is found in `alerts`, and in what is declared for them."""

from typing import Final

from .page import CodePage

PAGES: Final = (
    CodePage("X226", "an action with the wrong brackets", """
        `notify("…")` takes one string in parentheses: a shell command. The string may be composed of constants. Other
        actions take a name, or settings in braces, and no parentheses.
        """, 'on finish notify "./page-me.sh"', 'on finish notify("./page-me.sh")'),
    CodePage("X617", "an action other than notify on stalled", """
        Only `notify` can follow `on stalled`: every other action runs on all ranks together, and here some ranks do not
        respond. `fault_tolerance { stuck }` says when such a run is ended, and `restarts` how often it is then
        restarted.
        """, "on stalled checkpoint", 'on stalled notify("./page-me.sh")'),
    CodePage("W607", "an alert that is never raised", """
        After `fault_tolerance.stuck` without progress the run is ended, so the alert `stalled` must come earlier. By
        default it is raised after 60 s, or after half of `stuck` if that is shorter.
        """, "fault_tolerance { stuck = 5 min }\nalerts { stalled = 10 min }",
        "fault_tolerance { stuck = 20 min }\nalerts { stalled = 10 min }"),
)  # fmt: skip
