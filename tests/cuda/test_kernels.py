"""Kernels that Inductor writes for a block on an H200, and the bytes that they move: counts that may only fall."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from cuda_code import spilled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("triton")
# Case of benchmarks/cuda_counts.py → (Triton kernels, products, bytes a token) of the forward, and of the backward.
MOST = {
    "bf16, rows of one document, selective": ((6, 7, 181_260), (13, 14, 407_970)),
    "bf16, selective": ((6, 7, 181_260), (13, 14, 424_220)),
    "bf16, FlashAttention 3, selective": ((6, 7, 181_260), (12, 14, 407_710)),
    "bf16, full": ((7, 7, 197_650), (16, 20, 465_200)),
    "fp8, selective": ((14, 7, 215_090), (63, 14, 896_140)),
}
SPILLED = 512  # bytes a thread: flex's backward spills 360


@pytest.fixture(scope="module")
def counts():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("cuda_counts")
    finally:
        sys.path.remove(folder)
        sys.modules.pop("cuda_counts", None)


@pytest.mark.parametrize("case", MOST)
def test_no_kernel_and_no_byte_is_added(case, counts, tmp_path):
    graphs = counts.graphs(case)
    for graph, (kernels, products, moved) in zip(graphs, MOST[case], strict=True):
        attended = sum(number for name, number in graph.calls.items() if re.search("flex|attention|varlen", name))
        assert attended in (1, 2)  # once more where attention is recomputed
        assert graph.calls["triton"] <= kernels
        assert graph.calls["mm"] + graph.calls["_scaled_mm"] <= products
        assert graph.moved / counts.TOKENS <= moved
    for capability in (90, 100):
        for name, source in (graphs[0].sources | graphs[1].sources).items():
            assert spilled(source, tmp_path, capability) <= SPILLED, (name, capability)


def test_the_goal_is_in_reach(counts):
    """The prediction of docs/performance.md."""
    head, norm = counts.loss_bytes(), counts.norm_bytes()
    least_of = {"rows of one document, ": 13_000, "FlashAttention 3, ": 13_000, "": 12_500}
    for attention, least in least_of.items():
        case = f"bf16, {attention}selective"
        found = counts.predicted(case, *counts.graphs(case), head, norm)
        assert found["predicted_tokens_per_second"] >= least
