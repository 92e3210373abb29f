"""`Metric`: a number that a run measures, as a spec names it: `eval.web.loss`."""

import re
from typing import Final

_PATTERN: Final = re.compile(r"eval\.(?P<dataset>.+)\.(?P<what>loss|objective)")
FORM: Final = "eval.DATASET.loss"


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
