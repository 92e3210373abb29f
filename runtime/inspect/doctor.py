"""Checks of a plan against this machine, or against all machines of the plan."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import evolve

from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.plan.data import TokenizerUnreadable
from xtrain.plan.hardware import BLOCK_MASKS, missing_for_server
from xtrain.plan.plan import Plan
from xtrain.plan.timeline import count_saves
from xtrain.plan.vocabulary import differing_token
from xtrain.planner.costs.run import disk_of
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.base.hosts import NodePlace, check_own_name
from xtrain.runtime.base.limits import faults_of_limits, need_of
from xtrain.runtime.base.packages import package_faults
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.prepared import source_of
from xtrain.runtime.feed.tokenizers import load_tokenizer
from xtrain.runtime.inspect.machine import (
    OLDEST_DRIVER,
    DiskFacts,
    MachineFacts,
    Unfit,
    look_at_disk,
    look_at_machine,
    version_numbers,
)
from xtrain.runtime.loop.preflight import Devices, check_devices, device_of, find_devices
from xtrain.runtime.observe.provenance import read_code
from xtrain.runtime.store.run_directory import locate
from xtrain.text.units import bytes_text, plural, rate_text, seconds_text

# Needed by NCCL between ranks of one machine: NVIDIA's troubleshooting page recommends `--shm-size=1g` for containers.
SHARED_MEMORY: Final = 1 << 30


def check_machine_facts(plan: Plan, machine: MachineFacts, disk: DiskFacts) -> list[Unfit]:
    """Return all findings, in the order in which a run would meet them."""
    findings, devices = [], None
    try:
        devices = find_devices(plan, plan.mesh.ranks_per_node)
    except EnvironmentFault as fault:
        findings.append(of_fault(fault))
    if plan.launch["device"] != "cpu":
        findings += of_driver(machine)
    if devices is not None:
        findings += of_devices(plan, devices)
        findings += of_limits(plan, machine, devices.kind)
        findings += of_memory(plan, machine, devices.kind)
        findings += of_shared_memory(plan, machine, devices.kind)
        findings += of_compiler(plan, machine, devices.kind)
    findings += of_clock(machine)
    findings += of_packages(plan)
    findings += of_data(plan)
    findings += of_folder(disk)
    if not (disk.fault or plan.serves):
        findings += of_room(plan, disk)
    findings += of_files(plan)
    return findings


def of_fault(fault: EnvironmentFault | DataError) -> Unfit:
    """Convert a fault that a run would end with. The last clause of its message says what to do."""
    text = " ".join(str(fault).split())
    what, _, do = text.rpartition("; ") if "; " in text else (text, "", "see `xtrain explain " + fault.code + "`")
    if isinstance(fault, DataError):
        lines = str(fault).split("\n")
        what, do = lines[0], " ".join(line.strip() for line in lines[1:]) or do
    return Unfit(code=fault.code, what=what, do=do)


def of_devices(plan: Plan, devices: Devices) -> Iterator[Unfit]:
    """Check the memory of devices, and that they are the plan's."""
    try:
        remarks = check_devices(plan, devices)
    except EnvironmentFault as fault:
        yield of_fault(fault)
        return
    for remark in remarks:
        yield Unfit(code="W707", what=remark, do="describe this machine in `cluster`, and plan again")


def of_driver(machine: MachineFacts) -> Iterator[Unfit]:
    """Check that NVIDIA's driver supports the CUDA release that torch was built for."""
    if machine.driver is None or machine.cuda is None:
        return
    oldest = OLDEST_DRIVER.get(version_numbers(machine.cuda)[0])
    if oldest is not None and version_numbers(machine.driver) < oldest:
        needed = ".".join(f"{number:02}" if at else str(number) for at, number in enumerate(oldest))
        yield Unfit(
            code="X733",
            what=f"the driver is {machine.driver}, and torch is built for CUDA {machine.cuda}, which needs {needed}",
            do=f"install driver {needed} or newer, or a torch that is built for an older CUDA",
        )


