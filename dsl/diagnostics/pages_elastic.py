"""Pages of `fault_tolerance.elastic`: the numbers of ranks a run may go on with."""

from typing import Final

from .page import CodePage

PAGES: Final = (
    CodePage("X428", "elastic without an axis that is auto", """
        With `elastic` a run can continue on fewer ranks; the size of fsdp, if it is `auto`, then follows from the
        number of ranks. If every axis has a fixed size, their product is the only possible number of ranks.
        """, "parallel { fsdp 4 }\nfault_tolerance { restarts = 3, elastic = 2..4 }",
        "parallel { fsdp auto }\nfault_tolerance { restarts = 3, elastic = 2..4 }"),
    CodePage("X429", "the declared number of ranks is outside the elastic range", """
        `elastic` gives all numbers of ranks that a run may have, including the one it starts with. The number that
        `--world` or `launch` gives must be one of them.
        """, "launch { nodes = 1, ranks_per_node = 8 }\nfault_tolerance { restarts = 3, elastic = 2..4 }",
        "launch { nodes = 1, ranks_per_node = 8 }\nfault_tolerance { restarts = 3, elastic = 2..8 }"),
    CodePage("X430", "fewer than two numbers of ranks of the range work", """
        For each number of ranks in the range a plan with the same rows in a step is needed: the number must be a
        multiple of the axes with a fixed size, the rows must divide evenly into microbatches on its data ranks, and
        everything else that a plan needs must hold. Numbers without a plan are left out, `xtrain plan` says why, and at
        least two must remain. A range may have at most 65,536 numbers.
        """, "batch { sequence = 512, rows = 8 }\nfault_tolerance { restarts = 3, elastic = 5..7 }",
        "batch { sequence = 512, rows = 8 }\nfault_tolerance { restarts = 3, elastic = 4..8 }"),
    CodePage("W431", "elastic without restarts", """
        A run continues on fewer ranks when it is restarted, and `restarts` is 0. `elastic` then has an effect only if
        torchrun or Slurm start the same command with another number of ranks, or if there are fewer devices than ranks
        when the command starts.
        """, "fault_tolerance { elastic = 2..4 }", "fault_tolerance { restarts = 3, elastic = 2..4 }"),
)  # fmt: skip
