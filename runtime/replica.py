"""Replica groups: ranks with a process group of their own, which may end and be started again while others train.

To what a rank does with the ranks of its group, the group is the whole run: it has a mesh, rank numbers from 0, shards
and checkpoints of its own. Beyond it there are the rows of a step, which are dealt to the ranks of all groups; what is
added up over those groups that take part; and the records of the run, which one of them writes.
"""

import os
from typing import Final

from attrs import define, evolve

from xtrain.planner.graph.replica_groups import groups_node
from xtrain.planner.mesh.mesh import mesh_of_group
from xtrain.planner.plan import Plan

# Tell a rank which group it is of, and how often that one was started before.
GROUP: Final = "XTRAIN_GROUP"
START: Final = "XTRAIN_GROUP_START"
# And where the ranks of the groups ask who takes part in a step.
LIGHTHOUSE: Final = "XTRAIN_LIGHTHOUSE"
# What a group and the launcher tell each other, in the store of the group: it is set up; steps may begin, the first of
# them with all groups; one of these has ended since; it has the state of the run; another has come to the end of it.
READY, OPEN, FEWER, JOINED, OVER = "ready", "open", "fewer", "joined", "over"


def gone(group: int) -> str:
    """What the launcher tells all groups, in their stores: this one has ended, and is not started again yet."""
    return f"gone/{group}"


@define(kw_only=True, eq=False)
class ReplicaGroup:
    """The group of this rank. count: of all groups. size: its ranks. comes_back: it was started again while others
    train, and has nothing to go on from but what one of these gives it.

    leads: it speaks for the run: its first rank writes the records, answers commands and looks at clocks, and its ranks
    save. taking_part: the groups of the step under way.
    """

    index: int
    count: int
    size: int
    comes_back: bool
    leads: bool
    taking_part: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of its first rank among those of all groups."""
        return self.index * self.size


def group_of_rank(plan: Plan) -> ReplicaGroup | None:
    """The group that the environment names; None where the plan has none, or no launcher has started any."""
    node = groups_node(plan)
    if node is None or GROUP not in os.environ:
        return None
    index, count = int(os.environ[GROUP]), int(node.args["replicas"])
    comes_back = int(os.environ.get(START, "0")) > 0
    return ReplicaGroup(
        index=index,
        count=count,
        size=plan.mesh.world_size // count,
        comes_back=comes_back,
        leads=index == 0 and not comes_back,
        taking_part=tuple(range(count)),
    )


def plan_of_group(plan: Plan) -> Plan:
    """The plan as the ranks of one group execute it: with their mesh for that of all."""
    return evolve(plan, mesh=mesh_of_group(plan.mesh))
