"""Metrics of a run since the last record: losses of datasets, rates of computation, and balance of routers."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from xtrain.dsl.schema.data import BIAS_SPEED
from xtrain.plan.estimates import Work
from xtrain.plan.hardware import FP8, FP8_SPEED, product_format
from xtrain.plan.plan import Plan
from xtrain.runtime.base.device import peak_flops as peak_of_device
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.microbatch import DocumentSums
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.batch import RowLosses, Step, StepCall
from xtrain.runtime.nn.build import compute_format
from xtrain.runtime.nn.router import ExpertRouter, LayerLosses, RouterLosses
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import WAITS


@define
class CountedWork:
    """Work of some steps, summed over all ranks.

    valid_tokens: tokens with a label. positions: including padding. Others: see DocumentSums.
    """

    valid_tokens: int = 0
    positions: int = 0
    tokens: int = 0
    pairs: int = 0
    laid_pairs: int = 0

    def add(self, valid_tokens: int, positions: int, documents: DocumentSums) -> None:
        """Count one more step."""
        self.valid_tokens += valid_tokens
        self.positions += positions
        self.tokens += documents.tokens
        self.pairs += documents.pairs
        self.laid_pairs += documents.laid_pairs


@frozen(kw_only=True)
class Rates:
    """Throughput figures. work: of one model. devices: that compute it. peak: operations a second of all devices
    together, None if one is unknown; fp8_peak: the same in fp8, if used."""

    work: Work
    devices: int
    peak: float | None
    fp8_peak: float | None = None

    def of(self, counted: CountedWork, seconds: float) -> dict[str, float]:
        """Return figures by name for steps that took `seconds` together; shares only if `peak` is known."""
        if seconds <= 0:
            return {}
        model = self.model_flops(counted)
        rates = {
            "valid_tokens_per_second": counted.valid_tokens / seconds,
            "tflops": model / seconds / self.devices / 1e12,
        }
        if self.peak is not None:
            hardware = self.hardware_flops(counted)
            fp8, again = self.work.position_fp8, self.work.position_fp8_again
            rates["mfu"] = self._usual(model, fp8 * counted.tokens) / seconds / self.peak
            rates["mfu_causal"] = self._usual(self.causal_flops(counted), fp8 * counted.tokens) / seconds / self.peak
            rates["hfu"] = self._usual(hardware, (fp8 + again) * counted.positions) / seconds / self.peak
        return rates

    def _usual(self, flops: float, fp8: float) -> float:
        """Convert operations, `fp8` of them in fp8, to operations of the compute format that take as long at
        the peak."""
        return flops if self.peak is None or self.fp8_peak is None else flops - fp8 + fp8 * self.peak / self.fp8_peak

    def model_flops(self, counted: CountedWork) -> int:
        """Count as PaLM does (arXiv 2204.02311, appendix B): attention in full, without recomputation."""
        return self.work.position * counted.tokens + self.work.pair * counted.pairs

    def causal_flops(self, counted: CountedWork) -> float:
        """Count attention only to earlier positions and the own one."""
        return self.work.position * counted.tokens + self.work.pair * (counted.pairs + counted.tokens) / 2

    def hardware_flops(self, counted: CountedWork) -> int:
        """Count the operations that devices execute, as the plan does: padding, recomputation and full attention."""
        products = self.work.position + self.work.position_again
        attention = self.work.pair + self.work.pair_again
        return products * counted.positions + attention * counted.laid_pairs


# Rows of a dataset without a valid token before a warning.
UNLABELLED_ROWS: Final = 50


class DatasetLosses:
    """Cross-entropies and valid tokens of each dataset on this rank since the last `take`.

    The sums stay on the device; ranks exchange them only in `take`. A single dataset needs no sums: its loss is the
    run's.
    """

    def __init__(self, names: Sequence[str], rank: Rank) -> None:
        self._names, self._rank = tuple(names), rank
        # Datasets without a valid token since the start that were not warned about yet.
        self._unlabelled = dict.fromkeys(names) if len(names) > 1 else {}
        self._sums_2D: Tensor | None = None
        if len(names) > 1:
            self._sums_2D = torch.zeros(2, len(names), dtype=torch.float64, device=rank.device)
            self._numbers_D = torch.arange(len(names), device=rank.device)

    @torch.no_grad()
    def add(self, batches: Iterable[RowLosses]) -> None:
        """Add the rows of some microbatches; of tensor-parallel ranks only the first counts."""
        if self._sums_2D is None or not self._rank.is_tp_first:
            return
        for batch in batches:
            own_BD = batch.dataset_B[:, None] == self._numbers_D
            for sums_D, of_rows_B in zip(self._sums_2D, (batch.cross_entropy_B, batch.valid_B), strict=True):
                # Selected, not multiplied by 0: a NaN of one dataset must not reach the others.
                sums_D += torch.where(own_BD, of_rows_B[:, None], 0.0).sum(0)

    def clear(self) -> None:
        """Reset the sums."""
        if self._sums_2D is not None:
            self._sums_2D.zero_()

    def take(self) -> dict[str, float]:
        """Return `loss/NAME` in nats a token and `valid_tokens/NAME` over all ranks, without datasets that have no
        valid token. Collective if there are several datasets."""
        if self._sums_2D is None:
            return {}
        if self._rank.world_size > 1:
            dist.all_reduce(self._sums_2D)
        sums, tokens = self._sums_2D.tolist()
        self.clear()
        for name, count in zip(self._names, tokens, strict=True):
            if count:
                self._unlabelled.pop(name, None)
        seen = [(name, total, count) for name, total, count in zip(self._names, sums, tokens, strict=True) if count]
        metrics: dict[str, float] = {f"loss/{name}": total / count for name, total, count in seen}
        metrics |= {f"valid_tokens/{name}": int(count) for name, _, count in seen}
        return metrics

    def unlabelled(self, rows: dict[str, int]) -> list[str]:
        """Return datasets with many rows and no valid token, each once. rows: of each dataset since the start."""
        names = [name for name in self._unlabelled if rows.get(name, 0) >= UNLABELLED_ROWS]
        for name in names:
            del self._unlabelled[name]
        return names


@define
class Window:
    """Steps since the last log line. timed: the steps that times and `counted` cover, all but the first one of a start.
    comm_seconds: time that this rank waited for others; 0 if not measured."""

    losses: DatasetLosses
    rates: Rates
    sequence: int
    steps: int = 0
    rows: int = 0
    valid_tokens: int = 0
    timed: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    comm_seconds: float = 0.0
    counted: CountedWork = field(factory=CountedWork)
    node_seconds: dict[str, float] = field(factory=dict)
    logged: int | None = None
    """The step of the last record; None at the start and after a rollback."""

    def add(self, step: Step, now: float) -> None:
        self.steps += 1
        self.rows += step.rows
        self.valid_tokens += step.valid_tokens
        self.losses.add(step.row_losses)
        if step.warms_up:
            return
        self.timed += 1
        self.seconds += now - step.began
        self.data_seconds += step.data_seconds
        self.comm_seconds += WAITS.seconds - step.waited
        positions = step.documents.positions or step.rows * self.sequence
        self.counted.add(step.valid_tokens, positions, step.documents)

    def clear(self) -> None:
        self.steps = self.rows = self.valid_tokens = self.timed = 0
        self.seconds = self.data_seconds = self.comm_seconds = 0.0
        self.counted = CountedWork()
        for node in self.node_seconds:
            self.node_seconds[node] = 0.0
        self.losses.clear()
        self.logged = None


@op("setup.observe", gives="window", traced=False)
def observe(plan: Plan, rank: Rank, peak_flops: float | None) -> Window:
    """Start counting. peak_flops: of a device, from the spec; None: from its data sheet. Collective."""
    WAITS.begin(plan, rank)
    fp8 = None
    if peak_flops is None:
        product = product_format(compute_format(plan), plan.node("setup.bootstrap").args["matmul"])
        peak_flops = peak_of_device(rank.device, product)
        fp8 = peak_of_device(rank.device, FP8)
    else:
        fp8 = FP8_SPEED * peak_flops
    in_fp8 = plan.estimates.work.position_fp8 > 0
    return Window(
        losses=DatasetLosses(plan.node("setup.loader").args["datasets"], rank),
        rates=Rates(
            work=plan.estimates.work,
            devices=rank.world_size * rank.replicas,
            peak=_of_all(peak_flops, rank),
            fp8_peak=_of_all(fp8, rank) if in_fp8 else None,
        ),
        sequence=plan.node("setup.loader").args["sequence"],
    )


def _of_all(peak: float | None, rank: Rank) -> float | None:
    """Return the sum over the devices of all ranks, which may differ; None unless all are known. Collective."""
    if rank.world_size == 1:
        return None if peak is None else peak * rank.replicas
    sums = torch.tensor([peak or 0.0, float(peak is None)], dtype=torch.float64, device=rank.device)
    dist.all_reduce(sums)
    whole, unknown = sums.tolist()
    return None if unknown else whole * rank.replicas


class RouterCounts:
    """Counts of all routers of the model on all ranks, since the last `take`."""

    def __init__(self, model: ModelParts, rank: Rank, layers: int, experts: int) -> None:
        self._rank = rank
        self._routers = routers(model)
        self._before = torch.zeros(layers, experts + 1, dtype=torch.float64, device=rank.device)
        self._begun = {layer: router.begun for layer, router in self._routers.items()}

    @torch.no_grad()
    def take(self) -> tuple[Tensor, Tensor]:
        """Return loads [N, E] (assignments of real tokens) and sums of aux losses over rows [N]. Collective."""
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


def routers(model: ModelParts) -> dict[int, RouterLosses]:
    """Return this rank's routers by layer number."""
    return {int(n.split(".")[1]): m for n, m in model.named_modules() if isinstance(m, RouterLosses)}


