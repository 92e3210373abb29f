"""The weights of a reference model: what they are known by, and how the model of the run gets them for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen

from xtrain.dsl.schema.losses import ADAPTER_OFF, INITIAL
from xtrain.planner.canonical import DATA
from xtrain.planner.canonical import digest as canonical_digest
from xtrain.planner.model.peft import PEFT_WEIGHTS
from xtrain.planner.plan import Node, Plan
from xtrain.runtime.checkpoint.model_folder import planned_adapter, planned_files
from xtrain.runtime.checkpoint.ops import read_weights
from xtrain.runtime.checkpoint.sources import find, starting_point
from xtrain.runtime.data.stores.digests import FileDigests, remembering
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op_of
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Rank, Resources

# The nodes that give parameters the values that a run begins with; behind those of the model those of an adapter.
OF_MODEL: Final = ("setup.weights", "setup.read_weights", "setup.pretrained")
OF_ADAPTER: Final = ("setup.adapter", "setup.read_adapter")
# Arguments of these that are only about where something lies.
PLACES: Final = ("offload", "folder", "repo", "revision", "path", "digest")


def identity_of(plan: Plan, reference: str, digest: str, index: Path) -> str:
    """What the weights of a reference are known by, a hash: of the seed of those that are drawn, of the content of
    those that lie in files, which are read once, and of the model. index: where digests of files are remembered.

    Raises OSError where a file is not there.
    """
    return canonical_digest(_depends_on(plan, reference, digest, index), DATA, size=16)


def _depends_on(plan: Plan, reference: str, digest: str, index: Path) -> dict[str, Any]:
    build, freeze = plan.node("setup.build_model").args, _args(plan, "setup.freeze")
    arch = plan.architecture if reference == INITIAL else plan.architecture.base
    found: dict[str, Any] = {
        "architecture": arch.to_json(),
        "formats": [build["params"], freeze.get("format", "")],
        "base": _args(plan, "setup.quantise").get("base", {}),
    }
    with remembering(digests := FileDigests(index)):
        if reference not in (INITIAL, ADAPTER_OFF):
            return {**found, "weights": [["folder", _contents(digests, _files(reference, digest))]]}
        nodes = begun_by(plan, OF_MODEL if reference == ADAPTER_OFF else (*OF_MODEL, *OF_ADAPTER))
        known = [[node.op, _kept(node), _contents(digests, _read(plan, node))] for node in nodes]
    return {**found, "weights": known}


def begun_by(plan: Plan, ops: tuple[str, ...]) -> list[Node]:
    """The nodes of a plan with these ops, in their order."""
    return [node for node in plan.nodes if node.op in ops]


def _args(plan: Plan, op: str) -> dict[str, Any]:
    return next((node.args for node in plan.nodes if node.op == op), {})


def _kept(node: Node) -> dict[str, Any]:
    """What a node says of values; of a checkpoint its files, whose checksums are known."""
    if node.op == "setup.pretrained":
        return find(Path(node.args["path"]), weights=True).state()["files"]
    return {name: value for name, value in node.args.items() if name not in PLACES}


def _files(folder: str, digest: str) -> list[Path]:
    files = planned_files(digest, folder)
    return [Path(files.folder) / name for name in files.files]


def _read(plan: Plan, node: Node) -> list[Path]:
    """The files that a node reads."""
    if node.op == "setup.read_weights":
        files = planned_files(**node.args)
        return [Path(files.folder) / name for name in files.files]
    if node.op == "setup.read_adapter":
        return [Path(planned_adapter(plan, **node.args).folder) / PEFT_WEIGHTS]
    return []


def _contents(digests: FileDigests, files: list[Path]) -> list[list[str]]:
    """Name and digest of each file."""
    digests.learn(files)
    return [[path.name, digests.digest(path)] for path in files]


@frozen(kw_only=True, eq=False)
class ReferenceWeights:
    """The model of a run, which may have the weights of a reference for a while. resources: of the set-up."""

    plan: Plan
    model: ModelParts
    rank: Rank
    records: Records
    beat: HeartbeatWriter
    resources: Resources

    @contextmanager
    def in_place(self, reference: str, digest: str, task: str | None) -> Iterator[None]:
        """Within the block the model is the reference; behind it, it has the weights that it has had before, or those
        that a checkpoint takes the place of.

        task: with whose adapter, of several. Collective; raises what reading weights raises.
        """
        if reference == INITIAL and not self._begins_with_a_part:
            if self._goes_on:
                self._begin((*OF_MODEL, *OF_ADAPTER))
            with self.model.with_adapter_of(task):
                yield
        elif reference in (INITIAL, ADAPTER_OFF):
            # What an adapter of a folder has beside its matrices has taken the place of parts of the model.
            changed = self._goes_on or bool(begun_by(self.plan, ("setup.read_adapter",)))
            if changed:
                self._begin(OF_MODEL)
            with self.model.without_adapter():
                yield
            if changed:
                self._begin(OF_ADAPTER)
        else:
            read_weights(self.plan, self.model, self.rank, self.records, self.beat, digest, reference, anew=True)
            with self.model.without_adapter():
                yield
            self._begin((*OF_MODEL, *OF_ADAPTER))

    @property
    def _begins_with_a_part(self) -> bool:
        """Whether the adapter begins with a part of the matrices, which is not taken out of them before the references
        are computed: without it the model is what it begins with."""
        return bool(begun_by(self.plan, ("setup.decompose",)))

    @property
    def _goes_on(self) -> bool:
        """Whether a state is taken over later, so that weights in files have not been read."""
        return starting_point(self.plan, self.records.directory).entry is not None

    @torch.no_grad()
    def _begin(self, ops: tuple[str, ...]) -> None:
        """Give parameters the values that a run begins with, by the nodes with these ops."""
        for node in begun_by(self.plan, ops):
            op_of(node).bind(node, {**self.resources, "node_id": node.id, "anew": True})()
