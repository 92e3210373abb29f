"""A Slurm of two machines that are both this one, for tests; where it is not installed there is none.

`slurmctld`, `slurmd` and the commands of Slurm (Debian: `apt-get install slurm-wlm`) are looked for in PATH. They need
neither munge nor systemd nor anything outside the folder that they are given.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

COMMANDS: Final = ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
# Addresses of this machine, by which its two names are known without a file of hosts.
NODES: Final = ("127.0.0.1", "127.0.0.2")
PATIENCE_SECONDS: Final = 60


def found() -> dict[str, Path] | None:
    """Command → where it is; None where one is missing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    there = {name: shutil.which(name, path=path) for name in COMMANDS}
    return {name: Path(each).resolve() for name, each in there.items() if each} if all(there.values()) else None


def _configuration(folder: Path, spool: Path, plugins: Path, ports: list[int]) -> str:
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000"
        for name, port in zip(NODES, ports, strict=False)
    )
    return f"""ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[2]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SchedulerParameters=sched_interval=1,batch_sched_delay=0
{nodes}
PartitionName=tiny Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=YES
"""


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Slurm as long as the block lasts; the environment in which its commands reach it."""
    there = found()
    assert there is not None
    plugins = next(each.parent for each in there["slurmd"].parents[1].glob("lib/**/slurm*/auth_none.so"))
    (folder / "state").mkdir(parents=True)
    spool = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets lie in it, whose paths are at most 108 characters long
    for name in NODES:
        (spool / name).mkdir()
    with ExitStack() as opened:
        servers = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in servers]
    (folder / "slurm.conf").write_text(_configuration(folder, spool, plugins, ports))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    folders = dict.fromkeys(str(path.parent) for path in there.values())
    environment["PATH"] = ":".join((*folders, os.environ["PATH"]))
    daemons = [subprocess.Popen([there["slurmctld"], "-D"], env=environment, stderr=subprocess.DEVNULL)]
    try:
        for name in NODES:
            command = [there["slurmd"], "-D", "-N", name, "-d", there["slurmstepd"]]
            daemons.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while _idle(environment) < len(NODES):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield environment
    finally:
        subprocess.run(["scancel", "--user", "root"], env=environment, check=False, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:  # it waits for steps that are over
                daemon.kill()
                daemon.wait()
        shutil.rmtree(spool, ignore_errors=True)


def _idle(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format", "%T"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split().count("idle")
