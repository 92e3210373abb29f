"""`ModelParts`: what a rank holds of the model, one part for each of its pipeline stages."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from attrs import evolve, frozen
from torch import Tensor, nn

from xtrain.dsl.schema.losses import further_metrics
from xtrain.runtime.models.layers import Linear
from xtrain.runtime.models.loss import Objective
from xtrain.runtime.models.moe import Experts
from xtrain.runtime.models.quantised import QuantisedMatrix
from xtrain.runtime.models.reward_losses import RewardTerm
from xtrain.runtime.models.transformer import Transformer
from xtrain.runtime.models.unit_losses import UnitTerm
from xtrain.runtime.parallel.axes import Axes


@frozen(eq=False)
class QuantisedParameter:
    """A parameter that a module has as bytes. name: in the whole model; key: in the module."""

    name: str
    module: nn.Module
    key: str
    matrix: QuantisedMatrix

    @property
    def parameter(self) -> nn.Parameter:
        """As FSDP may have put another in its place."""
        return self.module.get_parameter(self.key)


@frozen(eq=False)
class ModelParts:
    """Parts in the order of the pipeline; their parameters bear the names they have in the whole model.

    group: of parameters, for whose own optimizer they are; empty for that of the others.
    """

    parts: tuple[Transformer, ...]
    axes: Axes
    group: str = ""

    @property
    def whole(self) -> Transformer:
        """The model, where it is not cut into stages."""
        (model,) = self.parts
        return model

    @property
    def recorded(self) -> int:
        """How many sums of losses a microbatch leaves: of the cross-entropy, and of what is minimised and measured
        besides."""
        head = self.parts[0].head
        return 1 if head.term is None and not head.z_weight and not self.measured else 2 + len(self.measured)

    @property
    def measured(self) -> tuple[str, ...]:
        """What the loss measures beside itself, by name."""
        term = self.parts[0].head.term
        if further := self.parts[0].arch.mtp:
            return further_metrics(further)
        return () if term is None else term.metrics

    @property
    def measures_units(self) -> bool:
        """Whether that is measured of sequences or pairs, and not of tokens."""
        return isinstance(self.parts[0].head.term, UnitTerm | RewardTerm)

    @property
    def predicts(self) -> bool:
        """Whether its head gives logits, and so a cross-entropy; else one gives rewards."""
        return self.parts[0].arch.head == "vocabulary"

    def minimise(self, term: Objective) -> None:
        """Make `term` the loss of each token, or of each sequence or pair."""
        for part in self.parts:
            part.head = evolve(part.head, term=term)

    def with_adapter_of(self, task: str | None) -> AbstractContextManager[None]:
        """Meanwhile rows whose datasets are not told apart go through the adapter of a task, of several; None: through
        none."""
        return nullcontext() if self.axes.tasks is None else self.axes.tasks.all_of(task)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Meanwhile the model under the adapter, or all adapters, is computed alone."""
        self.axes.without_adapter = True
        try:
            with self.with_adapter_of(None):
                yield
        finally:
            self.axes.without_adapter = False

    def modules(self) -> Iterator[nn.Module]:
        for part in self.parts:
            yield from part.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for part in self.parts:
            yield from part.named_modules()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the parameters that have gradients, by name."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def quantised(self) -> Iterator[QuantisedParameter]:
        """Those of the parameters that are stored in blocks of codes."""
        for path, module in self.named_modules():
            if isinstance(module, Linear) and module.quantised is not None:
                yield QuantisedParameter(f"{path}.weight", module, "weight", module.quantised)
            elif isinstance(module, Experts):
                for key, matrix in module.quantised.items():
                    yield QuantisedParameter(f"{path}.{key}", module, key, matrix)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part.named_buffers()

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)
