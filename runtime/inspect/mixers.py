"""Measurements and costs of a user's layer that mixes positions.

`python -m xtrain.runtime.inspect.mixers REQUEST RESULT` reads JSON (a layer, its module, and the width of the stream)
and writes JSON. A child process of the planner runs it: it calls the user's function on small tensors, and checks that
a position sees no later one, and earlier ones by the declared states alone.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain.blocks.block import BlockPiece
from xtrain.blocks.mixer import UserMixer
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.base.user_parts import UserPart
from xtrain.runtime.inspect.code_costs import LENGTHS, costs_of, numbers_in, recorded
from xtrain.runtime.inspect.small_model import same
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.mixer import OwnMixer

ROWS, POSITIONS, CUT = 2, 24, 9
FORMATS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UnfitMixer(Exception):
    """A layer that does not compute what it declares."""


@torch.no_grad()
def check(mixer: OwnMixer, width: int) -> None:
    """Compare the layer on whole documents, on parts of them and with other tokens. Raises UnfitMixer."""
    x_BSD = torch.randn(ROWS, POSITIONS, width, dtype=torch.float64)
    begin = mixer.beginning(x_BSD, ROWS)
    whole, _ = mixer.step(x_BSD, begin)
    other_BSD = torch.cat((x_BSD[:, :CUT], torch.randn_like(x_BSD[:, CUT:])), 1)
    if not same(mixer.step(other_BSD, begin)[0][:, :CUT], whole[:, :CUT]):
        raise UnfitMixer("a position of it depends on later positions")
    if not same(torch.cat([mixer.step(x_BSD[n : n + 1], mixer.beginning(x_BSD, 1))[0] for n in range(ROWS)]), whole):
        raise UnfitMixer("a document of it depends on others of the batch")
    parts, states = list[Tensor](), begin
    for piece in x_BSD.split((CUT, *[1] * (POSITIONS - CUT)), 1):
        out, states = mixer.step(piece, states)
        parts.append(out)
    if not same(torch.cat(parts, 1), whole):
        raise UnfitMixer("a document in parts, with the states between them, is not the whole document")


class _Traced(nn.Module):
    """The layer on one document, under its name in a block."""

    def __init__(self, name: str, mixer: OwnMixer) -> None:
        super().__init__()
        self.add_module(name, mixer)
        self.inner = (mixer,)

    def forward(self, x_BSD: Tensor) -> Tensor:
        (mixer,) = self.inner
        return mixer.step(x_BSD, mixer.beginning(x_BSD, 1))[0]


def describe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs of a layer by number format, as operations of a description. Raises UnfitMixer."""
    layer, user = BlockPiece.from_json(request["layer"]), request["user"]
    assert isinstance(layer, UserMixer)
    part = UserPart("layer", user["module"], layer.function, user["digest"], dict(layer.arguments), Path.cwd())
    torch.manual_seed(0)
    mixer = OwnMixer(layer, part, Axes()).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.3)
    check(mixer, request["width"])
    costs: dict[str, Any] = {}
    for name, format in FORMATS.items():
        with numbers_in(format), FakeTensorMode():
            traced = _Traced(layer.name, OwnMixer(layer, part, Axes()))
            given = {n: torch.empty(1, n, request["width"], dtype=format) for n in LENGTHS}
            traces = {n: recorded(traced, (x_BSD,), {})[0] for n, x_BSD in given.items()}
        costs[name] = costs_of(traces)
    return {"costs": costs}


def main(path: str, result_path: str) -> int:
    """Write the description of a layer, or what is wrong with it."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        result: Any = describe(request)
    except (UnfitMixer, DataError, EnvironmentFault) as problem:
        result = {"problem": str(problem)}
    except Exception as error:  # of the user's function on tensors without values
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        result = {"problem": f"its costs cannot be traced: {text}"}
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
