"""Pages of `fault_tolerance.elastic`: the numbers of ranks a run may go on with."""

from typing import Final

from .page import Code

PAGES: Final = (
    Code("X428", "no axis can give way to fewer ranks", """
        With `elastic` a run goes on with fewer ranks, and the axis that is `auto`, fsdp, takes what they leave it.
        Where every axis has a number, their product is the only number of ranks there is.
        """, "parallel { fsdp 4 }\nfault_tolerance { restarts = 3, elastic = 2..4 }",
        "parallel { fsdp auto }\nfault_tolerance { restarts = 3, elastic = 2..4 }"),
    Code("X429", "the declared number of ranks is not among the elastic ones", """
        `elastic` names all numbers of ranks that a run may have, the first one as well. `--world`, or what `launch`
        says, must be one of them.
        """, "launch { nodes = 1, ranks_per_node = 8 }\nfault_tolerance { restarts = 3, elastic = 2..4 }",
        "launch { nodes = 1, ranks_per_node = 8 }\nfault_tolerance { restarts = 3, elastic = 2..8 }"),
    Code("X430", "fewer than two numbers of ranks of the range work", """
        Each number of ranks in the range must have a plan with the same rows in a step: a multiple of the axes that
        stay, rows that come out even in microbatches on its data ranks, and everything else that a plan needs. Numbers
        that have none are left out, `xtrain plan` says why, and at least two must remain. A range of more than 65,536
        numbers is not gone through.
        """, "batch { sequence = 512, rows = 8 }\nfault_tolerance { restarts = 3, elastic = 5..7 }",
        "batch { sequence = 512, rows = 8 }\nfault_tolerance { restarts = 3, elastic = 4..8 }"),
    Code("W431", "elastic, and nothing is started again", """
        Fewer ranks are taken when a run is started again, and `restarts` is 0. Only torchrun or Slurm, which start the
        same command with another number of ranks, would make use of `elastic`, and a machine with fewer devices.
        """, "fault_tolerance { elastic = 2..4 }", "fault_tolerance { restarts = 3, elastic = 2..4 }"),
)  # fmt: skip
