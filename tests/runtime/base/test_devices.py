"""Names of devices as drivers write them: whose data sheet each has, and which have none."""

from types import SimpleNamespace

import pytest
import torch

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.plan.hardware import PEAKS, product_format
from xtrain.runtime.base.device import _NAMES, kind_of, peak_of
from xtrain.runtime.loop.bootstrap import warn_of_slow_products

KNOWN = {
    "Tesla V100-SXM2-16GB": ("V100 SXM", "fp16", 125e12),
    "Tesla V100-SXM3-32GB": ("V100 SXM", "fp16", 125e12),
    "Tesla V100-PCIE-32GB": ("V100 PCIe", "fp16", 112e12),
    "Tesla T4": ("T4", "fp16", 65e12),
    "NVIDIA A10": ("A10", "bf16", 125e12),
    "NVIDIA A10G": ("A10G", "bf16", 70e12),
    "NVIDIA A30": ("A30", "bf16", 165e12),
    "NVIDIA A40": ("A40", "bf16", 149.7e12),
    "A100-SXM4-40GB": ("A100", "bf16", 312e12),
    "A100-SXM-80GB": ("A100", "tf32", 156e12),
    "NVIDIA A100-SXM4-80GB": ("A100", "fp32", 19.5e12),
    "NVIDIA A100-PCIE-40GB": ("A100", "bf16", 312e12),
    "NVIDIA A100 80GB PCIe": ("A100", "bf16", 312e12),
    "NVIDIA A800-SXM4-80GB": ("A800", "bf16", 312e12),
    "NVIDIA H100 80GB HBM3": ("H100 SXM", "bf16", 989e12),
    "NVIDIA H100 PCIe": ("H100 PCIe", "bf16", 756e12),
    "NVIDIA H100 NVL": ("H100 NVL", "bf16", 835.5e12),
    "NVIDIA H800": ("H800 SXM", "bf16", 989e12),
    "NVIDIA H800 PCIe": ("H800 PCIe", "bf16", 756e12),
    "NVIDIA H200": ("H200 SXM", "bf16", 989e12),
    "NVIDIA H200 NVL": ("H200 NVL", "bf16", 835.5e12),
    "NVIDIA H20": ("H20", "bf16", 148e12),
    "NVIDIA H20-3e": ("H20", "fp8", 296e12),
    "NVIDIA GH200 480GB": ("GH200", "bf16", 989e12),
    "NVIDIA GH200 144G HBM3e": ("GH200", "fp8", 1979e12),
    "NVIDIA B200": ("B200", "bf16", 2250e12),
    "NVIDIA GB200": ("GB200", "bf16", 2500e12),
    "NVIDIA L4": ("L4", "bf16", 121e12),
    "NVIDIA L40": ("L40", "bf16", 181e12),
    "NVIDIA L40S": ("L40S", "bf16", 362e12),
    "NVIDIA GeForce RTX 3090": ("RTX 3090", "bf16", 71e12),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", "bf16", 165.2e12),
    "NVIDIA GeForce RTX 5090": ("RTX 5090", "bf16", 209.5e12),
    "NVIDIA RTX A6000": ("RTX A6000", "bf16", 154.8e12),
    "NVIDIA RTX 6000 Ada Generation": ("RTX 6000 Ada", "bf16", 364.2e12),
    "AMD Instinct MI250X": ("MI250X die", "bf16", 191.5e12),
    "AMD Instinct MI300X": ("MI300X", "bf16", 1307.4e12),
    "AMD Instinct MI325X": ("MI325X", "bf16", 1307.4e12),
}
UNKNOWN = (
    "",
    "cpu",
    "NVIDIA H1000",
    "NVIDIA H100",  # a form is missing: PCIe cards are slower
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM-64GB",  # made for one machine, with more cores
    "NVIDIA A1000",
    "NVIDIA RTX A1000",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA RTX 6000",
    "Quadro RTX 6000",
    "NVIDIA RTX 5000 Ada Generation",
    "NVIDIA L400",
    "NVIDIA B300 SXM6 AC",
    "GRID A100D-40C",
    "AMD Instinct MI250X / MI250",
    "AMD Instinct MI308X",
)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_device_has_its_own_data_sheet(name):
    kind, product, peak = KNOWN[name]
    assert kind_of(name) == kind
    assert peak_of(name, product) == pytest.approx(peak, rel=1e-12)


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_any_other_name_nothing_is_guessed(name):
    assert kind_of(name) is None and peak_of(name, "bf16") is None


def test_every_data_sheet_is_found_by_a_name_and_every_name_is_of_one():
    assert {kind for kind, *_ in KNOWN.values()} == set(PEAKS) == set(_NAMES.values())


def test_formats_without_a_figure_have_none():
    assert peak_of("Tesla V100-SXM2-16GB", "bf16") is None, "it has no products in bf16"
    assert peak_of("NVIDIA A100 80GB PCIe", "fp8") is None


def test_fp32_products_are_those_that_the_setting_allows():
    assert [product_format("fp32", matmul) for matmul in ("auto", "highest", "high", "medium")] == [
        *("fp32", "fp32", "tf32", "tf32")
    ]
    assert product_format("bf16", "high") == "bf16" and product_format("fp64", "medium") == "fp64"


def test_the_plan_counts_with_the_same_figures():
    names = {
        "a100": "NVIDIA A100-SXM4-80GB",
        "h100": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "b200": "NVIDIA B200",
    }
    sheets = {name: cluster.sheet for name, cluster in CLUSTERS.items() if cluster.sheet is not None}
    assert set(names) == set(sheets)
    for preset, name in names.items():
        for product, peak in sheets[preset].flops.items():
            assert peak_of(name, product) == peak


@pytest.mark.parametrize(("name", "form", "asked"), [
    ("Tesla T4", "bf16", "in bf16, whose matrix products are about 8 times slower than in fp16"),
    ("Tesla T4", "fp32", "in fp32, whose matrix products are about 8 times slower than in fp16"),
    ("Tesla T4", "fp16", ""),
    ("NVIDIA H100 80GB HBM3", "fp32", "in fp32, whose matrix products are about 15 times slower than in bf16"),
    ("NVIDIA H100 80GB HBM3", "bf16", ""),
    ("NVIDIA H100 80GB HBM3", "fp64", ""),
    ("an unknown GPU", "fp32", "about 10 to 30 times slower than in bf16"),
    ("an unknown GPU", "bf16", ""),
])  # fmt: skip
def test_slow_products_are_warned_of(name, form, asked, monkeypatch):
    warned: list[tuple[str, dict[str, object]]] = []
    records = SimpleNamespace(warn=lambda message, **more: warned.append((message, more)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    warn_of_slow_products(form, torch.device("cuda", 0), records)  # pyright: ignore[reportArgumentType]
    assert [asked in message and more["code"] == "W427" for message, more in warned] == [True] * bool(asked)
