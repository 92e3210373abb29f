"""`Certificate`: the result of `xtrain prove`, bound to a plan, to the code that executes it, and to torch."""

import json
from pathlib import Path
from typing import Any, Final

import cattrs
from attrs import asdict
from cattrs.errors import BaseValidationError

from xtrain.lazy_attrs import frozen
from xtrain.plan.canonical import SEAL, digest
from xtrain.regular_files import read_json

FORMAT: Final = 1


class CertificateError(ValueError):
    """A file that is no certificate, or was edited."""


@frozen(kw_only=True)
class ComparedLayout:
    """A layout compared with one process: the largest relative differences.

    resumed: it began with the checkpoint of the first layout. worst: the tensor with the largest difference. problem:
    why nothing could be compared, or empty.
    """

    layout: str
    ranks: int
    resumed: bool
    loss: float
    norm: float
    evaluation: float
    routing: float
    tensor: float
    worst: str
    seconds: float
    problem: str = ""


@frozen(kw_only=True)
class Issued:
    """Collectives of the plan at full size. ranks: the traced ones; calls: of all of them; problems: where members of a
    group disagree. reason: why nothing was traced, or empty."""

    ranks: tuple[int, ...]
    calls: int
    problems: tuple[str, ...]
    reason: str = ""


@frozen(kw_only=True)
class Changed:
    """A setting of the small experiment that differs from the plan's."""

    setting: str
    before: str
    after: str


@frozen(kw_only=True)
class Certificate:
    """plan: its id. subject: the id of the plan whatever names its run or
    submits it. code: fingerprint of xtrain's sources;
    own: digests of the author's modules. steps, saved: of the small experiment, and the step after which it resumes.
    tolerance: largest difference that counts as equal. digest: of all other fields."""

    plan: str
    subject: str
    name: str
    version: str
    code: str
    own: dict[str, str]
    torch: str
    steps: int
    saved: int
    tolerance: float
    compared: tuple[ComparedLayout, ...]
    issued: Issued
    changed: tuple[Changed, ...]
    uncovered: tuple[str, ...]
    seconds: float
    digest: str = ""

    @property
    def holds(self) -> bool:
        """True if every comparison is within the tolerance and no group disagrees."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """Everything that was found, a sentence each."""
        found = [fault for each in self.compared if (fault := self._fault(each))]
        return [*found, *self.issued.problems]

    def _fault(self, each: ComparedLayout) -> str:
        where = f"{each.layout}, resumed after step {self.saved}" if each.resumed else each.layout
        if each.problem:
            return f"{where}: {each.problem}"
        named = {
            "the loss": each.loss,
            "the gradient norm": each.norm,
            "the evaluation": each.evaluation,
            "the routing": each.routing,
            each.worst: each.tensor,
        }
        beyond = [f"{name} differs by {gap:.1e}" for name, gap in named.items() if not gap <= self.tolerance]
        return f"{where}: {', '.join(beyond)}" if beyond else ""

    def text(self) -> str:
        """Return the content of its file."""
        content = _content(self)
        return json.dumps({"format": FORMAT, **content, "digest": digest(content, SEAL, size=16)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Certificate":
        """Read a certificate. Raises CertificateError."""
        try:
            content = read_json(path)
            if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
                raise CertificateError(f"{path} is no certificate of this version of xtrain")
            found = cattrs.Converter(forbid_extra_keys=True).structure(content, cls)
        except (OSError, ValueError, TypeError, KeyError, BaseValidationError) as error:
            if isinstance(error, CertificateError):
                raise
            raise CertificateError(f"{path} is no certificate") from None
        if found.digest != digest(_content(found), SEAL, size=16):
            raise CertificateError(f"{path} was changed after it was made")
        return found


def _content(certificate: Certificate) -> dict[str, Any]:
    return {name: value for name, value in asdict(certificate).items() if name != "digest"}
