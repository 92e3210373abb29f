"""`adapter lora { … }`: low-rank adaptation (Hu et al. 2021, arXiv 2106.09685)."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import evolve, frozen

from ...dsl.evaluation.values import is_number
from ...dsl.schema.adapters import ADAPTERS, Adapter, begun_from, trained_in_full
from ...dsl.schema.component import named
from ...dsl.schema.model import Resuming
from ...dsl.schema.setting import AUTO, Auto, at_least, positive, setting
from ...planner.architecture import Architecture, BlockParameter
from ...planner.blocks.adapted import AdaptedBlock, AdaptedMatrix
from ...planner.blocks.block import BlockPiece
from ...planner.costs.op_trace import TracedTensor
from ...planner.model.frozen import fits_part
from ...planner.model.peft import PeftFolder, PeftMatrix, PeftUnreadable
from ...planner.model.targets import ALL_LINEAR, all_matrices, is_target, matrices_of, patterns_of, targets_of

if TYPE_CHECKING:
    from ...planner.costs.block_trace import Tracer


@ADAPTERS.register()
@frozen
class Lora(Adapter):
    """`adapter lora { … }`: to the product of a matrix W and x, s · B · A · x is added, and A and B alone are trained.

    A is [rank, inputs] and B [outputs, rank]; s is alpha / rank.
    """

    kind: str = named("lora")
    rank: int = setting("rows of A and columns of B", default=16, check=at_least(1))
    alpha: float | Auto = setting(
        "s is alpha / rank, or alpha / √rank where scaling is rslora; auto: the rank",
        default=AUTO,
        check=positive,
        example="32",
    )
    scaling: Literal["standard", "rslora"] = setting(
        "what alpha is divided by. standard: the rank; rslora: its square root (arXiv 2312.03732)", default="standard"
    )
    targets: tuple[str, ...] = setting(
        "matrices that have one, by parts of their names in the plan: `*` is any text inside a part, `0-3` the numbers "
        "0 to 3; all_linear: all matrices of attention and feed-forward layers. Those of routed experts have one only "
        "where `experts` is among the parts",
        default=(ALL_LINEAR,),
        example='["q_proj", "v_proj", "mlp.experts"]',
    )
    layers: tuple[str, ...] = setting(
        "blocks whose matrices have one: `0-3` is the numbers 0 to 3; none are named: all",
        default=(),
        example='["16-31"]',
    )
    ranks: dict[str, int] = setting(
        "other ranks, by names of matrices as in `targets`; the first that means a matrix holds for it",
        default={},
        check=at_least(1),
        example='{ v_proj: 8, "layers.0-3.mlp": 32 }',
    )
    alphas: dict[str, float] = setting(
        "other values of alpha, in the same way", default={}, check=positive, example="{ v_proj: 16 }"
    )
    init: Literal["default", "gaussian", "orthogonal"] = setting(
        "first values. default: of A uniform within ± 1 / √inputs, B is zero; gaussian: of A normal with deviation 1 / "
        "rank, B is zero; orthogonal: neither is zero, and their product is, each being made of one half of a random "
        "basis",
        default="default",
    )
    train: tuple[str, ...] = trained_in_full()
    from_: str | None = begun_from()

    resuming: ClassVar[Mapping[str, Resuming]] = {
        **dict.fromkeys(("rank", "ranks", "targets", "layers"), "shape"),
        **dict.fromkeys(("alpha", "alphas"), "meaning"),
        "scaling": "meaning",
        "init": "elsewhere",
        "train": "elsewhere",
    }

    def auto(self) -> dict[str, tuple[Any, str]]:
        return {"alpha": (float(self.rank), f"rank {self.rank}")}

    peft_keys = frozenset({"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"})
    free = frozenset({"init"})

    def of_peft(self, folder: PeftFolder, arch: Architecture) -> dict[str, tuple[Any, str]]:
        for key in ("r", "lora_alpha"):
            self._positive(folder, key, folder.config.get(key, 8))
        for key in ("rank_pattern", "alpha_pattern"):
            patterns = folder.config.get(key, {})
            if not isinstance(patterns, dict):
                message = f"`{key}` is {json.dumps(patterns)} in {folder.place(key)}"
                raise PeftUnreadable("X522", message, "it must be an object with a number for each pattern")
            for pattern, value in patterns.items():
                self._positive(folder, key, value)
                try:
                    re.compile(pattern)
                except re.error as error:
                    message = f"`{pattern}` is no pattern in `{key}` of {folder.place(key)}: {error}"
                    raise PeftUnreadable("X522", message, "it must be a regular expression") from error
        ranks = {matrix.parameter: matrix.rank for matrix in folder.matrices}
        alphas = {matrix.parameter: self._alpha(folder, matrix) for matrix in folder.matrices}
        rank, other_ranks = _by_name(arch, ranks, folder.config.get("r", 8))
        alpha, other_alphas = _by_name(arch, alphas, float(folder.config.get("lora_alpha", 8)))
        return {
            "rank": (rank, "r"),
            "ranks": (other_ranks, "rank_pattern"),
            "alpha": (alpha, "lora_alpha"),
            "alphas": (other_alphas, "alpha_pattern"),
            "scaling": ("rslora" if folder.config.get("use_rslora") else "standard", "use_rslora"),
            "targets": (targets_of(arch, {matrix.parameter for matrix in folder.matrices}), "target_modules"),
            "train": (folder.full, "modules_to_save"),
        }

    @staticmethod
    def _positive(folder: PeftFolder, key: str, value: Any) -> None:
        if not is_number(value) or value <= 0:
            message = f"`{key}` is {json.dumps(value)} in {folder.place(key)}"
            raise PeftUnreadable("X522", message, "it must be a number above 0")

    @staticmethod
    def _alpha(folder: PeftFolder, matrix: PeftMatrix) -> float:
        own = {folder.pattern("alpha_pattern", module) for module in matrix.modules}
        if len(own) > 1:
            message = f"experts of {matrix.parameter} have different alphas in {folder.place('alpha_pattern')}"
            raise PeftUnreadable("X522", message, "give all experts of a layer the same")
        found = own.pop()
        return float(folder.config.get("lora_alpha", 8) if found is None else found)

    def for_peft(self, matrices: Sequence[tuple[int, BlockParameter, tuple[str, ...]]]) -> dict[str, Any]:
        assert not isinstance(self.alpha, Auto)
        own = {module: self._values(layer, matrix) for layer, matrix, modules in matrices for module in modules}
        # PEFT reads no pattern of routed experts: what they have holds where no pattern says otherwise.
        usual = next((self._values(layer, matrix) for layer, matrix, _ in matrices if matrix.expert), None)
        rank, alpha = usual or (self.rank, self.alpha)
        return {
            "r": rank,
            "rank_pattern": _patterns({module: each for module, (each, _) in own.items()}, rank),
            "lora_alpha": _plain(alpha),
            "alpha_pattern": _patterns({module: _plain(each) for module, (_, each) in own.items()}, _plain(alpha)),
            "lora_dropout": 0.0,
            "use_dora": False,
            "use_rslora": self.scaling == "rslora",
        }

    def unfit(self, arch: Architecture) -> tuple[str, str, str] | None:
        for name in self.layers:
            if not any(fits_part(name, str(layer)) for layer in range(arch.layers)):
                message = f"the model has no block `{name}`: the {arch.layers} blocks are 0 to {arch.layers - 1}"
                return "layers", message, "name blocks that there are"
        matrices = [(layer, matrix) for layer, matrix in all_matrices(arch) if self._means(layer, matrix)]
        if not matrices:
            return "layers", "no matrix that targets name is in these blocks", "name others, or leave layers out"
        odd = [rank for rank in (self.rank, *self.ranks.values()) if rank % 2]
        if self.init == "orthogonal" and odd:
            message = f"A and B have half a basis each where init is orthogonal, and rank {odd[0]} is odd"
            return "init", message, f"use rank {odd[0] + 1}, or another init"
        for own, patterns in (("ranks", self.ranks), ("alphas", self.alphas)):
            for name in patterns:
                if not any(is_target(name, layer, matrix) for layer, matrix in matrices):
                    return own, f"no matrix with an adapter is meant by `{name}`", "name matrices as targets do"
        return None

    def _means(self, layer: int, matrix: BlockParameter) -> bool:
        inside = not self.layers or any(fits_part(each, str(layer)) for each in self.layers)
        return inside and any(is_target(each, layer, matrix) for each in self.targets)

    def args(self) -> dict[str, Any]:
        return {"init": self.init}

    def does(self) -> str:
        if self.init == "orthogonal":
            return "draw A and B of every adapter, whose product is zero, from the names of matrices and the seed"
        values = "uniform by its inputs" if self.init == "default" else "normal with deviation 1 / rank"
        return f"draw A of every adapter, {values}, each from its name and the seed; B is zero"

    def on(self, blocks: tuple[BlockPiece, ...], arch: Architecture) -> tuple[BlockPiece, ...]:
        return tuple(self._on(block, layer, arch) for layer, block in enumerate(blocks))

    def _on(self, block: BlockPiece, layer: int, arch: Architecture) -> BlockPiece:
        found = tuple(self._of(layer, matrix) for matrix in matrices_of(block, arch) if self._means(layer, matrix))
        return AdaptedBlock((block,), found) if found else block

    def _values(self, layer: int, matrix: BlockParameter) -> tuple[int, float]:
        """(rank, alpha) of a matrix."""

        def first(patterns: Mapping[str, Any], usual: Any) -> Any:
            return next((each for name, each in patterns.items() if is_target(name, layer, matrix)), usual)

        return first(self.ranks, self.rank), first(self.alphas, self.alpha)

    def _of(self, layer: int, matrix: BlockParameter) -> "LoraMatrix":
        rank, alpha = self._values(layer, matrix)
        return LoraMatrix(matrix.name, rank, alpha / (sqrt(rank) if self.scaling == "rslora" else rank))


def _by_name(arch: Architecture, values: Mapping[str, Any], usual: Any) -> tuple[Any, dict[str, Any]]:
    """The value that most matrices have, the usual one if any has it, and those of the others by their names."""
    if usual not in values.values():
        usual = Counter(values.values()).most_common(1)[0][0]
    others: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != usual:
            names = {name for name, each in values.items() if each == value}
            others |= dict.fromkeys(patterns_of(arch, names), value)
    return usual, others


def _patterns(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """PEFT's patterns of the values that modules have instead of the usual one: by the last part of their names where
    all that end so have the same."""
    last: dict[str, set[Any]] = {}
    for module, value in values.items():
        last.setdefault(module.rpartition(".")[2], set()).add(value)
    found: dict[str, Any] = {}
    for module, value in values.items():
        if value != usual:
            end = module.rpartition(".")[2]
            found[end if len(last[end]) == 1 else re.escape(module)] = value
    return found


def _plain(number: float) -> float:
    """A whole number as an integer."""
    return int(number) if number == int(number) else number


@frozen
class LoraMatrix(AdaptedMatrix):
    """A and B beside a matrix of a block."""

    rank: int
    scale: float

    def factors(self) -> tuple[str, str]:
        """The names of A and B inside the block."""
        if not self.name.endswith(".weight"):  # of routed experts, whose module has the parameters of all
            return f"{self.name}_lora_A", f"{self.name}_lora_B"
        module = self.name.removesuffix(".weight")
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    def parameters(self, matrix: BlockParameter) -> Iterator[BlockParameter]:
        """Where a matrix is cut by output, so is B, and every rank has used all of A for its own outputs; where it is
        cut by input, so is A, and all of B is multiplied by its own sums. Of routed experts there is a pair for each,
        [E, inputs, R] and [E, R, outputs]."""
        column, row = matrix.cut == "column", matrix.cut == "row"
        if matrix.expert:
            experts, inputs, outputs = matrix.shape
            shapes = (experts, inputs, self.rank), (experts, self.rank, outputs)
        else:
            outputs, inputs = matrix.shape
            shapes = (self.rank, inputs), (outputs, self.rank)
        a, b = (
            BlockParameter(
                name=name, shape=shape, decays=True, initial="zeros", expert=matrix.expert, adapter=self.name
            )
            for name, shape in zip(self.factors(), shapes, strict=True)
        )
        yield evolve(a, cut="row" if row else None, partial="always" if column else "never" if row else matrix.partial)
        yield evolve(
            b, cut="column" if column else None, partial="always" if row else "never" if column else matrix.partial
        )

    def trace(
        self,
        on: "Tracer",
        x: TracedTensor,
        out: TracedTensor,
        tokens: int,
        *,
        parts: int = 1,
        added: int | None = None,
    ) -> TracedTensor:
        a, b = self.factors()
        numbers = [prod(on.shapes[name]) for name in (a, b)]
        if len(on.shapes[a]) > 2:  # a token is multiplied by those of one expert
            numbers = [each // on.shapes[a][0] for each in numbers]
        low = on.ops.linear(
            x,
            tokens * self.rank * on.local.width // parts,
            weight=on.bytes_of(a) // parts,
            flops=2 * tokens * numbers[0] // parts,
            parameters=(a,),
            added=added,
        )
        if self.scale != 1:
            low = on.ops.op(low, makes=low.size)
        more = on.ops.linear(
            low,
            out.size,
            weight=on.bytes_of(b) // parts,
            flops=2 * tokens * numbers[1] // parts,
            parameters=(b,),
            added=added,
        )
        return on.ops.add(out, more)
