"""All that does not fit a plan: of this machine alone, or of all machines of the plan, where each runs this."""

from pathlib import Path

from attrs import evolve

from xtrain.planner.plan import Plan
from xtrain.runtime.doctor.checks import check_machine_facts, of_clock, of_driver, of_fault, of_folder
from xtrain.runtime.doctor.disk import look_at_disk
from xtrain.runtime.doctor.machine import look_at_machine
from xtrain.runtime.doctor.unfit import Unfit
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.launch.node_place import NodePlace
from xtrain.runtime.launch.preflight import device_of
from xtrain.runtime.launch.reaching import check_own_name


def examine(plan: Plan, place: NodePlace | None, seconds: float) -> list[Unfit]:
    """place: of this machine among several; the first of them then has what all have found, and the others nothing but
    the errors that they end with. seconds: to wait for the others."""
    machine, root = look_at_machine(), Path(plan.workspace["root"])
    found = check_machine_facts(plan, machine, look_at_disk(root))
    if place is None:
        return [evolve(each, host=machine.host) for each in found]
    from xtrain.runtime.doctor.hosts import HostMeeting, HostsApart, find_between_hosts

    try:
        check_own_name(place.host)
    except EnvironmentFault as fault:
        found.append(of_fault(fault))
    try:
        meeting = HostMeeting.join(place, plan.launch["nodes"], seconds)
        found += find_between_hosts(meeting, machine, root, device_of(plan))
        of_all = meeting.exchange("found", [evolve(each, host=machine.host).to_json() for each in found])
    except HostsApart as apart:
        found.append(Unfit(code="X716", what=str(apart), do=apart.do))
        return [evolve(each, host=machine.host) for each in found]
    meeting.leave()
    every = [Unfit(**each) for host in of_all for each in host]
    return every if place.index == 0 else [each for each in every if each.stops]


def examine_without_plan() -> list[Unfit]:
    """Of this machine alone: what keeps any run from working here."""
    machine = look_at_machine()
    found = (*of_driver(machine), *of_clock(machine), *of_folder(look_at_disk(Path.cwd())))
    return [evolve(each, host=machine.host) for each in found]
