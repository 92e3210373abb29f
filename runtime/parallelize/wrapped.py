"""`WrappedModel`: how a step of training calls the model, under any execution stack."""

from collections.abc import Callable

from attrs import frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.parts import ModelParts


@frozen
class WrappedModel:
    """forward: the objective of a microbatch, by (None, batch), whose backward gives gradients; it calls the model that
    it wraps, hooks of modules included. sync_gradients: sum them over ranks in the coming backward, or only add them up
    on this rank. backward: of what was made of the objective. gradients: where they are not those of the parameters,
    what this rank alone has of them, summed over ranks. optimizer: what updates the parameters, where the stack wraps
    that too."""

    forward: Callable[[None, ModelBatch], Tensor]
    sync_gradients: Callable[[bool], None]
    backward: Callable[[Tensor], None] = Tensor.backward
    gradients: Callable[[], list[Tensor]] | None = None
    optimizer: Optimizer | None = None

    @classmethod
    def of(cls, model: ModelParts) -> "WrappedModel":
        """A model that nothing wraps: where gradients are summed, its units of FSDP do that themselves."""
        whole = model.whole

        def sync_gradients(on: bool) -> None:
            if isinstance(whole, FSDPModule):
                whole.set_requires_gradient_sync(on)

        return cls(forward=whole, sync_gradients=sync_gradients)
