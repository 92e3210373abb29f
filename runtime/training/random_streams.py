"""Random numbers of this process: the streams that torch, Python and numpy draw from when they are given no other.

Nothing of xtrain draws from them: what it draws depends on a seed and a name. They are for parts of the user's own, and
for what these call.

A stream is a tensor of one size, whatever it holds, so that a checkpoint can be asked for it by name and shape.
"""

import random
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor


def streams(device: torch.device) -> dict[str, Tensor]:
    """Name → a copy of the state of each stream, in host memory; `cuda` is that of the rank's own device."""
    found = {"torch": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def put_back(found: dict[str, Tensor], device: torch.device) -> None:
    """Let each of these streams go on where it was when `streams` copied it."""
    for name, state in found.items():
        match name:
            case "torch":
                torch.set_rng_state(state)
            case "cuda":
                torch.cuda.set_rng_state(state, device)
            case "python":
                version, *words, has_next, following = state.tolist()
                random.setstate((int(version), tuple(map(int, words)), following if has_next else None))
            case "numpy":
                *words, position, has_next, following = state.tolist()
                key = np.array(words, dtype=np.uint32)
                np.random.set_state(("MT19937", key, int(position), int(has_next), following))
            case _:
                raise AssertionError(name)


def begin(seed: int, step: int, data_rank: int) -> None:
    """Start all streams anew, from the seed, the steps behind and the part of the data that this rank reads.

    Ranks that read the same rows start alike: what they draw for them has to be the same.
    """
    digest = blake2b(f"{seed}:{step}:{data_rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1  # some generators take signed seeds
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed([number >> 32, number & 0xFFFFFFFF])


def _of_python() -> Tensor:
    """[version, 625 words, whether a normal number is left over, that number]: whole numbers are exact in fp64."""
    version, words, following = random.getstate()
    return torch.tensor([version, *words, following is not None, following or 0.0], dtype=torch.float64)


def _of_numpy() -> Tensor:
    """[624 words, position, whether a normal number is left over, that number]."""
    state: Any = np.random.get_state(legacy=True)
    kind, key, position, has_next, following = state
    assert kind == "MT19937"  # the global stream has no other
    return torch.tensor([*key.tolist(), position, has_next, following], dtype=torch.float64)
