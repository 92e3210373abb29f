"""Contracts of model families and adapters: the decoder blocks of an architecture."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from xtrain.blocks.adapted import AdaptedBlock, AdaptedMatrix
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer, SwiGLULayer
from xtrain.dsl.schema.adapters import Adapter, TaskAdapters
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.model import Model, ModelEnds
from xtrain.plan.architecture import Architecture, BlockParameter

if TYPE_CHECKING:
    from xtrain.dsl.user_parts.bodies import BodyError
    from xtrain.plan.peft import PeftFolder
    from xtrain.plan.weight_files import StoredNames


class PlannedModel(Model):
    """Base class of all model families, next to a class with their settings (`dsl/schema/model.py`)."""

    stored: "ClassVar[StoredNames | None]" = None
    """Parameter names in files; given with `config`."""

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        """Return the decoder block that all layers share, as a tree of pieces (`blocks/`) from which its parameters,
        cost and modules follow."""
        raise NotImplementedError

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        """Return the decoder block of each layer, without adapter. Families whose layers differ override this method
        instead of `block`."""
        return (cls.block(arch),) * arch.layers

    @classmethod
    def names_in_files(cls, arch: Architecture) -> "StoredNames | None":
        """Return the parameter names in files of an architecture; None: there are no files of the family."""
        return cls.stored

    @classmethod
    def ends(cls, arch: Architecture) -> ModelEnds:
        """Return the family's properties at the ends of the model."""
        return ModelEnds()

    def composed(self, arch: Architecture, report: "Callable[[BodyError], None]") -> dict[str, Any]:
        """Return what a plan stores about the block besides the settings, as JSON. report: called with the BodyError of
        an invalid block of a user's family."""
        return {}

    @classmethod
    def adapted_blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        """Return the blocks of all layers: the family's blocks, modules that predict further tokens, and on all of
        these the adapter of the architecture."""
        blocks = cls.blocks(attrs.evolve(arch, layers=arch.blocks) if arch.mtp else arch)
        if arch.mtp:
            ends = cls.ends(arch)
            blocks += (blocks[-1].further(plus_one=ends.norm_plus_one, scale=ends.norm_scale),) * arch.mtp
        return blocks if arch.adapter is None else _with_adapter(arch.adapter, blocks, arch.base)

    @classmethod
    def head_matrices(cls, arch: Architecture) -> tuple[AdaptedMatrix, ...]:
        """Return the matrices of the architecture's adapter on a vocabulary head."""
        adapter = arch.adapter if arch.has_logits else None
        if isinstance(adapter, TaskAdapters):
            of_tasks = ((task, planned(own, PlannedAdapter)) for task, own in adapter.tasks.items())
            own = ((task, matrix) for task, adapter in of_tasks for matrix in adapter.on_head(arch.base))
            return tuple(attrs.evolve(matrix, task=task) for task, matrix in own)
        return () if adapter is None else planned(adapter, PlannedAdapter).on_head(arch.base)


class PlannedAdapter(Adapter):
    """Base class of all adapters. `arch`, in its methods, is the architecture without adapter, unless they say
    otherwise."""

    def as_written(self, arch: Architecture) -> Adapter:
        """Return the equivalent adapter over the model as it was read or drawn, which is the form that PEFT reads."""
        return self

    def of_peft(self, folder: "PeftFolder", arch: Architecture) -> dict[str, tuple[Any, str]]:
        """Return the settings that a folder of PEFT contains, each with the key it was read from. Raises
        PeftUnreadable."""
        raise NotImplementedError

    def for_peft(self, matrices: Sequence[tuple[int | None, BlockParameter, tuple[str, ...]]]) -> Mapping[str, Any]:
        """Return the entries of `adapter_config.json`, without the names of matrices. matrices: (layer, matrix, module
        names in files) of each adapted matrix."""
        raise NotImplementedError

    def on(self, blocks: tuple[BlockPiece, ...], arch: Architecture) -> tuple[BlockPiece, ...]:
        """Return the decoder blocks of all layers with the adapter added."""
        raise NotImplementedError

    def on_head(self, arch: Architecture) -> tuple[AdaptedMatrix, ...]:
        """Return the adapter's matrices on a vocabulary head; the head is computed as the product of two factors."""
        return ()

    def unfit(self, arch: Architecture) -> tuple[str, str, str] | None:
        """Return (setting, what is wrong, what to do) if the adapter does not fit a model. arch: with the adapter."""
        return None

    def excess(self, arch: Architecture) -> tuple[str, str, str] | None:
        """Return (setting, what is wrong, what to do) if the adapter is larger than a model can use, which is harmless.
        arch: with the adapter."""
        return None


def _with_adapter(adapter: Adapter, blocks: tuple[BlockPiece, ...], arch: Architecture) -> tuple[BlockPiece, ...]:
    """Return blocks with an adapter, or with the adapters of several tasks. arch: without adapter."""
    if not isinstance(adapter, TaskAdapters):
        return planned(adapter, PlannedAdapter).on(blocks, arch)
    adapted = list(blocks)
    for task, of_task in adapter.tasks.items():
        for layer, own in enumerate(planned(of_task, PlannedAdapter).on(blocks, arch)):
            if own is not blocks[layer]:
                assert isinstance(own, AdaptedBlock)
                before = adapted[layer]
                matrices = before.matrices if isinstance(before, AdaptedBlock) else ()
                named = (attrs.evolve(matrix, task=task) for matrix in own.matrices)
                adapted[layer] = attrs.evolve(own, matrices=(*matrices, *named))
    return tuple(adapted)


def layer_windows(arch: Architecture) -> list[int | None]:
    """Return the attention window of each layer."""
    window, full = arch.own.get("window"), arch.own.get("full_layers", ())
    return [None if layer in full else window for layer in range(arch.layers)]


def layers_with_experts(arch: Architecture) -> list[bool]:
    """Return, for each layer of a family with the settings of `MixedTransformer`, whether its block has experts."""
    every, dense = arch.own.get("expert_every", 1), set(arch.own.get("dense_layers", ()))
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(arch.layers)]


def dense_then_experts(arch: Architecture, attention: BlockPiece) -> tuple[BlockPiece, ...]:
    """Return the blocks of a family with the settings of `GroupedExpertTransformer`."""
    own = arch.own
    experts = ExpertsLayer(
        "mlp",
        groups=own["expert_groups"],
        groups_per_token=own["groups_per_token"],
        scale=own["expert_scale"],
        choice_bias=True,
    )
    dense = pre_norm(attention, SwiGLULayer("mlp"))
    return tuple(dense if layer < own["first_dense"] else pre_norm(attention, experts) for layer in range(arch.layers))
