"""The job of a run in Kubernetes: a ConfigMap with the plan, a JobSet or an indexed Job, and kubectl commands. The
manifest is JSON, which `kubectl` reads like YAML."""

import base64
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, Final

from xtrain.components.launchers.kubernetes import PLAN_MOUNT, SHARED_MOUNT
from xtrain.dsl.schema.cluster import Launcher
from xtrain.plan.serialise import dumps
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.process import RESTART
from xtrain.runtime.jobs.submitted import EndedJob, Job, QueueState
from xtrain.runtime.observe.stopping import answer_of
from xtrain.text.units import bytes_text
from xtrain.version import __version__

MANIFEST: Final = "job.k8s.json"
PORT: Final = 29500
# Labels that select the pods of a JobSet or a Job.
NAME_LABELS: Final = {"jobset": "jobset.sigs.k8s.io/jobset-name", "job": "batch.kubernetes.io/job-name"}
# Lines of each pod in the log of a trial.
LOG_LINES: Final = 1000
# Set on pods by the JobSet controller.
ATTEMPT: Final = "jobset.sigs.k8s.io/restart-attempt"
# Limit for a ConfigMap, which holds 1 MiB; larger plans are compressed.
PLAIN_BYTES: Final = 900_000
RANKS: Final = "ranks"
# Exit codes of runs that would fail again: invalid spec, unsuitable machine, Ctrl-C; 75 is a stopped run.
FINAL_CODES: Final = (2, 3, 130)
STOPPED: Final = 75
# A rank writes its heartbeat every few seconds; after these minutes without one it counts as lost.
BEAT_MINUTES: Final = 3


class KubernetesJobs:
    """JobSets and Jobs; an id is the resource and its name, such as `jobset/NAME`."""

    def files(self, job: Job) -> dict[str, str]:
        return {MANIFEST: json.dumps(manifest(job), indent=2) + "\n"}

    def submit(self, job: Job) -> str:
        id = _id(job)
        # Delete a finished job of this name: `kubectl apply` would leave it unchanged.
        try:
            _delete(job.launcher, id, wait=True)
        except EnvironmentFault as fault:
            if "the server doesn't have a resource type" not in str(fault):
                raise
            message = f"this cluster does not support {job.launcher.manifest}: {fault}"
            hint = "install the controller of JobSets in the cluster, or use `manifest = job`"
            raise EnvironmentFault("X461", f"{message}; {hint}") from fault
        answer_of("kubectl", "apply", *_namespace(job.launcher), "--filename", str(job.files / MANIFEST))
        return id

    def states(self, launcher: Launcher, ids: Sequence[str]) -> dict[str, QueueState]:
        answer = answer_of("kubectl", "get", *ids, *_namespace(launcher), "--ignore-not-found", "--output", "json")
        objects = {each["metadata"]["name"]: each for each in _items(answer)}
        names = {id: id.partition("/")[2] for id in ids}
        return {
            id: _state(objects[name]) if name in objects else QueueState(over=True, word="gone")
            for id, name in names.items()
        }

    def cancel(self, launcher: Launcher, id: str) -> None:
        _delete(launcher, id)

    # Trials: objects of their own, whose names follow from their plans -----------------------------------------------

    def trial_files(self, jobs: Sequence[Job], name: str, logs: Sequence[Path]) -> dict[Path, str]:
        return {job.files / file: text for job in jobs for file, text in self.files(job).items()}

    def submit_trials(self, jobs: Sequence[Job], name: str) -> list[str]:
        return [self.submit(job) for job in jobs]

    def find_trials(self, jobs: Sequence[Job], name: str) -> list[str] | None:
        return [_id(job) for job in jobs]

    def stop(self, launcher: Launcher, id: str) -> None:
        _delete(launcher, id)  # pods are asked to stop, and have their grace period to save

    def collect(self, launcher: Launcher, id: str) -> EndedJob:
        kind, _, name = id.partition("/")
        pods = ["--selector", f"{NAME_LABELS[kind]}={name}", *_namespace(launcher)]
        found = _items(answer_of("kubectl", "get", "pods", *pods, "--output", "json"))
        statuses = [status for pod in found for status in pod["status"].get("containerStatuses", ())]
        codes = [each["state"]["terminated"]["exitCode"] for each in statuses if "terminated" in each["state"]]
        output = answer_of("kubectl", "logs", *pods, "--tail", str(LOG_LINES), "--prefix") if codes else ""
        _delete(launcher, id)
        # With several pods, the output of a failed one, because `xtrain run` exits with the code of such a rank.
        return EndedJob(code=next(filter(None, codes), 0) if codes else None, output=output or "")


