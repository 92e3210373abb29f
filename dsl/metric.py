"""`Metric`, `MeasuredNumber`: numbers that a run measures, as a spec names them: `eval.web.loss`."""

import re
from typing import Final

_PATTERN: Final = re.compile(r"eval\.(?P<dataset>.+)\.(?P<what>loss|objective)")
FORM: Final = "eval.DATASET.loss"
_MEASURED: Final = re.compile(
    r"(?:eval\.(?P<dataset>.+?)|hook\.(?P<hook>[^.]+))\.(?P<what>rewards[./]\w+|\w+(?:/\w+)*)", re.ASCII
)
# The better value of a metric, by the last word of its name.
LOWEST: Final = frozenset(("loss", "objective", "bits_per_byte"))
HIGHEST: Final = frozenset(("acc", "acc_norm", "acc_bytes", "accuracy", "reward", "margin"))


class Metric(str):
    """The loss on what a dataset held out, or what is minimised there; less is better."""

    __slots__ = ()

    @classmethod
    def read(cls, text: str) -> "Metric | None":
        """None for a text that names no metric."""
        return cls(text) if _PATTERN.fullmatch(text) else None

    @property
    def dataset(self) -> str:
        return self._part("dataset")

    @property
    def what(self) -> str:
        """`loss` or `objective`."""
        return self._part("what")

    @property
    def key(self) -> str:
        """Its name in `metrics.jsonl`."""
        return f"eval/{self.dataset}/{self.what}"

    def _part(self, name: str) -> str:
        match = _PATTERN.fullmatch(self)
        assert match is not None
        return match[name]


class MeasuredNumber(str):
    """Any number that an evaluation measures, or that a hook returns: `eval.arc.acc`, `hook.quality.score`."""

    __slots__ = ()
    form = "eval.DATASET.METRIC or hook.NAME.METRIC"

    @classmethod
    def read(cls, text: str) -> "MeasuredNumber | None":
        """None for a text that names no metric."""
        return cls(text) if _MEASURED.fullmatch(text) else None

    @property
    def dataset(self) -> str | None:
        """The dataset that is evaluated; None of a metric of a hook."""
        return self._parts["dataset"]

    @property
    def hook(self) -> str | None:
        """The hook that returns it; None of a metric of an evaluation."""
        return self._parts["hook"]

    @property
    def what(self) -> str:
        """The name of the metric, as `loss` or `rewards/accuracy`."""
        return str(self._parts["what"]).replace(".", "/")

    @property
    def key(self) -> str:
        """Its name in `metrics.jsonl`."""
        return f"eval/{self.dataset}/{self.what}" if self.hook is None else f"hook/{self.hook}/{self.what}"

    @property
    def better(self) -> str | None:
        """`lowest` or `highest`, where the name tells which value is better."""
        last = self.what.rpartition("/")[2]
        return "lowest" if last in LOWEST else "highest" if last in HIGHEST and self.hook is None else None

    @property
    def _parts(self) -> dict[str, str | None]:
        match = _MEASURED.fullmatch(self)
        assert match is not None
        return match.groupdict()