@op("step.router_bias")
def balance(
    plan: Plan, model: ModelParts, rank: Rank, speed: float, feed: Feed | None = None, by_phase: bool = False
) -> StepCall:
    """Move the bias of every expert by `speed`: up if it got less than its share of the step's tokens, down if more.
    by_phase: phases may have other speeds.

    DeepSeek-V3 (arXiv 2412.19437) §2.1.2. Loads are whole numbers over all ranks, so all ranks move alike.
    """
    counts = RouterCounts(model, rank, plan.architecture.layers, plan.architecture.experts)
    router_of_layer = routers(model)

    def move_biases(step: Step) -> None:
        loads_NE, _ = counts.take()
        by = speed
        if by_phase:
            assert feed is not None
            by = feed.phase(step.index).router.get(BIAS_SPEED, speed)
        for layer, router in router_of_layer.items():
            assert isinstance(router, ExpertRouter) and router.e_score_correction_bias is not None
            load_E = loads_NE[layer]
            router.e_score_correction_bias += by * torch.sign(load_E.mean() - load_E)

    return move_biases


@frozen(eq=False)
class RouterMetrics:
    """Router metrics of a log line: `moe/aux_loss`, the mean over rows, expert layers and the steps since the last
    line, and `moe/load/<layer>`, the share of assignments of every expert. layers: those with experts."""

    counts: RouterCounts | None
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan, model: ModelParts, rank: Rank) -> "RouterMetrics":
        """Create metrics of a model; empty for a dense one."""
        arch = plan.architecture
        counts = RouterCounts(model, rank, arch.layers, arch.experts) if arch.is_moe else None
        return cls(counts=counts, layers=arch.expert_layers)

    def take(self, rows: int) -> dict[str, float | list[float]]:
        """Return the metrics and reset the counts. Collective. rows: of the steps since the last line."""
        if self.counts is None:
            return {}
        loads_NE, aux_N = self.counts.take()
        shares_NE = loads_NE / loads_NE.sum(1, keepdim=True).clamp(min=1)
        *shares, (aux, *_) = torch.cat((shares_NE, aux_N.sum().expand(1, shares_NE.shape[1]))).tolist()
        taken = {"moe/aux_loss": aux / (len(self.layers) * max(1, rows))}
        return taken | {f"moe/load/{layer}": shares[layer] for layer in self.layers}