LAUNCHER: Final = KubernetesJobs()


def _items(answer: str | None) -> list[Any]:
    """Return the objects printed by kubectl: one, a list, or nothing. Raises EnvironmentFault."""
    try:
        found = json.loads(answer) if answer and answer.strip() else {"items": []}
        return found.get("items", [found])
    except (ValueError, AttributeError) as error:
        raise EnvironmentFault("X461", f"kubectl did not print a JSON object: {error}") from error


def _id(job: Job) -> str:
    return f"{job.launcher.manifest}/{object_name(job)}"


def _delete(launcher: Any, id: str, *, wait: bool = False) -> None:
    """Delete a job and its objects. The job remains until its pods are gone."""
    kind, _, name = id.partition("/")
    others = [f"configmap/{name}", *([f"service/{name}"] if kind == "job" else [])]
    answer_of(
        "kubectl", "delete", id, *others, *_namespace(launcher), "--ignore-not-found", "--cascade=foreground",
        f"--wait={str(wait).lower()}",
    )  # fmt: skip


def _state(found: Any) -> QueueState:
    """Return the state of a JobSet or a Job."""
    held = {each["type"]: each for each in found.get("status", {}).get("conditions", ()) if each["status"] == "True"}
    for over, name in ((True, "Completed"), (True, "Complete"), (True, "Failed"), (False, "Suspended")):
        if name in held:
            return QueueState(over=over, word=name, why=held[name].get("reason", ""), waits=not over)
    suspended = found.get("spec", {}).get("suspend", False)
    return QueueState(over=False, word="Suspended" if suspended else "Active", waits=suspended)


def _namespace(launcher: Any) -> list[str]:
    return ["--namespace", launcher.namespace] if launcher.namespace else []


def object_name(job: Job) -> str:
    """Return a DNS name: the experiment's name as far as possible, and the start of the plan's id."""
    words = re.sub(r"[^a-z0-9]+", "-", job.plan.name.lower()).strip("-")[:30].strip("-") or "run"
    return f"{words if words[0].isalpha() else f'run-{words}'}-{job.plan.id[:8]}"


def manifest(job: Job) -> dict[str, Any]:
    """Return all objects as one list."""
    launcher, name = job.launcher, object_name(job)
    plan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, name), **_plan_data(job)}
    if launcher.manifest == "jobset":
        items = [plan, _jobset(job, launcher, name)]
    else:
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(job, name),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": name},
            },
        }
        head = f"{name}-0.{name}"
        spec = {**_job(job, launcher, name, head, subdomain=name), **_suspended(launcher)}
        own = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, name, launcher), "spec": spec}
        items = [plan, service, own]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _plan_data(job: Job) -> dict[str, Any]:
    text = dumps(job.plan)
    if len(text.encode()) <= PLAIN_BYTES:
        return {"data": {"plan.json": text}}
    packed = gzip.compress(text.encode(), mtime=0)
    if len(packed) > PLAIN_BYTES:
        message = f"the plan takes {bytes_text(len(packed))} packed, and a ConfigMap of Kubernetes holds 1 MiB"
        raise EnvironmentFault("X461", f"{message}; save it on a volume and start it there with `xtrain run`")
    return {"binaryData": {"plan.json.gz": base64.b64encode(packed).decode()}}


def _metadata(job: Job, name: str, queued: Any = None) -> dict[str, Any]:
    """Return an object's metadata. queued: launcher of an object that Kueue admits."""
    labels = {"app.kubernetes.io/managed-by": "xtrain", "xtrain/plan": job.plan.id}
    if queued is not None and queued.queue:
        labels["kueue.x-k8s.io/queue-name"] = queued.queue
    return {"name": name, "labels": labels, "annotations": {"xtrain/version": __version__}}


def _suspended(launcher: Any) -> dict[str, Any]:
    """Return the `suspend` field: jobs queued by Kueue start suspended."""
    return {"suspend": True} if launcher.queue else {}


