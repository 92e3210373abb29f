"""`launcher kubernetes { … }`: a JobSet, or an indexed Job, of Kubernetes."""

import re
from collections.abc import Iterator
from posixpath import join, normpath
from typing import Final, Literal

from xtrain.contracts.actions import PlannedLauncher
from xtrain.dsl.schema.cluster import LAUNCHERS
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    Range,
    TextCheck,
    at_least,
    execution_setting,
    file_path,
    not_negative,
    positive,
)
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.text.units import plural

# Mount points of shared memory and of the plan in a pod.
SHARED_MOUNT: Final = "/dev/shm"
PLAN_MOUNT: Final = "/launch"
_DNS: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_WORD: Final = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_OBJECT: Final = re.compile(rf"(?=.{{1,253}}$){_DNS}(\.{_DNS})*")
_LABEL: Final = re.compile(rf"(?P<key>({_DNS}(\.{_DNS})*/)?{_WORD})=(?P<value>{_WORD})")


def _named(longest: int, *, dots: bool = False) -> TextCheck:
    """Return a check of Kubernetes names (RFC 1123)."""
    words = "of small letters, digits" + (", `-` and `.`" if dots else " and `-`")
    pattern = rf"{_DNS}(\.{_DNS})*" if dots else _DNS

    def problem(text: str) -> str | None:
        fits = len(text) <= longest and re.fullmatch(pattern, text)
        return None if fits else f"must be a name {words}, with a letter or digit at its ends, of at most {longest}"

    return TextCheck(f"a name {words}", None, f"^{pattern}$", problem)


def _problem_of_image(text: str) -> str | None:
    return None if re.fullmatch(r"[^\s-]\S*", text) else "must be the name of an image, without blanks"


_image: Final = TextCheck("the name of an image", None, r"^[^\s-]\S*$", _problem_of_image)


@LAUNCHERS.register()
@frozen
class Kubernetes(PlannedLauncher):
    """`launcher kubernetes { … }`: Kubernetes pods, one per node, which restart together."""

    kind: str = named("kubernetes")
    image: str = execution_setting(
        "image with xtrain that the pods run", check=_image, example='"registry.example/xtrain:0.1"'
    )
    manifest: Literal["jobset", "job"] = execution_setting(
        "jobset: the JobSet controller restarts all pods when one fails; job: an indexed Job with a headless service, "
        "for clusters without that controller; a failed run is not restarted",
        default="jobset",
    )
    namespace: str | None = execution_setting(
        "namespace; none: the namespace of kubectl's context", default=None, check=_named(63)
    )
    workdir: str = execution_setting(
        "working folder in the pods, on a volume that all pods mount; relative paths of the spec, and the runs, are "
        "below it",
        default="/work",
        check=file_path,
    )
    volumes: tuple[str, ...] = execution_setting(
        "claims of persistent volumes, as `claim:/path`; one must hold the working folder", example='["runs:/work"]'
    )
    secrets: tuple[str, ...] = execution_setting(
        "names of Secrets whose keys become environment variables",
        default=(),
        check=_named(253, dots=True),
        example='["wandb"]',
    )
    queue: str | None = execution_setting(
        "local queue of Kueue; none: the pods are created at once",
        default=None,
        check=_named(63, dots=True),
        example='"team-a"',
    )
    gpus: int | Auto = execution_setting(
        "number of GPUs of each pod; auto: one for each rank, and none where ranks compute on CPUs",
        default=AUTO,
        check=not_negative,
        example="8",
    )
    cpus: int = execution_setting("CPUs of each pod", default=8, check=at_least(1), example="64")
    memory: Quantity = execution_setting(
        "memory of each pod, including shared memory",
        default=Quantity(32 * 2**30, "bytes"),
        units=("bytes",),
        check=positive,
        example="900 GiB",
    )
    shared_memory: Quantity = execution_setting(
        "size of /dev/shm, through which ranks of a pod exchange data",
        default=Quantity(2 * 2**30, "bytes"),
        units=("bytes",),
        check=positive,
        example="16 GiB",
    )
    nodes: tuple[str, ...] = execution_setting(
        "labels of the nodes that pods may run on, as `name=value`", default=(), example='["gpu=h100"]'
    )
    restarts: int = execution_setting(
        "maximum number of restarts of all pods, which resume from the latest checkpoint",
        default=10,
        check=Range(low=0, high=2**31 - 1),
        example="100",
    )

    def says(self) -> str:
        queue = f", queue {self.queue}" if self.queue else ""
        again = f", up to {plural(self.restarts, 'restart')}" if self.manifest == "jobset" else ", no restarts"
        return f"{self.manifest}, image {self.image}{queue}{again}"

    def mistakes(self, spec: Spec) -> Iterator[tuple[str, str, str]]:
        wrong = [text for text in self.volumes if not _is_volume(text)]
        for text in wrong:
            yield "volumes", f"`{text}` is not a claim with a folder", "write it as `claim:/path`"
        mounted = {SHARED_MOUNT: "shared memory", PLAN_MOUNT: "the plan"}
        for text in self.volumes:
            path = text.partition(":")[2].rstrip("/")
            if path and path in mounted:
                yield "volumes", f"`{text}` is where {mounted[path]} is", "give each a folder of its own"
            mounted[path] = f"`{text}`"
        keys: set[str] = set()
        for text in self.nodes:
            label = _LABEL.fullmatch(text)
            if label is None:
                yield "nodes", f"`{text}` is not a label", "write it as `name=value`, as Kubernetes allows them"
            elif label["key"] in keys:
                yield "nodes", f"`{label['key']}` is given twice, and a node has one value of it", "keep one"
            else:
                keys.add(label["key"])
        if not wrong:
            yield from self._lost(spec)
        yield from self.few_gpus(spec)
        if self.shared_memory.value >= self.memory.value:
            yield "shared_memory", "it is counted in `memory`, and takes all of it", "give more memory"

    def _lost(self, spec: Spec) -> Iterator[tuple[str, str, str]]:
        """Yield the problems of folders that are not on a volume. All volumes are valid already."""
        runs = normpath(join(self.workdir, spec.workspace.root))
        lost = "is on no volume, and what is written there is lost with the pods"
        if not _is_mount(self.workdir) or not self._is_kept(self.workdir):
            hint = 'give a volume that holds it, as `volumes = ["runs:/work"]`'
            yield "workdir", f"the working folder `{self.workdir}` {lost}", hint
        elif not self._is_kept(runs):
            hint = 'give a volume that holds it, or set workspace.root to a folder below `workdir`, such as "runs"'
            yield "volumes", f"the folder of the runs, `{runs}`, {lost}", hint

    def _is_kept(self, folder: str) -> bool:
        """Return True if a folder of a pod is on a volume."""
        return any(f"{folder}/".startswith(f"{text.partition(':')[2].rstrip('/')}/") for text in self.volumes)

    def own_restarts(self) -> tuple[str, int] | None:
        return ("launcher.restarts", self.restarts) if self.manifest == "jobset" else None

    def idle(self) -> Iterator[tuple[str, str]]:
        if self.manifest == "job":
            yield "restarts", "a Job is not restarted"


def _is_volume(text: str) -> bool:
    claim, _, path = text.partition(":")
    return _OBJECT.fullmatch(claim) is not None and _is_mount(path)


def _is_mount(path: str) -> bool:
    """Return True if a pod's folder is a valid Kubernetes mount path without `..` or `:`."""
    return path.startswith("/") and ":" not in path and normpath(path) == path.rstrip("/")