def of_memory(plan: Plan, machine: MachineFacts, kind: str) -> Iterator[Unfit]:
    """Check the memory of the machine: all of a rank on a CPU; on GPUs offloaded states, and copies for checkpoints."""
    if machine.memory is None:
        return
    ranks = plan.mesh.ranks_per_node
    if kind == "cpu":
        rank_bytes = max(rank.memory.total_bytes + rank.memory.host for rank in plan.estimates.classes)
    else:
        rank_bytes = max(rank.memory.host_bytes for rank in plan.estimates.classes)
        saving = plan.args("setup.checkpoint")
        rank_bytes += saving["copies"] * plan.estimates.copy_bytes if saving else 0
    if ranks * rank_bytes > machine.memory:
        yield Unfit(
            code="X737",
            what=f"{plural(ranks, 'rank')} take {bytes_text(ranks * rank_bytes)} of the machine's memory, but "
            f"{bytes_text(machine.memory)} are left",
            do="ask the scheduler for more memory, put fewer ranks on a machine (launch.ranks_per_node), or stop what "
            "else runs there",
        )


def of_limits(plan: Plan, machine: MachineFacts, kind: str) -> Iterator[Unfit]:
    """Check the limits on open files, processes and threads."""
    need = need_of(plan, kind, plan.mesh.ranks_per_node)
    for fault in faults_of_limits(need, machine.files, machine.tasks):
        yield of_fault(EnvironmentFault("X738", fault))


def of_clock(machine: MachineFacts) -> Iterator[Unfit]:
    """Check that the clock is not implausibly wrong."""
    if machine.clock:
        yield of_fault(EnvironmentFault("X739", machine.clock))


def of_shared_memory(plan: Plan, machine: MachineFacts, kind: str) -> Iterator[Unfit]:
    """Check /dev/shm, through which NCCL connects devices of one machine without a direct link."""
    if kind != "cuda" or plan.mesh.ranks_per_node < 2:
        return
    if (has := machine.shared_memory or 0) < SHARED_MEMORY:
        yield Unfit(
            code="X736",
            what=f"/dev/shm has {bytes_text(has)}, and NCCL needs {bytes_text(SHARED_MEMORY)} for the ranks of a "
            "machine",
            do="start the container with `--shm-size=1g` or more, or mount memory there",
        )


def of_compiler(plan: Plan, machine: MachineFacts, kind: str) -> Iterator[Unfit]:
    """Check the compiler that Triton needs on a GPU in the first step: for flex attention, and for compiled blocks."""
    if kind != "cuda" or not machine.lacks:
        return
    flex = plan.node("setup.build_model").args["attention"]["cuda"] in BLOCK_MASKS
    blocks = any(node.op == "setup.compile" for node in plan.nodes)
    what = [*(["attention flex"] if flex else []), *(["blocks of the model"] if blocks else [])]
    if what:
        yield Unfit(
            code="W710",
            what=f"{' and '.join(what)} must be compiled in the first step, but this machine has no {machine.lacks}",
            do="install gcc and the headers of Python, or set CC; otherwise use attention documents in `model`, and "
            "compile no blocks",
        )


def of_packages(plan: Plan) -> Iterator[Unfit]:
    """Check packages that only some specs need."""
    yield from map(of_fault, package_faults(plan))
    if plan.serves and (message := missing_for_server()) is not None:
        what, _, do = message.rpartition(": ")
        yield Unfit(code="X715", what=what, do=do)


def of_data(plan: Plan) -> Iterator[Unfit]:
    """Check tokenizer, templates and data files, without reading documents."""
    source = plan.node("setup.tokenizer").args["source"]
    try:
        tokenizer = load_tokenizer(source, Path.cwd())
    except DataError as error:
        yield of_fault(error)
        return
    if tokenizer.vocab_size > plan.architecture.vocab:
        yield Unfit(
            code="X734",
            what=f"the tokenizer {source} has {tokenizer.vocab_size:,} ids, but the plan's model has "
            f"{plan.architecture.vocab:,}",
            do="use the tokenizer that the spec was planned with, or plan again",
        )
    yield from _of_pretrained(plan, source)
    for node in plan.nodes:
        if node.op == "setup.data":
            try:
                source_of(plan, node, tokenizer).num_files  # noqa: B018  lists objects of stores
                DocumentEncoder(tokenizer, node.args["reads"])
            except DataError as error:
                yield of_fault(error)


def _of_pretrained(plan: Plan, source: str) -> Iterator[Unfit]:
    """Check that the initial model was trained with the same token ids, if its folder has a tokenizer."""
    for node in plan.nodes:
        folder = node.args.get("folder") if node.op == "setup.read_weights" else None
        if folder is None or not (Path(folder) / "tokenizer.json").is_file():
            continue
        with suppress(TokenizerUnreadable):  # the run's tokenizer has no token file
            if apart := differing_token(tokenizer_kind(source).location(source), folder):
                yield Unfit(
                    code="X734",
                    what=f"the weights in {folder} were trained with another tokenizer: {apart}",
                    do=f'write `tokenizer "{folder}"`',
                )


