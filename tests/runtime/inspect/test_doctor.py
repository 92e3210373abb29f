"""`xtrain doctor`: faults that are planted one by one are found, each with its code and with what to do."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from torch.distributed import HashStore

from xtrain.cli.main import main
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps
from xtrain.planner.load import plan_from_path
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.base.hosts import NodePlace, own_address
from xtrain.runtime.inspect import doctor as checks
from xtrain.runtime.inspect import hosts
from xtrain.runtime.inspect import machine as disk
from xtrain.runtime.inspect.doctor import examine
from xtrain.runtime.inspect.hosts import HostFacts, HostMeeting
from xtrain.runtime.inspect.machine import MachineFacts, Unfit, look_at_machine
from xtrain.runtime.loop.preflight import Devices, check_machine
from xtrain.runtime.store.run_directory import open_workspace

SPEC = """experiment small {{ seed = 1, budget = 40 steps }}
model llama {{ dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
tokenizer {tokenizer}
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64, micro = 1 }}
optimizer adamw {{ lr = 1e-3 }}
every 20 steps checkpoint
{more}
"""
GIB = 1 << 30
HERE = MachineFacts(
    host="a", memory=64 * GIB, shared_memory=GIB, driver="580.65.06", cuda="13.0", versions={"torch": "2.13.0"}
)
ROOM = disk.DiskFacts(folder=Path("/runs"), free=GIB, speed=1e9)
GPUS = Devices(kind="cuda", name="NVIDIA H100 80GB HBM3", memory=80 * GIB)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_STEP_ID", "SLURM_NODEID", "SLURM_PTY_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def made(more: str = "launch { device = cpu, ranks_per_node = 2 }", tokenizer: str = "bytes") -> Plan:
    Path("spec.xtrain").write_text(SPEC.format(more=more, tokenizer=tokenizer))
    compiled = plan_from_path("spec.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def codes(found: "list[Unfit] | Iterator[Unfit]") -> list[str]:
    found = list(found)
    assert all(each.what and each.do for each in found)
    return [each.code for each in found]


def doctor(*arguments: str, capsys: pytest.CaptureFixture) -> tuple[int, list[dict]]:
    code = main(["doctor", *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == code
    return code, answer["findings"]


def test_nothing_is_found_where_nothing_is_wrong(folder, capsys):
    made()
    assert doctor("spec.xtrain", capsys=capsys) == (0, [])
    assert doctor(capsys=capsys) == (0, [])
    assert os.listdir(folder) == ["spec.xtrain"], "the doctor leaves nothing"  # noqa: PTH208 - names alone
    assert checks.check_machine_facts(made(), HERE, ROOM) == []


def test_a_spec_with_mistakes_is_told_so(folder, capsys):
    Path("spec.xtrain").write_text(SPEC.format(more="launch { devices = 3 }", tokenizer="bytes"))
    assert main(["doctor", "spec.xtrain"]) == 2
    assert "X203" in capsys.readouterr().err


def test_each_of_its_findings_is_planted_here():
    """21 codes of docs/doctor.md, of which some are of several faults."""
    page = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
    rows = re.findall(r"^\| ([XW0-9, ]+) \|", page, re.MULTILINE)
    said = {code for row in rows for code in row.split(", ")}
    planted = set(re.findall(r'"([XW]\d{3})"', Path(__file__).read_text())) - {"X999", "X203"}
    assert said == planted and len(said) == 21


# one machine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "nodes", "says"),
    [("4", "2", "4 tasks on 2 nodes"), ("1", "1", "2 nodes, but this Slurm step has 1")],
)
def test_a_wrong_number_of_ranks(folder, capsys, monkeypatch, tasks, nodes, says):
    made("launch { device = cpu, nodes = 2, ranks_per_node = 2 }")
    for name, value in {"STEP_ID": "0", "NTASKS": tasks, "NNODES": nodes, "NODEID": "0", "NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    code, found = doctor("spec.xtrain", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X703"])
    assert says in found[0]["what"] and "srun" in found[0]["do"]
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert main(["doctor", "spec.xtrain"]) == 3 and capsys.readouterr().out == "", "one task says it"


def test_devices_that_are_missing(folder, capsys):
    made("launch { device = cuda, ranks_per_node = 8 }")
    code, found = doctor("spec.xtrain", capsys=capsys)
    assert code == 3 and found[0]["code"] == "X702" and found[0]["do"] == "use launch.device = cpu"


def test_devices_that_are_smaller_or_others(folder):
    plan = made("cluster h100 {}\nlaunch { device = cuda, ranks_per_node = 2 }")
    assert codes(checks.of_devices(plan, GPUS)) == []
    (found,) = checks.of_devices(plan, evolve(GPUS, memory=40 * GIB))
    assert found.code == "X712" and "the plan assumes 80.0 GiB" in found.what and found.stops
    (found,) = checks.of_devices(plan, evolve(GPUS, name="NVIDIA A100-SXM4-80GB"))
    assert found.code == "W707" and "the plan is for h100" in found.what and not found.stops


def test_a_full_disk(folder, capsys, monkeypatch):
    plan = made()
    usage = SimpleNamespace(free=plan.estimates.checkpoint_bytes)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    code, found = doctor("spec.xtrain", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X730"])
    # A run that is gone on with has some of its checkpoints already.
    monkeypatch.setattr(checks, "_taken", lambda plan: 10 * plan.estimates.checkpoint_bytes)
    assert doctor("spec.xtrain", capsys=capsys) == (0, [])


def test_a_slow_disk(folder):
    plan = made()
    slow = evolve(ROOM, speed=plan.estimates.checkpoint_bytes / plan.launch["stop_deadline_seconds"])
    assert codes(checks.of_room(plan, slow)) == []
    (found,) = checks.of_room(plan, evolve(slow, speed=0.5 * slow.speed))
    assert found.code == "W709" and "takes 10.0 min" in found.what and not found.stops


def test_a_folder_that_cannot_be_written(folder, capsys):
    made()
    Path("runs").write_text("a file in its place")
    code, found = doctor("spec.xtrain", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X706"])
    assert "runs cannot be written: it is not a folder" in found[0]["what"]


def test_a_folder_behind_a_link_to_nothing(folder, capsys):
    """The doctor and a run say the same of it, also of a folder below."""
    plan = made('launch { device = cpu, ranks_per_node = 2 }\nworkspace { root = "runs/below" }')
    Path("runs").symlink_to("/nowhere/else")
    code, found = doctor("spec.xtrain", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X706"])
    says = "a symbolic link to /nowhere/else, which does not exist"
    assert says in found[0]["what"]
    with pytest.raises(EnvironmentFault, match=f"cannot be written: runs is {says}"):
        open_workspace(plan, "")


@pytest.mark.parametrize("fault", ["refused", "given twice"])
def test_locks_that_do_not_work(folder, capsys, monkeypatch, fault):
    def flock(file, how):
        if fault == "refused":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    made()
    monkeypatch.setattr(disk.fcntl, "flock", flock)
    code, found = doctor("spec.xtrain", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X731"])
    assert ("No locks available" if fault == "refused" else "two processes get the same one") in found[0]["what"]


def test_locks_that_work_are_seen_to():
    assert disk.fcntl is fcntl and disk.lock_fault(Path("/tmp")) == ""


@pytest.mark.parametrize(("limits", "says"), [
    ({"files": 50}, "may open 50 files"),
    ({"tasks": 20}, "may start 20 more processes and threads"),
    ({"files": 1024, "tasks": 4096}, None),
    ({}, None),
])  # fmt: skip
def test_limits_on_files_and_processes(folder, limits, says):
    found = list(checks.of_limits(made(), evolve(HERE, **limits), "cpu"))
    assert codes(found) == (["X738"] if says else [])
    assert says is None or (says in found[0].what and "raise the limit" in found[0].do)


@pytest.mark.parametrize(("year", "found"), [(2026, []), (2340, ["X739"]), (1970, ["X739"])])
def test_a_clock_that_is_wrong(monkeypatch, year, found):
    monkeypatch.setattr("time.gmtime", lambda: time.struct_time((year, 1, 1, 0, 0, 0, 0, 1, 0)))
    machine = look_at_machine()
    assert codes(checks.of_clock(machine)) == found and (not found or f"the year {year}" in machine.clock)


def test_small_shared_memory(folder, monkeypatch):
    plan = made("launch { device = cuda, ranks_per_node = 2 }")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=(64 << 20) // 4096))
    machine = look_at_machine()
    (found,) = checks.of_shared_memory(plan, machine, "cuda")
    assert found.code == "X736" and "/dev/shm has 64.0 MiB" in found.what and "--shm-size" in found.do
    assert codes(checks.of_shared_memory(plan, machine, "cpu")) == [], "gloo has no use for it"
    assert codes(checks.of_shared_memory(plan, evolve(machine, shared_memory=GIB), "cuda")) == []


def test_a_machine_on_which_nothing_compiles(folder, monkeypatch):
    plan = made("launch { device = cuda }")
    assert codes(checks.of_compiler(plan, evolve(HERE, lacks=""), "cuda")) == []
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(folder)})
    machine = look_at_machine()
    assert machine.lacks == "C compiler and no Python.h"
    assert codes(checks.of_compiler(plan, machine, "cpu")) == []
    uses = {"": "attention flex must", "compile {}": "attention flex and blocks of the model must"}
    uses["model { attention = documents }"] = ""
    for text, what in uses.items():
        wide = f"launch {{ device = cuda }}\nmodel {{ heads = 2 }}\n{text}"  # flex has no kernel for narrow heads
        found = list(checks.of_compiler(made(wide), machine, "cuda"))
        assert [each.code for each in found] == (["W710"] if what else []), text
        assert not found or (what in found[0].what and not found[0].stops)
    monkeypatch.setenv("CC", "/opt/cc")
    assert look_at_machine().lacks == "Python.h"


def test_an_old_driver(folder, monkeypatch):
    driver = folder / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.60.11  Wed Nov 23 23:04:03 UTC 2022\n"
        "GCC version:  gcc version 11.3.0\n"
    )
    monkeypatch.setattr("torch.version.cuda", "12.8")
    machine = look_at_machine(folder)
    assert machine.driver == "525.60.11"
    (found,) = checks.of_driver(machine)
    assert found.code == "X733" and "525.60.11" in found.what and "needs 525.60.13" in found.what
    assert codes(checks.of_driver(evolve(machine, driver="525.60.13"))) == []
    assert codes(checks.of_driver(evolve(machine, driver="570.86", cuda="13.0"))) == ["X733"]
    monkeypatch.setattr(checks, "find_devices", lambda plan, ranks: GPUS)
    plan = made("launch { device = cuda, ranks_per_node = 2 }")
    assert codes(checks.check_machine_facts(plan, evolve(machine, shared_memory=GIB), ROOM)) == ["X733"]


def test_extras_that_are_missing(folder, capsys, monkeypatch):
    """All of them are named."""
    made('log { tensorboard = true, wandb { project = "x" } }\nlaunch { device = cpu }')
    monkeypatch.setattr("xtrain.plan.hardware.find_spec", lambda name: None)
    code, found = doctor("spec.xtrain", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X715", "X715"])
    for each, package in zip(found, ("tensorboard", "wandb"), strict=True):
        assert package in each["what"] and "pip install" in each["do"]


def builder_of_files(links: bool) -> dict[str, SimpleNamespace]:
    """What of DeepSpeed is asked about its code for files, which is not compiled ahead."""
    builder = SimpleNamespace(name="async_io", is_compatible=lambda: links)
    accelerator = SimpleNamespace(_name="cpu", create_op_builder={"AsyncIOBuilder": builder}.get)
    return {
        "deepspeed.accelerator": SimpleNamespace(get_accelerator=lambda: accelerator),
        "deepspeed.git_version_info": SimpleNamespace(installed_ops={}, accelerator_name="cpu"),
    }


NVME = """launch { device = cpu }
parallel { stack = deepspeed, deepspeed { stage = 3, offload_optimizer = nvme, nvme_path = "nvme" } }"""


@pytest.mark.parametrize(("lacks", "what", "do"), [
    ("", "", ""),
    ("libaio", "there is no libaio that a C compiler finds here", "install libaio-dev (or libaio-devel) and gcc"),
    ("programs", "no C++ compiler (c++) and no ninja in PATH here", "install g++ and `pip install ninja`"),
    ("folder", "DeepSpeed has nowhere to compile async_io", "set TORCH_EXTENSIONS_DIR"),
    ("end", "async_io/lock, left by an unfinished build of async_io", "remove it"),
])  # fmt: skip
def test_what_a_stack_needs_of_the_machine_beside_its_package(folder, capsys, monkeypatch, lacks, what, do):
    """Here what DeepSpeed compiles to offload to files; nothing is compiled to find that out."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "built"))
    for module in ("planner.rules.validate", "runtime.base.packages"):
        monkeypatch.setattr(f"xtrain.{module}.is_installed", lambda package: True)
    for name, module in builder_of_files(links=lacks != "libaio").items():
        monkeypatch.setitem(sys.modules, name, module)
    programs = folder / "programs"
    programs.mkdir()
    for name in () if lacks == "programs" else ("c++", "ninja"):
        (programs / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(programs))
    if lacks == "folder":
        Path("built").touch()
    elif lacks == "end":
        Path("built/async_io").mkdir(parents=True)
        Path("built/async_io/lock").touch()
        os.utime("built/async_io/lock", (0, 0))
    made(NVME)
    code, found = doctor("spec.xtrain", capsys=capsys)
    if not lacks:
        assert (code, found) == (0, [])
        return
    assert (code, [each["code"] for each in found]) == (3, ["X715"])
    assert what in found[0]["what"] and do in found[0]["do"]
    made(NVME.replace("nvme,", "cpu,").replace(', nvme_path = "nvme"', ""))
    assert doctor("spec.xtrain", capsys=capsys) == (0, [])


