"""How fast a run computes: three shares of what its devices could do at best, and what they are made of.

All three count a multiplication and an addition as two operations, forward and backward, on all ranks together:

| share        | products with weights             | attention                                       |
| ------------ | --------------------------------- | ----------------------------------------------- |
| `mfu`        | of every token of a document      | Σ s² over documents of s tokens                 |
| `mfu_causal` | the same                          | Σ s (s + 1) / 2: what a causal mask leaves      |
| `hfu`        | of every position, also padding,  | Σ l² over segments of l positions, padding too, |
|              | and those that are done again     | and what is done again                          |

Of attention with a window of w positions, squares count only pairs of positions less than w apart.
"""

from attrs import define, frozen

from xtrain.planner.plan import Work
from xtrain.runtime.data.collate.documents import DocumentSums


@define
class CountedWork:
    """What some steps were computed of, on all ranks together.

    valid_tokens: those that were learned from. positions: all of them, padding included. Else as in DocumentSums.
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
    """work: of one model. devices: how many compute it. peak: operations a second that all of them could do together,
    None where that is not known of each; fp8_peak: the same of those in fp8, where there are some."""

    work: Work
    devices: int
    peak: float | None
    fp8_peak: float | None = None

    def of(self, counted: CountedWork, seconds: float) -> dict[str, float]:
        """The figures of a record by name, of steps that took `seconds` together; shares only where `peak` is known."""
        if seconds <= 0:
            return {}
        model = self.model_flops(counted)
        found = {
            "valid_tokens_per_second": counted.valid_tokens / seconds,
            "tflops": model / seconds / self.devices / 1e12,
        }
        if self.peak is not None:
            hardware = self.hardware_flops(counted)
            fp8, again = self.work.position_fp8, self.work.position_fp8_again
            found["mfu"] = self._usual(model, fp8 * counted.tokens) / seconds / self.peak
            found["mfu_causal"] = self._usual(self.causal_flops(counted), fp8 * counted.tokens) / seconds / self.peak
            found["hfu"] = self._usual(hardware, (fp8 + again) * counted.positions) / seconds / self.peak
        return found

    def _usual(self, flops: float, fp8: float) -> float:
        """Operations, so many of them in fp8, as those of the compute format that take as long at the peak."""
        return flops if self.peak is None or self.fp8_peak is None else flops - fp8 + fp8 * self.peak / self.fp8_peak

    def model_flops(self, counted: CountedWork) -> int:
        """As PaLM counts (arXiv 2204.02311, appendix B): nothing off for causality, nothing for recomputation."""
        return self.work.position * counted.tokens + self.work.pair * counted.pairs

    def causal_flops(self, counted: CountedWork) -> float:
        """The same with attention to earlier positions and the own one alone."""
        return self.work.position * counted.tokens + self.work.pair * (counted.pairs + counted.tokens) / 2

    def hardware_flops(self, counted: CountedWork) -> int:
        """What devices are given to do, as the plan counts it: padding and second runs, and attention in full."""
        products = self.work.position + self.work.position_again
        attention = self.work.pair + self.work.pair_again
        return products * counted.positions + attention * counted.laid_pairs