def _jobset(job: Job, launcher: Any, name: str) -> dict[str, Any]:
    head = f"{name}-{RANKS}-0-0.{name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, name, launcher),
        "spec": {
            **_suspended(launcher),
            # The headless service; ranks resolve each other before they are ready.
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            # Restart all pods or none: a single restarted rank would wait for ranks of the previous start.
            "failurePolicy": {
                "maxRestarts": launcher.restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [
                {"name": RANKS, "replicas": 1, "template": {"spec": _job(job, launcher, name, head)}},
            ],
        },
    }


def _job(job: Job, launcher: Any, name: str, head: str, subdomain: str = "") -> dict[str, Any]:
    final = [*FINAL_CODES, *([STOPPED] if _stops_by_itself(job) else [])]
    return {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": RANKS, "operator": "In", "values": sorted(final)},
                }
            ]
        },
        "template": {
            "metadata": {"labels": {"xtrain/plan": job.plan.id}},
            "spec": {**({"subdomain": subdomain} if subdomain else {}), **_pod(job, launcher, name, head)},
        },
    }


def _stops_by_itself(job: Job) -> bool:
    """Return True if the spec stops the run before its end: after a restart it would stop again."""
    timeline = job.plan.timeline
    amounts = (timeline.stop_at, timeline.stop_after, timeline.stop_at_amount, timeline.stop_after_amount)
    return any(each is not None for each in amounts)


def _pod(job: Job, launcher: Any, name: str, head: str) -> dict[str, Any]:
    claims = [text.partition(":") for text in launcher.volumes]
    amounts = {"cpu": str(launcher.cpus), "memory": str(int(launcher.memory.value))}
    amounts |= {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    mounts = [{"name": f"claim-{number}", "mountPath": path} for number, (_, _, path) in enumerate(claims)]
    mounts += [{"name": "shared-memory", "mountPath": SHARED_MOUNT}, {"name": "plan", "mountPath": PLAN_MOUNT}]
    container = {
        "name": RANKS,
        "image": launcher.image,
        "command": ["bash", "-c", _command(job, head)],
        "workingDir": launcher.workdir,
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": mounts,
        **_probes(job),
    }
    if launcher.manifest == "jobset":  # number of previous restarts; tells the run that it resumes
        attempt = f"metadata.annotations['{ATTEMPT}']"
        container["env"] = [{"name": RESTART, "valueFrom": {"fieldRef": {"fieldPath": attempt}}}]
    if launcher.secrets:
        container["envFrom"] = [{"secretRef": {"name": each}} for each in launcher.secrets]
    shared = {"medium": "Memory", "sizeLimit": str(int(launcher.shared_memory.value))}
    volumes: list[dict[str, Any]] = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _, _) in enumerate(claims)
    ]
    volumes += [{"name": "shared-memory", "emptyDir": shared}, {"name": "plan", "configMap": {"name": name}}]
    labels = [text.partition("=") for text in launcher.nodes]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.patience,
        **({"nodeSelector": {key: value for key, _, value in labels}} if labels else {}),
        "containers": [container],
        "volumes": volumes,
    }


def _command(job: Job, head: str) -> str:
    """Return the command of a pod: xtrain starts the pod's ranks, and they meet in the first pod."""
    plan, unpack = f"{PLAN_MOUNT}/plan.json", ""
    if "binaryData" in _plan_data(job):
        unpack, plan = f"gzip -dc {PLAN_MOUNT}/plan.json.gz > /tmp/plan.json && ", "/tmp/plan.json"
    several = f' --node "$JOB_COMPLETION_INDEX" --meet {head}:{PORT}' if job.nodes > 1 else ""
    return f"{unpack}exec xtrain run {plan} --accept-drift --ui plain{several}"


def _probes(job: Job) -> dict[str, Any]:
    """Return probes of the pod's first rank: its heartbeat file, updated while Python runs in the process."""
    ranks = job.plan.launch["ranks_per_node"]
    workspace, inside = job.plan.workspace, PurePosixPath(job.launcher.workdir)
    folder = quote(str(inside / workspace["root"] / workspace["lineage"] / job.directory.name / "ranks"))
    folder = folder.replace("$", "$$")  # Kubernetes turns it into one again
    beat = f'{folder}/"$(printf %05d $((JOB_COMPLETION_INDEX * {ranks})))".beat'
    check = {"exec": {"command": ["bash", "-c", f'[ -n "$(find {beat} -mmin -{BEAT_MINUTES})" ]']}}
    # Before the first heartbeat, xtrain is imported, the plan is compiled, and the pods wait for each other.
    return {
        "startupProbe": {**check, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 180},
        "livenessProbe": {**check, "periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 4},
    }
