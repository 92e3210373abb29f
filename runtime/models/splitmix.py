"""SplitMix64 (Steele, Lea, Flood 2014): random bits that follow from numbers alone, so that every layout has them."""

from hashlib import blake2b

from torch import Tensor


def stream_of(text: str) -> int:
    """The key of a stream that has a name."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True)


def splitmix64(numbers: Tensor, key: int | Tensor) -> Tensor:
    """int64: of each number, int64, the bits there in the stream `key`; a key for each number is broadcast."""
    bits = numbers * _signed(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ shifted(bits, shift)) * _signed(factor)
    return bits ^ shifted(bits, 31)


def shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
