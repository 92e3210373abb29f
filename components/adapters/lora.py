"""`adapter lora { … }`: low-rank adaptation (Hu et al. 2021, arXiv 2106.09685)."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve

from xtrain.blocks.adapted import AdaptedBlock
from xtrain.blocks.block import BlockPiece
from xtrain.components.adapters._lora_matrix import LoraMatrix
from xtrain.components.adapters._lora_peft import by_name, peft_values, settings_of_peft
from xtrain.contracts.models import PlannedAdapter
from xtrain.dsl.schema.adapters import ADAPTERS, begun_from, trained_in_full
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.setting import AUTO, Auto, Range, at_least, positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter
from xtrain.plan.parameters import (
    ALL_LINEAR,
    all_matrices,
    blocks_beyond,
    fits_part,
    is_target,
    matrices_of,
    name_of,
)
from xtrain.plan.peft import PeftFolder

if TYPE_CHECKING:
    pass


@ADAPTERS.register()
@frozen
class Lora(PlannedAdapter):
    """`adapter lora { … }`: adds s · B · A · x to the product of a matrix W and x, and trains only A and B.

    A is [rank, inputs] and B [outputs, rank]; s is alpha / rank.
    """

    kind: str = named("lora")
    rank: int = setting("rank: number of rows of A and columns of B", default=16, check=at_least(1), resuming="shape")
    alpha: float | Auto = setting(
        "s is alpha / rank, or alpha / √rank where scaling is rslora; auto: the rank",
        default=AUTO,
        check=positive,
        example="32",
        resuming="meaning",
    )
    scaling: Literal["standard", "rslora"] = setting(
        "divisor of alpha. standard: the rank; rslora: its square root (arXiv 2312.03732)",
        default="standard",
        resuming="meaning",
    )
    targets: tuple[str, ...] = setting(
        "matrices with an adapter, by parts of their names in the plan: `*` is any text inside a part, `0-3` the "
        "numbers 0 to 3; all_linear: all matrices of attention and feed-forward layers. Matrices of routed experts "
        "are included only if `experts` is among the parts, and the head only if `lm_head` is a target",
        default=(ALL_LINEAR,),
        example='["q_proj", "v_proj", "mlp.experts"]',
        resuming="shape",
    )
    layers: tuple[str, ...] = setting(
        "blocks whose matrices have an adapter: `0-3` is the numbers 0 to 3; empty: all blocks",
        default=(),
        example='["16-31"]',
        resuming="shape",
    )
    ranks: dict[str, int] = setting(
        "ranks other than `rank`, by names of matrices as in `targets`; the first name that matches a matrix applies",
        default={},
        check=at_least(1),
        example='{ v_proj: 8, "layers.0-3.mlp": 32 }',
        resuming="shape",
    )
    alphas: dict[str, float] = setting(
        "values other than `alpha`, in the same way",
        default={},
        check=positive,
        example="{ v_proj: 16 }",
        resuming="meaning",
    )
    init: Literal["default", "gaussian", "orthogonal", "pissa"] = setting(
        "initial values. default: A uniform within ± 1 / √inputs, B zero; gaussian: A normal with standard deviation "
        "1 / rank, B zero; orthogonal: A and B from the two halves of a random basis, so that their product is zero; "
        "pissa: s · B · A is the part of W with the largest singular values, and W becomes the rest (arXiv 2404.02948)",
        default="default",
        resuming="elsewhere",
    )
    dropout: float = setting(
        "dropout of the inputs of A in training; W gets the inputs without dropout, and with dora also after dropout",
        default=0.0,
        check=Range(low=0, below=1),
        added=True,
        example="0.05",
        resuming="elsewhere",
    )
    dora: bool = setting(
        "scale the rows of W + s · B · A to trained magnitudes, which start as the norms of the rows of W (Liu et al. "
        "2024, arXiv 2402.09353)",
        default=False,
        added=True,
        resuming="shape",
    )
    train: tuple[str, ...] = trained_in_full()
    from_: str | None = begun_from()

    def auto(self) -> dict[str, tuple[Any, str]]:
        return {"alpha": (float(self.rank), f"rank {self.rank}")}

    @property
    def largest(self) -> int:
        return max((self.rank, *self.ranks.values()))

    def of_rank(self, rank: int) -> "Lora":
        return evolve(self, rank=rank)

    peft_keys = frozenset(
        {"r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"}
    )
    free = frozenset({"init", "dropout"})

    def of_peft(self, folder: PeftFolder, arch: Architecture) -> dict[str, tuple[Any, str]]:
        return settings_of_peft(folder, arch)

    def for_peft(self, matrices: Sequence[tuple[int | None, BlockParameter, tuple[str, ...]]]) -> dict[str, Any]:
        alpha = self.alpha
        assert not isinstance(alpha, Auto)
        own = {module: self._values(layer, matrix) for layer, matrix, modules in matrices for module in modules}
        # PEFT reads no patterns for routed experts: their values are the defaults, for which patterns give exceptions.
        usual = next((self._values(layer, matrix) for layer, matrix, _ in matrices if matrix.expert), None)
        return {
            **peft_values(own, usual or (self.rank, alpha)),
            "lora_dropout": self.dropout if usual is None else 0.0,  # PEFT has no dropout for routed experts
            "use_dora": self.dora,
            "use_rslora": self.scaling == "rslora",
        }

    def unfit(self, arch: Architecture) -> tuple[str, str, str] | None:
        for number, name in enumerate(self.layers):
            if not any(fits_part(name, str(layer)) for layer in range(arch.layers)):
                message = f"the model has no block `{name}`: the {arch.layers} blocks are 0 to {arch.layers - 1}"
                return f"layers.{number}", message, "name existing blocks"
        matrices = [(layer, matrix) for layer, matrix in all_matrices(arch) if self._means(layer, matrix)]
        if not matrices:
            return "layers", "no matrix of `targets` is in these blocks", "name others, or leave layers out"
        if any(layer is None for layer, _ in matrices) and (unfit := self._unfit_for_head()) is not None:
            return unfit
        wide = [
            (min(matrix.shape[-2:]), rank, layer, matrix)
            for layer, matrix in matrices
            if self.decomposes and (rank := self._values(layer, matrix)[0]) > min(matrix.shape[-2:])
        ]
        if wide:
            most, rank, layer, matrix = min(wide, key=lambda each: each[0])
            name = name_of(layer, matrix.name.removesuffix(".weight"))
            message = f"{name} of {matrix.shape[-2]} × {matrix.shape[-1]} has {most} singular values, and rank {rank}"
            return "init", f"{message} takes more", f"use rank {most} or less, or another init"
        odd = [rank for rank in (self.rank, *self.ranks.values()) if rank % 2]
        if self.init == "orthogonal" and odd:
            message = f"init orthogonal gives A and B half a basis each, and rank {odd[0]} is odd"
            return "init", message, f"use rank {odd[0] + 1}, or another init"
        for own, patterns in (("ranks", self.ranks), ("alphas", self.alphas)):
            for name in patterns:
                if not any(is_target(name, layer, matrix) for layer, matrix in matrices):
                    message = f"`{name}` matches no matrix with an adapter"
                    return f"{own}.{name}.name", message, "write a name as in `targets`"
        return None

    def _unfit_for_head(self) -> tuple[str, str, str] | None:
        """Return the problem of an adapter of the head. The head computes logits in pieces, from products with W, A and
        B."""
        for name, chosen in (("dora", self.dora), ("dropout", self.dropout), ("init", self.decomposes)):
            if chosen:
                what = "pissa" if name == "init" else name
                return name, f"an adapter of the head has no {what}", "leave it out, or the head out of targets"
        return None

    def excess(self, arch: Architecture) -> tuple[str, str, str] | None:
        for number, name in enumerate(self.layers):
            if (beyond := blocks_beyond(name, arch)) is not None:
                return f"layers.{number}", *beyond
        for layer, matrix in all_matrices(arch):
            most = min(matrix.shape[-2:])
            if self._means(layer, matrix) and (rank := self._values(layer, matrix)[0]) > most:
                own = next((f"ranks.{name}" for name in self.ranks if is_target(name, layer, matrix)), "rank")
                name = name_of(layer, matrix.name.removesuffix(".weight"))
                message = f"rank {rank} is more than {name} of {matrix.shape[-2]} × {matrix.shape[-1]} can have"
                return own, message, f"use rank {most} or less, or train the matrix in full"
        return None

    def unfit_for_folder(self) -> tuple[str, str, str] | None:
        if self.decomposes:
            message = "the adapter in `from` belongs to the whole model, and pissa takes a part out of it"
            return "init", message, "leave init out"
        return None

    def unfit_for_slot(self) -> tuple[str, str, str] | None:
        if self.dora:
            return "dora", "a client's adapter has no magnitudes", "leave it out"
        return self.unfit_for_task()

    def unfit_for_task(self) -> tuple[str, str, str] | None:
        if self.dropout:
            message = "dropout depends on row numbers, which differ from a run with this task alone"
            return "dropout", message, "leave it out"
        if self.decomposes:
            message = "each task would leave a different rest of the model's matrices"
            return "init", message, "use another init"
        return None

    def as_written(self, arch: Architecture) -> "Lora":
        """Return the settings of the exported adapter. The rank is doubled if A and B started from a part of the model,
        to hold their difference from it. PEFT with transformers 5 keeps gate and up of experts in one matrix, reads
        no patterns for them, and uses the root of their joint rank for `rslora`: all experts need one rank and one
        scale, with `standard` scaling."""
        own = {
            (layer, matrix.name): self._of(layer, matrix)
            for layer, matrix in all_matrices(arch)
            if self._means(layer, matrix)
        }
        experts = [each for (layer, name), each in own.items() if not name.endswith(".weight")]
        alike = len({(each.rank, each.scale) for each in experts}) < 2 and (self.scaling == "standard" or not experts)
        if alike and not self.decomposes:
            return self
        scaling = "standard" if experts else self.scaling
        times = 2 if self.decomposes else 1
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        for (layer, name), each in own.items():
            rank, scale = times * each.rank, each.scale
            if each in experts:
                rank, scale = times * max(expert.rank for expert in experts), experts[0].scale
            ranks[name_of(layer, name)] = rank
            alphas[name_of(layer, name)] = scale * (sqrt(rank) if scaling == "rslora" else rank)
        rank, other_ranks = by_name(arch, ranks, times * self.rank)
        alpha, other_alphas = by_name(arch, alphas, None)
        return evolve(
            self, init="default", scaling=scaling, rank=rank, ranks=other_ranks, alpha=alpha, alphas=other_alphas
        )

    def _means(self, layer: int | None, matrix: BlockParameter) -> bool:
        inside = layer is None or not self.layers or any(fits_part(each, str(layer)) for each in self.layers)
        return inside and any(is_target(each, layer, matrix) for each in self.targets)

    @property
    def drops(self) -> float:
        return self.dropout

    @property
    def decomposes(self) -> bool:
        return self.init == "pissa"

    @property
    def begins_again(self) -> bool:
        return not self.dora and not self.decomposes

    def args(self) -> dict[str, Any]:
        return {"init": self.init}

    def title(self) -> str:
        ranks = sorted({self.rank, *self.ranks.values()})
        name = f"{'rs' if self.scaling == 'rslora' else ''}{'DoRA' if self.dora else 'LoRA'}"
        return f"{name} of rank {ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''}, alpha {self.alpha:g}"

    def does(self) -> str:
        magnitudes = "; magnitudes are the norms of the rows of W" if self.dora else ""
        if self.decomposes:
            does = "decompose every adapted matrix, W = U · S · Vᵀ, distributed over ranks: from the largest singular "
            return f"{does}values, A starts as √(S / s) · Vᵀ and B as U · √(S / s){magnitudes}"
        if self.init == "orthogonal":
            does = "initialize A and B of every adapter with product zero, from the names of matrices and the seed"
            return does + magnitudes
        values = "uniform by its inputs" if self.init == "default" else "normal with standard deviation 1 / rank"
        return f"initialize A of every adapter, {values}, each from its name and the seed; B is zero{magnitudes}"

    def on(self, blocks: tuple[BlockPiece, ...], arch: Architecture) -> tuple[BlockPiece, ...]:
        return tuple(self._on(block, layer, arch) for layer, block in enumerate(blocks))

    def _on(self, block: BlockPiece, layer: int, arch: Architecture) -> BlockPiece:
        found = tuple(self._of(layer, matrix) for matrix in matrices_of(block, arch) if self._means(layer, matrix))
        return AdaptedBlock((block,), found) if found else block

    def on_head(self, arch: Architecture) -> tuple["LoraMatrix", ...]:
        head = arch.head_parameter
        return (self._of(None, head),) if self._means(None, head) else ()

    def _values(self, layer: int | None, matrix: BlockParameter) -> tuple[int, float]:
        """Return (rank, alpha) of a matrix."""

        def first(patterns: Mapping[str, Any], usual: Any) -> Any:
            return next((each for name, each in patterns.items() if is_target(name, layer, matrix)), usual)

        return first(self.ranks, self.rank), first(self.alphas, self.alpha)

    def _of(self, layer: int | None, matrix: BlockParameter) -> "LoraMatrix":
        rank, alpha = self._values(layer, matrix)
        scale = alpha / (sqrt(rank) if self.scaling == "rslora" else rank)
        return LoraMatrix(
            matrix.name,
            rank,
            scale,
            dora=self.dora,
            drops=self.dropout > 0,
            by_input=matrix.cut == "row",
            pissa=self.decomposes,
            turned=matrix.turned,
        )
