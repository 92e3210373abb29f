"""`launcher kubernetes { … }`: a JobSet, or an indexed Job, of Kubernetes."""

from collections.abc import Iterator
from typing import Any, Literal

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import named
from ...dsl.schema.launchers import LAUNCHERS, Launcher
from ...dsl.schema.names import file_path, some_text
from ...dsl.schema.setting import AUTO, Auto, Role, at_least, not_negative, positive, setting
from ...planner.units import plural


@LAUNCHERS.register()
@frozen
class Kubernetes(Launcher):
    """`launcher kubernetes { … }`: pods of Kubernetes, one for each node, which start again together."""

    kind: str = named("kubernetes")
    image: str = setting(
        "image with xtrain that the pods run",
        check=some_text,
        role=Role.EXECUTION,
        example='"registry.example/xtrain:0.1"',
    )
    manifest: Literal["jobset", "job"] = setting(
        "jobset: all pods start again when one fails, by the JobSet controller; job: an indexed Job with a headless "
        "service, for clusters without it, where a run that fails is not started again",
        default="jobset",
        role=Role.EXECUTION,
    )
    namespace: str | None = setting(
        "namespace; none: that of the context of kubectl", default=None, check=some_text, role=Role.EXECUTION
    )
    workdir: str = setting(
        "working folder in the pods, on a volume of all of them: relative paths of the spec, and with them the runs, "
        "lie below it",
        default="/work",
        check=file_path,
        role=Role.EXECUTION,
    )
    volumes: tuple[str, ...] = setting(
        "claims of persistent volumes, as `claim:/path`; one must hold the working folder",
        role=Role.EXECUTION,
        example='["runs:/work"]',
    )
    secrets: tuple[str, ...] = setting(
        "names of Secrets, whose keys become environment variables", default=(), role=Role.EXECUTION,
        example='["wandb"]',
    )  # fmt: skip
    queue: str | None = setting(
        "local queue of Kueue; none: the pods are created at once",
        default=None,
        check=some_text,
        role=Role.EXECUTION,
        example='"team-a"',
    )
    gpus: int | Auto = setting(
        "number of GPUs of each pod; auto: one for each rank, and none where ranks compute on CPUs",
        default=AUTO,
        check=not_negative,
        role=Role.EXECUTION,
        example="8",
    )
    cpus: int = setting("CPUs of each pod", default=8, check=at_least(1), role=Role.EXECUTION, example="64")
    memory: Quantity = setting(
        "memory of each pod, shared memory included",
        default=Quantity(32 * 2**30, "bytes"),
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="900 GiB",
    )
    shared_memory: Quantity = setting(
        "size of /dev/shm, by which ranks of a pod exchange",
        default=Quantity(2 * 2**30, "bytes"),
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="16 GiB",
    )
    nodes: tuple[str, ...] = setting(
        "labels of the nodes that pods may run on, as `name=value`",
        default=(),
        role=Role.EXECUTION,
        example='["gpu=h100"]',
    )
    restarts: int = setting(
        "how often all pods start again, and go on from the last checkpoint",
        default=10,
        check=not_negative,
        role=Role.EXECUTION,
        example="100",
    )

    def says(self) -> str:
        queue = f", queue {self.queue}" if self.queue else ""
        again = f", up to {plural(self.restarts, 'restart')}" if self.manifest == "jobset" else ", not started again"
        return f"{self.manifest}, image {self.image}{queue}{again}"

    def mistakes(self, launch: Any) -> Iterator[tuple[str, str, str]]:
        for name in ("volumes", "nodes"):
            sign, form = {"volumes": (":/", "claim:/path"), "nodes": ("=", "name=value")}[name]
            for text in getattr(self, name):
                if not all(text.partition(sign)[::2]):
                    yield name, f"`{text}` is not as it should be", f"write it as `{form}`"
        paths = [f"/{text.partition(':/')[2]}" for text in self.volumes if ":/" in text]
        if not any(f"{self.workdir}/".startswith(f"{path.rstrip('/')}/") for path in paths):
            what = f"the working folder {self.workdir} is on no volume, and what is written there is lost with the pods"
            yield "workdir", what, 'give a volume that holds it, as `volumes = ["runs:/work"]`'
        if self.shared_memory.value >= self.memory.value:
            yield "shared_memory", "it is counted in `memory`, and takes all of it", "give more memory"
