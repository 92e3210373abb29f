"""How blocks run, not what they compute: what they keep for the backward, in which pieces, and compiled or not."""

from collections.abc import Iterator
from itertools import chain

import torch
from attrs import frozen
from torch import nn

from xtrain.runtime.models.block import DecoderBlock
from xtrain.runtime.models.moe import MoE
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.recompute import SAVED, RecomputeFunction
from xtrain.runtime.models.tiled import TiledModule
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.parallel.rules import matching
from xtrain.runtime.state import Rank


@op("setup.activation")
def recompute_blocks(
    model: ModelParts,
    rank: Rank,
    mode: str,
    every: int,
    pattern: str,
    matches: list[int],
    save: list[str] | None = None,
) -> None:
    """Run blocks again in the backward: of every so many neighbours in the whole model the last one.

    mode: `full` keeps what a block is given, `selective` also the results of the operators named in `save`.
    matches: how many blocks that concerns. Raises PlanMismatch for another number of them, and for a mode or a word of
    `save` that this version does not know.
    """
    words = (save or []) if mode == "selective" else []
    unknown = [word for word in words if word not in SAVED]
    if mode not in ("full", "selective") or unknown:
        raise PlanMismatch(f"activation mode `{mode}` with save {unknown or words} is not known")
    operators = frozenset(chain.from_iterable(SAVED[word] for word in words))
    for _, block in matching(_Every(model, every), pattern, matches, rank):
        assert isinstance(block, DecoderBlock)
        block.recompute = RecomputeFunction(save=operators, routes=block.routes)


@frozen
class _Every:
    """The last one of every `number` neighbouring blocks, counted in the whole model."""

    model: ModelParts
    number: int

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            if isinstance(module, DecoderBlock) and (int(name.rsplit(".", 1)[1]) + 1) % self.number == 0:
                yield name, module


@op("setup.routing_replay")
def replay_routing(model: ModelParts, rank: Rank, matches: list[int]) -> None:
    """Let recomputed blocks take the experts they took in the forward. `matches`: how many blocks that concerns.

    Choosing again can choose otherwise, and ranks that disagree about who sends what to whom wait for ever.
    """
    found = [block for block in model.modules() if isinstance(block, DecoderBlock) and block.routes]
    recomputes = [block.recompute for block in found if isinstance(block.recompute, RecomputeFunction)]
    expected = matches[rank.coordinates["pp"]]
    if len(recomputes) != expected:
        raise PlanMismatch(f"{len(recomputes)} blocks with experts are recomputed, and the plan says {expected}")
    for recompute in recomputes:
        recompute.keep_choices = True


@op("setup.tile_mlp")
def tile_layers(model: ModelParts, rank: Rank, positions: int, pattern: str, matches: list[int]) -> None:
    """Let layers of blocks compute so many positions at a time. matches: how many blocks have such layers."""
    for _, block in matching(_Tiled(model), pattern, matches, rank):
        for module in block.children():
            if isinstance(module, TiledModule) and module.tiles:
                module.positions = positions


@frozen
class _Tiled:
    """Blocks with layers that can compute some positions at a time."""

    model: ModelParts

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            layers = module.children() if isinstance(module, DecoderBlock) else ()
            if any(isinstance(each, TiledModule) and each.tiles for each in layers):
                yield name, module


@op("setup.compile")
def compile_blocks(model: ModelParts, rank: Rank, mode: str, pattern: str, matches: list[int]) -> None:
    """Compile every block in place, so that no name changes; shapes are taken as fixed, which packed rows are.

    Where tokens go to experts no shape is fixed: of such a block everything but that is compiled, each part by itself.
    So is a block with layers that compute some positions at a time, of these layers what they do with a piece.
    """
    for _, block in matching(model, pattern, matches, rank):
        assert isinstance(block, DecoderBlock)
        if not block.routes and not block.tiled:
            if isinstance(block.recompute, RecomputeFunction):
                block.recompute.compiled = True
            block.compile(dynamic=False, mode=mode)
            continue
        for part in block.children():
            for module in (part.shared_experts, part.shared_expert) if isinstance(part, MoE) else (part,):
                if isinstance(module, TiledModule) and module.positions is not None:
                    module.of_piece = torch.compile(module.of_piece, dynamic=False, mode=mode)
                elif module is not None:
                    module.compile(dynamic=False, mode=mode)