def tokenizer_of(words: int) -> str:
    vocab = {"<s>": 0, "</s>": 1, **{f"w{number}": number + 2 for number in range(words)}}
    added = [{"id": id, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for name, id in (("<s>", 0), ("</s>", 1))]  # fmt: skip
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    return json.dumps(
        {"version": "1.0", "added_tokens": added, "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    )


def test_a_tokenizer_that_is_not_the_planned_one(folder, capsys):
    Path("tokens").mkdir()
    file = Path("tokens/tokenizer.json")
    file.write_text(tokenizer_of(30))
    Path("plan.json").write_text(dumps(made(tokenizer='"tokens"')))
    assert doctor("plan.json", capsys=capsys) == (0, [])
    file.write_text(tokenizer_of(40))
    code, found = doctor("plan.json", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X734"])
    assert "has 42 ids, but the plan's model has 32" in found[0]["what"]
    shutil.rmtree("tokens")
    code, found = doctor("plan.json", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X507"])


def test_objects_that_are_not_there(folder, capsys):
    made()
    spec = Path("spec.xtrain")
    spec.write_text(spec.read_text().replace("python_stdlib()", 'jsonl("memory://no/*.jsonl")'))
    plan = plan_from_path("spec.xtrain").plan
    assert plan is not None
    Path("plan.json").write_text(dumps(plan))
    code, found = doctor("plan.json", capsys=capsys)
    assert code == 3 and [each["what"] for each in found] == ["no object matches memory://no/*.jsonl"]
    with pytest.raises(DataError, match="no object matches"):
        check_machine(plan, 1)


def test_a_tokenizer_other_than_that_of_the_weights(folder, monkeypatch):
    plan = made()
    for name, words in (("ours", 30), ("theirs", 31)):
        Path(name).mkdir()
        Path(name, "tokenizer.json").write_text(tokenizer_of(words))
    node = evolve(plan.node("setup.weights"), op="setup.read_weights", args={"folder": "theirs", "digest": ""})
    plan = evolve(plan, nodes=(node,))
    (found,) = checks._of_pretrained(plan, "ours")
    assert found.code == "X734" and 'token "w30" is 32 there and absent in ours' in found.what
    assert codes(checks._of_pretrained(plan, "theirs")) == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_memory(folder, version):
    """Of the control group, below what the machine has."""
    plan = made()
    need = 2 * max(each.memory.total_bytes for each in plan.estimates.classes)
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   16000000 kB\n"}
    if version == 2:
        files |= {
            "proc/self/cgroup": "0::/job_7/step_0\n",
            "sys/fs/cgroup/job_7/memory.max": f"{need + 900}\n",
            "sys/fs/cgroup/job_7/memory.current": "1000\n",
            "sys/fs/cgroup/job_7/memory.stat": "anon 5\ninactive_file 60\n",
            "sys/fs/cgroup/job_7/step_0/memory.max": "max\n",
            "sys/fs/cgroup/job_7/step_0/memory.current": "700\n",
        }
    else:  # of which all but memory may be in version 2
        files |= {
            "proc/self/cgroup": "7:cpu,cpuacct:/other\n4:memory:/job_7/step_0\n0::/other\n",
            "sys/fs/cgroup/memory/job_7/memory.limit_in_bytes": f"{need + 900}\n",
            "sys/fs/cgroup/memory/job_7/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/job_7/memory.stat": "inactive_file 7\ntotal_inactive_file 60\n",
            "sys/fs/cgroup/memory/job_7/step_0/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job_7/step_0/memory.usage_in_bytes": "700\n",
        }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    machine = look_at_machine(folder)
    assert machine.memory == need - 40
    assert codes(checks.of_memory(plan, machine, "cpu")) == ["X737"]
    assert codes(checks.of_memory(plan, evolve(machine, memory=need), "cpu")) == []
    assert codes(checks.of_memory(plan, evolve(machine, memory=None), "cpu")) == []


# several machines -----------------------------------------------------------------------------------------------------


def between(*look) -> list[list[Unfit]]:
    """What machines find of each other that are threads here; look: what each does with its `HostMeeting`."""
    store, found = HashStore(), [[] for _ in look]

    def run(index: int) -> None:
        place = NodePlace(index=index, host="127.0.0.1", port=1)
        found[index] = list(look[index](HostMeeting(place, len(look), store)))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(look))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def looks(folder: Path, machine: MachineFacts = HERE):
    return lambda meeting: hosts.find_between_hosts(meeting, machine, folder, "cpu")


@pytest.fixture
def no_sum(monkeypatch):
    """Threads of one process cannot be a process group."""
    monkeypatch.setattr(hosts, "sum_over_hosts", lambda meeting, device: ())


def test_machines_that_fit_each_other(folder, no_sum):
    assert between(*[looks(folder / "runs")] * 3) == [[], [], []]
    assert list((folder / "runs").iterdir()) == []


def test_versions_that_differ(folder, no_sum):
    other = evolve(HERE, host="b", driver="550.0", versions={"torch": "2.12.1"})
    first, second = between(looks(folder), looks(folder, other))
    assert first == [] and codes(second) == ["X735"]
    assert second[0].what == "torch 2.12.1 here and 2.13.0 on a; driver 550.0 here and 580.65.06 on a"


def test_a_run_directory_that_is_not_shared(folder, no_sum, monkeypatch):
    monkeypatch.setattr(hosts, "FILE_SECONDS", 0.1)
    first, second = between(looks(folder / "x"), looks(folder / "y"))
    assert first == [] and codes(second) == ["X706"]


@contextlib.contextmanager
def clock(ahead: float) -> Iterator[int]:
    """A machine that answers with another time, until nobody asks any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            other, _ = server.accept()
            with other:
                other.sendall(struct.pack("!d", time.time() + ahead))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(("ahead", "says"), [(0.0, None), (45.0, "45.0 s ahead of"), (-8.0, "8.0 s behind")])
def test_a_skewed_clock(ahead, says):
    with clock(ahead) as port:
        other = HostFacts(machine=evolve(HERE, host="b"), address="127.0.0.1", port=port)
        found = list(hosts.reach_others([other, other], 1))
    assert codes(found) == (["W708"] if says else [])
    assert says is None or f"the clock of b is {says}" in found[0].what


def test_a_machine_that_cannot_be_reached(folder, monkeypatch):
    """Nor is a number summed then, which would only wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setattr(hosts, "answering_time", lambda: contextlib.nullcontext(closed))
    monkeypatch.setattr(hosts, "sum_over_hosts", lambda meeting, device: [Unfit(code="X999", what="sum", do="-")])
    found = between(looks(folder), looks(folder, evolve(HERE, host="b")))
    assert [codes(each) for each in found] == [["X732"], ["X732"]]
    assert found[0][0].what == "b (127.0.0.1) cannot be reached from here: Connection refused"
    assert "GLOO_SOCKET_IFNAME" in found[0][0].do


def test_machines_that_do_not_come(folder, capsys):
    made("launch { device = cpu, nodes = 2, ranks_per_node = 1 }")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, found = doctor("spec.xtrain", "--node", "0", "--meet", f"127.0.0.1:{port}", "--wait", "0.3", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X716"])
    assert "1 of 2 machines have arrived within 0.3 s" in found[0]["what"]


def place_to_meet() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("node", "meet", "what", "do"), [
    ("5", "", "--node 5 of a plan for 2 nodes", "number them from 0"),  # also where another one has the last word
    ("1", "", "the first machine cannot be reached at 127.0.0.1:", "check that each reaches the first one"),
    ("1", "no.invalid:29500", "the first machine cannot be reached at no.invalid:29500: ", "start it once on every"),
    ("0", "no.invalid:", "this machine, which is the first one, is not at no.invalid:", "start it once on every"),
    ("0", "taken", "cannot be opened on this machine, which is the first one: Address already in use", "--meet"),
])  # fmt: skip
def test_a_first_machine_that_is_not_there(folder, capfd, monkeypatch, node, meet, what, do):
    """Each says why by itself, in its own words alone: nobody else would."""
    made("launch { device = cpu, nodes = 2, ranks_per_node = 1 }")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # else the name of this machine is reported as well
    monkeypatch.setattr(hosts, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        free = place_to_meet()
        place = {"": free, "taken": taken, "no.invalid:": f"no.invalid:{free.partition(':')[2]}"}.get(meet, meet)
        assert main(["doctor", "spec.xtrain", "--node", node, "--meet", place, "--wait", "0.2"]) == 3
    said, wrote = capfd.readouterr()
    code, remedy, last = said.splitlines()
    assert what in code and do in remedy and "1 error" in last and wrote == ""


def test_an_own_name_that_does_not_resolve(folder, capsys, monkeypatch):
    made("launch { device = cpu, nodes = 2, ranks_per_node = 1 }")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "me.invalid")
    code, found = doctor("spec.xtrain", "--node", "1", "--meet", "no.invalid:1", "--wait", "0.2", capsys=capsys)
    assert (code, [each["code"] for each in found]) == (3, ["X732", "X716"])
    assert "its name `me.invalid`: the name does not resolve" in found[0]["what"]


def test_a_machine_that_leaves_again(folder, monkeypatch):
    """The others say which one, leave nothing behind, and end."""
    monkeypatch.setattr("xtrain.runtime.inspect.doctor.look_at_machine", lambda: HERE)
    plan = made("launch { device = cpu, nodes = 2, ranks_per_node = 1 }")
    host, _, port = place_to_meet().partition(":")

    def come_and_go() -> None:
        meeting = HostMeeting.join(NodePlace(index=1, host=host, port=int(port)), 2, 20)
        meeting.exchange("facts", {})

    thread = threading.Thread(target=come_and_go)
    thread.start()
    monkeypatch.setattr(hosts.HostFacts, "of_json", lambda content: HostFacts(machine=HERE, address=host, port=1))
    monkeypatch.setattr(hosts, "reach_others", lambda others, own: ())
    found = examine(plan, NodePlace(index=0, host=host, port=int(port)), 1)
    thread.join()
    assert codes(found) == ["X716"]
    assert "machine 1 (--node 1, or that of Slurm) arrived, but no longer answers" in found[0].what
    assert not list(Path("runs").glob(".*"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_of_either_kind(host):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert own_address(host, 29500) == host
    with hosts.answering_time() as port:
        apart, within = hosts.clock_of(HostFacts(machine=HERE, address=host, port=port))
    assert abs(apart) <= within + 0.5


@pytest.mark.slow
@pytest.mark.distributed
def test_two_machines_from_the_command_line(folder):
    """The first one has what both have found; here both are this machine, and sum a number over gloo."""
    made("launch { device = cpu, nodes = 2, ranks_per_node = 1 }")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "xtrain", "doctor", "spec.xtrain", "--meet", f"127.0.0.1:{port}", "--json"]
    both = [
        subprocess.Popen([*command, "--node", str(index)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for index in (0, 1)
    ]
    (out, err), (none, of_second) = (each.communicate(timeout=120) for each in both)
    assert [each.returncode for each in both] == [0, 0], err + of_second
    assert json.loads(out)["findings"] == [] and none == ""
