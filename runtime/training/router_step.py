"""`step.router_bias`, and what the log says of routers.

Shapes: N layers of the whole model, E experts.
"""

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from xtrain.planner.plan import Plan
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.router import ExpertRouter
from xtrain.runtime.ops import op
from xtrain.runtime.state import Rank
from xtrain.runtime.step_state import Step, StepCall


class RouterCounts:
    """Counts of all routers of the model, of all ranks, since they were last taken."""

    def __init__(self, model: ModelParts, rank: Rank, layers: int, experts: int) -> None:
        self._rank = rank
        self._routers = routers(model)
        self._before = torch.zeros(layers, experts + 1, dtype=torch.float64, device=rank.device)
        self._begun = {layer: router.begun for layer, router in self._routers.items()}

    @torch.no_grad()
    def take(self) -> tuple[Tensor, Tensor]:
        """Loads [N, E] (assignments of real tokens) and sums of aux losses over rows [N]. Collective."""
        now = torch.zeros_like(self._before)
        for layer, router in self._routers.items():
            if router.begun != self._begun[layer]:
                self._begun[layer] = router.begun
                self._before[layer] = 0
            if router.loads_E is not None and router.aux is not None:
                now[layer, :-1], now[layer, -1] = router.loads_E, router.aux
        new, self._before = now - self._before, now
        if self._rank.world_size > 1:
            dist.all_reduce(new)
        return new[:, :-1], new[:, -1]


def routers(model: ModelParts) -> dict[int, ExpertRouter]:
    """The routers on this rank by number of their layer."""
    return {int(n.split(".")[1]): m for n, m in model.named_modules() if isinstance(m, ExpertRouter)}


@op("step.router_bias")
def balance(plan: Plan, model: ModelParts, rank: Rank, speed: float) -> StepCall:
    """Move the bias of every expert by `speed`, up if it got less than its share of the step's tokens, down if more.

    DeepSeek-V3 (arXiv 2412.19437) §2.1.2. Loads are whole numbers over all ranks, so all ranks move alike.
    """
    counts = RouterCounts(model, rank, plan.architecture.layers, plan.architecture.experts)
    found = routers(model)

    def run(step: Step) -> None:
        loads_NE, _ = counts.take()
        for layer, router in found.items():
            assert router.e_score_correction_bias is not None
            load_E = loads_NE[layer]
            router.e_score_correction_bias += speed * torch.sign(load_E.mean() - load_E)

    return run


@frozen(eq=False)
class RouterMetrics:
    """Numbers of a log line: `moe/aux_loss`, its mean over rows, layers with experts and the steps since the
    last line, and `moe/load/<layer>`, the share of assignments of every expert. layers: those with experts."""

    counts: RouterCounts | None
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan, model: ModelParts, rank: Rank) -> "RouterMetrics":
        """For a dense model too, of which there is nothing to say."""
        arch = plan.architecture
        counts = RouterCounts(model, rank, arch.layers, arch.experts) if arch.is_moe else None
        return cls(counts=counts, layers=arch.expert_layers)

    def take(self, rows: int) -> dict[str, float | list[float]]:
        """Collective. `rows`: those of the steps that have ended since the last line."""
        if self.counts is None:
            return {}
        loads_NE, aux_N = self.counts.take()
        shares_NE = loads_NE / loads_NE.sum(1, keepdim=True).clamp(min=1)
        *shares, (aux, *_) = torch.cat((shares_NE, aux_N.sum().expand(1, shares_NE.shape[1]))).tolist()
        taken = {"moe/aux_loss": aux / (len(self.layers) * max(1, rows))}
        return taken | {f"moe/load/{layer}": shares[layer] for layer in self.layers}
