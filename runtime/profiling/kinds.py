"""What an operation of a trace is for, by its name: products of matrices, attention, communication, copies, others."""

import re
from functools import cache
from typing import Final, Literal

Kind = Literal["matmul", "attention", "communication", "copies", "other"]

# Tried in this order. Names of kernels of GPUs are those of cuBLAS, CUTLASS, cuDNN, flash attention, NCCL, Inductor.
_COMMUNICATION: Final = re.compile(
    r"nccl|gloo:|^c10d::|^_c10d_functional::|record_param_comms|AllReduce|ReduceScatter|AllGather"
)
_ATTENTION: Final = re.compile(r"attention|flash|fmha|sdpa|flex_", re.IGNORECASE)
_MATMUL: Final = re.compile(
    r"^aten::(_?addmm|_?mm|bmm|baddbmm|addbmm|addmv|matmul|linear|linear_backward|einsum|mv|dot|_grouped_mm|_scaled_mm"
    r"|_scaled_grouped_mm|_addmm_activation|mkldnn_\w*linear\w*)$"
    r"|gemm|gemv|nvjet|cutlass|cublas|wgmma|_mm_|matmul|^triton_tem|splitKreduce|dot_kernel",
    re.IGNORECASE,
)
_COPIES: Final = re.compile(r"copy|memcpy|memset|^aten::(_?to|clone|contiguous|pin_memory|zero_|fill_)$", re.IGNORECASE)
# They only call others: what they take beside those is waiting, or nothing.
_CALLERS: Final = re.compile(r"^(autograd::|torch::autograd::)|Backward\d*$|^[^:]*$")
# But these compute by themselves.
_COMPILED: Final = re.compile(r"^(Torch-Compiled Region|CompiledFunction|## Call Compiled)")


@cache  # of a million entries there are some hundred names
def kind_of(name: str) -> Kind:
    """The kind of an operation or a kernel."""
    if _COMMUNICATION.search(name):
        return "communication"
    if _ATTENTION.search(name):
        return "attention"
    if _MATMUL.search(name):
        return "matmul"
    return "copies" if _COPIES.search(name) else "other"


@cache
def only_calls(name: str) -> bool:
    """Whether an operation of the CPU does nothing itself, such as a node of autograd around the work of a backward."""
    return _COMPILED.match(name) is None and _CALLERS.search(name) is not None