@frozen(eq=False)
class IndexerMetrics:
    """`indexer/loss` of a log line: the loss of indexers, mean over rows, blocks with a learning indexer and the steps
    since the last line. count: of these blocks. indexers: of this rank."""

    rank: Rank
    count: int
    indexers: tuple[LayerLosses, ...]
    before: dict[LayerLosses, tuple[int, float]] = field(factory=dict)

    @classmethod
    def of(cls, plan: Plan, model: ModelParts, rank: Rank) -> "IndexerMetrics":
        """Create metrics of a model."""
        count = plan.architecture.learning_indexers
        each = (m for m in model.modules() if isinstance(m, LayerLosses) and not isinstance(m, RouterLosses))
        return cls(rank, count, tuple(each) if count else ())

    def take(self, rows: int) -> dict[str, float]:
        """Return the metric and reset the counts. Collective. rows: of the steps since the last line."""
        if not self.count:
            return {}
        new = torch.zeros((), dtype=torch.float64, device=self.rank.device)
        for indexer in self.indexers:
            begun, known = self.before.get(indexer, (indexer.begun, 0.0))
            now = 0.0 if indexer.aux is None else indexer.aux.item()
            new += now - (known if begun == indexer.begun else 0.0)
            self.before[indexer] = (indexer.begun, now)
        if self.rank.world_size > 1:
            dist.all_reduce(new)
        return {"indexer/loss": new.item() / (self.count * max(1, rows))}