def of_folder(disk: DiskFacts) -> Iterator[Unfit]:
    """Check that files can be written and locked there."""
    where = disk.folder
    if disk.fault:
        yield Unfit(
            code="X706",
            what=f"{where} cannot be written: {disk.fault}",
            do="set workspace.root to a folder on a disk with room that this user may write to",
        )
        return
    if disk.locks:
        yield Unfit(
            code="X731",
            what=f"locks do not work in {where}: {disk.locks}",
            do="mount the file system with locks (NFS: `local_lock=none` and a lock service; Lustre: `-o flock`), or "
            "set workspace.root to another one",
        )


def of_room(plan: Plan, disk: DiskFacts) -> Iterator[Unfit]:
    """Check the room for checkpoints, and the time to write one."""
    where = disk.folder
    one, use = plan.estimates.checkpoint_bytes, disk_of(plan, count_saves(plan))
    need = max(0, (use.most if use else one) - _taken(plan))
    if need > disk.free:
        yield Unfit(
            code="X730",
            what=f"checkpoints take {bytes_text(need)}, and {bytes_text(disk.free)} are free in {where}",
            do="free disk space (`xtrain checkpoint prune RUN --keep 1 --yes`), lower checkpoint.keep, or set "
            "workspace.root to another disk",
        )
    deadline = plan.launch["stop_deadline_seconds"]
    if disk.speed is not None and one > disk.speed * deadline:
        yield Unfit(
            code="W709",
            what=f"a checkpoint of {bytes_text(one)} takes {seconds_text(one / disk.speed)} at the "
            f"{rate_text(disk.speed, 'B/s')} that {where} takes from one process, and a run that is stopped has "
            f"{seconds_text(deadline)} (launch.stop_deadline)",
            do="set launch.stop_deadline higher, or workspace.root to a faster disk",
        )


def of_files(plan: Plan) -> Iterator[Unfit]:
    """Check the disk space for states that ranks of this machine keep in files."""
    for files in (node.args["files"] for node in plan.nodes if "files" in node.args):
        disk, need = look_at_disk(Path(files["folder"])), plan.mesh.ranks_per_node * files["bytes"]
        do = f"set {files['setting']} to a folder on a disk with room that this user may write to"
        if disk.fault:
            yield Unfit(code="X706", what=f"{disk.folder} cannot be written: {disk.fault}", do=do)
        elif need > disk.free:
            what = f"{plural(plan.mesh.ranks_per_node, 'rank')} keep {bytes_text(need)} in files, and "
            yield Unfit(code="X730", what=f"{what}{bytes_text(disk.free)} are free in {disk.folder}", do=do)


def _taken(plan: Plan) -> int:
    """Return the bytes of the run's existing checkpoints."""
    checkpoints = locate(plan, read_code(Path(plan.spec).resolve().parent)) / "checkpoints"
    return sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())


def examine(plan: Plan, place: NodePlace | None, seconds: float) -> list[Unfit]:
    """Check this machine and, with `place`, its connections to the others. The first machine then returns the findings
    of all machines, the others only errors. seconds: to wait for the others."""
    machine, root = look_at_machine(), Path(plan.workspace["root"])
    findings = check_machine_facts(plan, machine, look_at_disk(root))
    if place is None:
        return [evolve(finding, host=machine.host) for finding in findings]
    from xtrain.runtime.inspect.hosts import HostMeeting, HostsApart, find_between_hosts

    try:
        check_own_name(place.host)
    except EnvironmentFault as fault:
        findings.append(of_fault(fault))
    try:
        meeting = HostMeeting.join(place, plan.launch["nodes"], seconds)
        findings += find_between_hosts(meeting, machine, root, device_of(plan))
        of_all = meeting.exchange("found", [evolve(finding, host=machine.host).to_json() for finding in findings])
    except HostsApart as apart:
        findings.append(Unfit(code="X716", what=str(apart), do=apart.do))
        return [evolve(finding, host=machine.host) for finding in findings]
    meeting.leave()
    every = [Unfit(**finding) for host in of_all for finding in host]
    return every if place.index == 0 else [finding for finding in every if finding.stops]


def examine_without_plan() -> list[Unfit]:
    """Check this machine alone for faults that affect every run."""
    machine = look_at_machine()
    findings = (*of_driver(machine), *of_clock(machine), *of_folder(look_at_disk(Path.cwd())))
    return [evolve(finding, host=machine.host) for finding in findings]
