"""Layouts that cannot work: each names the field and the reason, and gives a value with which there is a plan.

The table is the contract. Where the hint is one setting, the test writes it into the spec and plans it again.
"""

from pathlib import Path

import pytest
from attrs import frozen

from xtrain.dsl.load import load_spec
from xtrain.plan.findings import Findings, rule_inputs
from xtrain.planner.compile import compile_plan
from xtrain.planner.rules.validate import validate

from .conftest import spec_text

DENSE = "model llama {{ dim = 64, layers = {layers}, heads = {heads}, kv_heads = {kv_heads}, {more} }}"
MOE = "model qwen3_moe {{ dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = {experts}, {more} }}"


INDEXED = """model deepseek_v32 {
  dim = 64, layers = 2, heads = 8, q_rank = 40, kv_rank = 64, nope_dim = 32, rope_dim = 16, value_dim = 32, experts = 8,
  index_heads = 16, index_dim = 32, index_topk = 16
}"""


def dense(*, layers=4, heads=8, kv_heads=4, more=""):
    return DENSE.format(layers=layers, heads=heads, kv_heads=kv_heads, more=more)


def moe(*, experts=8, more=""):
    return MOE.format(experts=experts, more=more)


def rows(sequence=256, accumulate=4, **more):
    extra = "".join(f", {name} = {value}" for name, value in more.items())
    return f"batch {{ sequence = {sequence}, accumulate = {accumulate}{extra} }}"


def pack(align):
    return f"collate = to_tensor -> flatten -> shift_tokens -> pack(align = {align})"


@frozen(kw_only=True)
class Wrong:
    """code: of the one error. at: what its span shows. says: words of the message. hint: words of the hint.

    fix: the hint as `--set` texts, each a setting that the hint names; empty where it is not a setting.
    """

    code: str
    at: str
    says: str
    hint: str
    fix: tuple[str, ...] = ()
    blocks: dict[str, str]
    world: int | None = None


def wrong(code, at, says, hint, *fix, world=None, **blocks):
    return Wrong(code=code, at=at, says=says, hint=hint, fix=fix, blocks=blocks, world=world)


CHAIN = "collate=to_tensor -> flatten -> shift_tokens -> pack"


def parallel(text):
    return f"parallel {{ {text} }}"


TABLE = {
    # The shape of the model over tp.
    "heads over tp": wrong("X402", "3", "heads 8 cannot be split over tp 3", "use tp 2", "parallel.tp=2",
        parallel=parallel("tp 3"), batch=rows(258)),
    "kv_heads over tp": wrong("X403", "8", "kv_heads 4 cannot be split over tp 8", "use tp 4", "parallel.tp=4",
        parallel=parallel("tp 8")),
    "ffn over tp": wrong("X420", "190", "ffn 190 cannot be split over tp 4", "use ffn 188 or 192", "model.ffn=188",
        parallel=parallel("tp 4"), model=dense(more="ffn = 190")),
    "derived ffn over tp": wrong("X420", "model llama", "ffn 192 cannot be split over tp 5", "use ffn 190 or 195",
        "model.ffn=195", parallel=parallel("tp 5"), model=dense(heads=10, kv_heads=5, more="head_dim = 8"),
        batch=rows(250)),
    "vocab over tp": wrong(
        "X420", "225", "vocab 225 in pieces of 15 leaves no rows", "use vocab 240", "model.vocab=240",
        parallel=parallel("tp 16"), model=dense(heads=16, kv_heads=16, more="vocab = 225"),
        tokenizer='tokenizer "no/where"',  # bytes have 258 ids
    ),
    "sequence over tp": wrong("X405", "254", "sequence 254 is not divisible by tp 4 = 4", "use sequence 252 or 256",
        "batch.sequence=252", parallel=parallel("tp 4"), batch=rows(254)),
    "sequence over tp, for experts, although blocks keep it whole": wrong("X405", "254",
        "sequence 254 is not divisible by tp 4 = 4", "use sequence 252 or 256", "batch.sequence=256",
        parallel=parallel("tp 4 { sequence = false }"), model=moe(), batch=rows(254)),
    # Context parallelism.
    "sequence over ring": wrong("X405", "254", "sequence 254 is not divisible by 2 · ring 2 = 4",
        "use sequence 252 or 256", "batch.sequence=256", parallel=parallel("cp 2 { ring = 2 }"), batch=rows(254)),
    "sequence over ulysses": wrong("X405", "255", "sequence 255 is not divisible by ulysses 2 = 2",
        "use sequence 254 or 256", "batch.sequence=254", parallel=parallel("cp 2"), batch=rows(255)),
    "sequence over cp · tp": wrong("X405", "248", "2 · ring 2 · ulysses 2 · tp 2 = 16", "use sequence 240 or 256",
        "batch.sequence=240", parallel=parallel("cp 4 { ring = 2, ulysses = 2 }, tp 2"), batch=rows(248)),
    "query heads over ulysses": wrong("X402", "4", "the 6 query heads of a tp rank cannot be split over ulysses 4",
        "use ulysses 2", "parallel.cp.ulysses=2", parallel=parallel("cp 4 { ulysses = 4 }"),
        model=dense(heads=6, kv_heads=2, more="head_dim = 8")),
    "query heads of a tp rank over ulysses": wrong("X402", "8",
        "the 4 query heads of a tp rank cannot be split over ulysses 8", "use ulysses 4", "parallel.cp.ulysses=4",
        parallel=parallel("tp 2, cp 8 { ulysses = 8 }")),
    "more key/value heads than ulysses ranks": wrong("X403", "2",
        "the 3 key/value heads of a tp rank cannot be split over ulysses 2", "use ulysses 1", "parallel.cp.ulysses=1",
        parallel=parallel("cp 2 { ulysses = 2 }"), model=dense(heads=6, kv_heads=3, more="head_dim = 8")),
    "fewer key/value heads than ulysses ranks": wrong("X403", "4",
        "the 3 key/value heads of a tp rank cannot be copied evenly to ulysses 4", "use ulysses 1",
        "parallel.cp.ulysses=1", parallel=parallel("cp 4 { ulysses = 4 }"),
        model=dense(heads=12, kv_heads=3, more="head_dim = 8")),
    "ulysses with a ring that is given": wrong("X403", "2", "the 3 key/value heads of a tp rank",
        "use ulysses 1 with ring 4, or leave both auto", "parallel.cp.ulysses=1", "parallel.cp.ring=4",
        parallel=parallel("cp 4 { ulysses = 2, ring = 2 }"), model=dense(heads=6, kv_heads=3, more="head_dim = 8")),
    "ring · ulysses": wrong("X413", "cp 4", "ring 2 · ulysses 4 = 8, but cp is 4", "`cp 8`", "parallel.cp=8",
        parallel=parallel("cp 4 { ring = 2, ulysses = 4 }")),
    "ring beside cp": wrong("X413", "cp 4", "ring 3 · ulysses 1 = 3, but cp is 4", "`cp 3`", "parallel.cp=3",
        parallel=parallel("cp 4 { ring = 3 }"), batch=rows(252)),
    "align over ring": wrong("X414", "pack(align = 6)", "align 6 is not divisible by 2 · ring 2 = 4", "use align 4",
        f"collate={pack(4).partition('= ')[2]}", parallel=parallel("cp 2 { ring = 2 }"), collate=pack(6)),
    "align below ring": wrong("X414", "pack(align = 1)", "align 1 is not divisible by 2 · ring 4 = 8", "use align 8",
        f"collate={pack(8).partition('= ')[2]}", parallel=parallel("cp 4 { ring = 4 }"), collate=pack(1)),
    "align over sequence": wrong("X414", "pack(align = 12)", "align 12 does not divide sequence 256", "use align 8",
        f"collate={pack(8).partition('= ')[2]}", collate=pack(12)),
    "align over sequence, told by the sequence": wrong("X414", "pack(align = 12)",
        "align 12 does not divide sequence 256", "sequence 252 or 264", "batch.sequence=264", collate=pack(12)),
    "align longer than padding": wrong("X414", "pack(align = 2048)", "align 2048 is longer than a segment of padding",
        "use align 1024", f"collate={pack(1024).partition('= ')[2]}", collate=pack(2048), batch=rows(4096)),
    "a flexible kernel in a ring": wrong("X419", "flex", "flex needs whole rows, and with ring 2", "use attention auto",
        "model.attention=auto", parallel=parallel("cp 2 { ring = 2 }"),
        model=dense(more="attention = flex, head_dim = 16")),
    "a masked kernel in a ring": wrong("X419", "mask", "attention mask needs whole rows", "ring 1",
        "parallel.cp.ring=1", parallel=parallel("cp 2 { ring = 2 }"), model=dense(more="attention = mask")),
    "an indexer in a ring": wrong("X419", "2", "an indexer chooses among all positions", "use ring 1",
        "parallel.cp.ring=1", parallel=parallel("cp 2 { ring = 2 }"), model=INDEXED),
    # Experts.
    "experts over ep": wrong(  # 3 divides 6, but not the ranks
        "X406", "4", "6 experts cannot be split over ep 4", "use ep 2", "parallel.ep=2",
        parallel=parallel("ep 4, fsdp 4"), model=moe(experts=6),
    ),
    "experts over ep, told by the experts": wrong("X406", "4", "6 experts cannot be split over ep 4", "experts 4 or 8",
        "model.experts=8", parallel=parallel("ep 4, fsdp 4"), model=moe(experts=6)),
    "ep over its ranks": wrong("X407", "4", "ep 4 does not divide fsdp · ring · ulysses · tp = 6", "such as ep 2",
        "parallel.ep=2", parallel=parallel("ep 4, fsdp 6"), model=moe()),
    "ep without ranks": wrong("X407", "8", "ep 8 does not divide fsdp · ring · ulysses · tp = 1", "ep 1",
        "parallel.ep=1", parallel=parallel("ep 8"), model=moe()),
    "ep does not reach over copies": wrong("X407", "4", "ep 4 does not divide fsdp · ring · ulysses · tp = 2", "ep 2",
        "parallel.ep=2", parallel=parallel("ep 4, fsdp 2 { replicate = 2 }"), model=moe()),
    "ep on a dense model": wrong("X409", "2", "ep 2, but a llama model has no experts", "use ep 1", "parallel.ep=1",
        parallel=parallel("ep 2, fsdp 2")),
    "experts of a token": wrong("X412", "9", "experts_per_token 9 exceeds experts 8", "8 or fewer",
        "model.experts_per_token=8", model=moe(more="experts_per_token = 9")),
    "odd heads of a mixture": wrong("X408", "7", "head_dim 7 is odd", "use head_dim 8", "model.head_dim=8",
        model=moe(more="head_dim = 7")),
    "heads over the width": wrong("X408", "6", "heads 6 do not divide dim 64", "use heads 4 or 8", "model.heads=4",
        model=dense(heads=6, kv_heads=2)),
    # The number of ranks.
    "axes against launch": wrong("X401", "4", "the axes give fsdp 4 = 4 ranks, but launch.nodes · ranks_per_node is 6",
        "write `fsdp 6`", "parallel.fsdp=6", parallel=parallel("fsdp 4"), launch="launch { ranks_per_node = 6 }"),
    "axes against --world": wrong("X401", "2", "the axes give fsdp 2 · tp 2 = 4 ranks, but --world is 8",
        "write `fsdp 4`", "parallel.fsdp=4", parallel=parallel("fsdp 2, tp 2"), world=8),
    "axes that --world cannot hold": wrong("X401", "parallel",
        "--world 6 is not divisible by the other axes, tp 4 = 4 ranks", "use 4 or 8 ranks",
        parallel=parallel("tp 4, fsdp auto"), world=6),
    "a world smaller than the axes": wrong("X401", "parallel",
        "--world 2 is not divisible by the other axes, pp 2 · tp 2 = 4 ranks", "use 4 ranks",
        parallel=parallel("tp 2, pp 2"), world=2),
    "axes over machines": wrong("X401", "3", "4 ranks cannot be spread evenly over 3 nodes", "use 2 nodes",
        "launch.nodes=2", parallel=parallel("fsdp 4"), launch="launch { nodes = 3 }"),
    "machines that are not filled": wrong("X401", "4", "6 ranks do not fill machines of 4 ranks", "use 4 or 8 ranks",
        parallel=parallel("fsdp auto"), launch="launch { nodes = 2, ranks_per_node = 4 }", world=6),
    "copies against launch": wrong("X401", "parallel", "other axes, replicate 3 = 3 ranks", "use 6 or 9 ranks",
        parallel=parallel("fsdp auto { replicate = 3 }"), launch="launch { ranks_per_node = 8 }"),
    # Rows and microbatches.
    "rows over data ranks": wrong("X601", "6", "rows 6 is not divisible by micro 1 · data ranks 4 = 4",
        "use rows 4 or 8", "batch.rows=8", parallel=parallel("fsdp 4"), batch="batch { sequence = 256, rows = 6 }"),
    "rows against accumulate": wrong("X601", "6", "rows 6 is not micro 1 · accumulate 4 · data ranks 2 = 8",
        "use rows 8", "batch.rows=8", parallel=parallel("fsdp 2"), batch=rows(rows=6)),
    "too few microbatches": wrong("X411", "2", "2 microbatches of a step cannot fill a pipeline of 4 ranks",
        "use accumulate 4 or more", "batch.accumulate=4", parallel=parallel("pp 4"), batch=rows(accumulate=2)),
    "too few rows for the pipeline": wrong("X411", "4",
        "rows 4: 2 microbatches of a step cannot fill a pipeline of 4 ranks", "use rows 8 or more", "batch.rows=8",
        parallel=parallel("pp 4, fsdp 2"), batch="batch { sequence = 256, rows = 4 }"),
    "uneven rounds of interleaved_1f1b": wrong("X411", "5",
        "schedule interleaved_1f1b runs microbatches in 5 // pp 2 = 2 equal rounds, not 5", "use accumulate 4 or 6",
        "batch.accumulate=6", parallel=parallel("pp 2 { schedule = interleaved_1f1b }"), batch=rows(accumulate=5)),
    "uneven rounds of zero_bubble": wrong("X411", "7",
        "schedule zero_bubble runs microbatches in 7 // pp 2 = 3 equal rounds, not 7", "use accumulate 6 or 8",
        "batch.accumulate=6", parallel=parallel("pp 2 { schedule = zero_bubble }"), batch=rows(accumulate=7)),
    "uneven rounds, asked for in rows": wrong("X411", "10",
        "rows 10: schedule zero_bubble runs microbatches in 5 // pp 2 = 2 equal rounds", "use rows 8 or 12",
        "batch.rows=12", parallel=parallel("pp 2 { schedule = zero_bubble }, fsdp 2"),
        batch="batch { sequence = 256, rows = 10 }"),
    # Stages.
    "layers over pp": wrong("X404", "8", "4 layers cannot fill pp 8 · stages_per_rank 1 = 8 stages", "use pp 4",
        "parallel.pp=4", parallel=parallel("pp 8"), batch=rows(accumulate=8)),
    "layers over stages": wrong("X404", "4", "4 layers cannot fill pp 4 · stages_per_rank 2 = 8 stages", "layers 8",
        "model.layers=8", parallel=parallel("pp 4 { schedule = interleaved_1f1b }")),
    "several stages of 1f1b": wrong("X404", "2", "schedule 1f1b runs one stage on a rank, not 2",
        "schedule interleaved_1f1b", "parallel.pp.schedule=interleaved_1f1b",
        parallel=parallel("pp 2 { stages_per_rank = 2 }")),
    "several stages of gpipe": wrong("X404", "2", "schedule gpipe runs one stage on a rank, not 2", "stages_per_rank 1",
        "parallel.pp.stages_per_rank=1", parallel=parallel("pp 2 { schedule = gpipe, stages_per_rank = 2 }")),
    "one stage of zbv": wrong("X404", "1", "schedule zbv runs two stages on a rank, there and back, not 1",
        "use stages_per_rank 2", "parallel.pp.stages_per_rank=2",
        parallel=parallel("pp 2 { schedule = zbv, stages_per_rank = 1 }")),
    "three stages of zbv": wrong("X404", "3", "schedule zbv runs two stages on a rank, there and back, not 3",
        "leave it auto", "parallel.pp.stages_per_rank=auto",
        parallel=parallel("pp 2 { schedule = zbv, stages_per_rank = 3 }"), model=dense(layers=6)),
    "given layers with the wrong sum": wrong("X404", "[2, 3]", "the stages have 2 + 3 = 5 layers, but the model 4",
        "use layers [2, 2]", "parallel.pp.layers=[2, 2]", parallel=parallel("pp 2 { layers = [2, 3] }")),
    "given layers for other stages": wrong("X404", "[2, 1, 1]",
        "layers lists 3 stages, but pp 2 · stages_per_rank 1 = 2", "use layers [2, 2]", "parallel.pp.layers=[2, 2]",
        parallel=parallel("pp 2 { layers = [2, 1, 1] }")),
    "a given stage without layers": wrong("X404", "[4, 0]", "stage 1 has 0 layers, and each needs at least one",
        "use layers [2, 2]", "parallel.pp.layers=[2, 2]", parallel=parallel("pp 2 { layers = [4, 0] }")),
    "costs beside given layers": wrong("X404", "2",
        "layers gives the layers of each stage, so head_cost would change nothing", "use head_cost auto",
        "parallel.pp.head_cost=auto", parallel=parallel("pp 2 { layers = [3, 1], head_cost = 2 }")),
    # What schedules cannot be combined with.
    "zero_bubble with reshard": wrong("X416", "true",
        "schedule zero_bubble loses the gradients of parameters that reshard has freed", "use reshard false",
        "parallel.fsdp.reshard=false", parallel=parallel("pp 2 { schedule = zero_bubble }, fsdp 2 { reshard = true }")),
    "zbv with reshard": wrong("X416", "true", "schedule zbv loses the gradients", "schedule interleaved_1f1b",
        "parallel.pp.schedule=interleaved_1f1b",
        parallel=parallel("pp 2 { schedule = zbv }, fsdp 2 { reshard = true }")),
    "zero_bubble with compile": wrong("X416", "default", "schedule zero_bubble splits the backward of a block",
        "use mode none", "compile.mode=none", parallel=parallel("pp 2 { schedule = zero_bubble }"),
        compile="compile { mode = default }"),
    "an uneven vocabulary that fsdp cuts again": wrong("X420", "259", "vocab 259 is not divisible by tp 2",
        "use vocab 260", "model.vocab=260", model=dense(more="vocab = 259"), parallel=parallel("tp 2, fsdp 3")),
    "flex on a cpu": wrong("X419", "flex", "attention flex has no backward on cpu", "use attention auto",
        "model.attention=auto", model=dense(more="attention = flex"), launch="launch { device = cpu }"),
    "cudnn on a cpu": wrong("X419", "cudnn", "attention cudnn has no backward on cpu", "use attention auto",
        "model.attention=auto", model=dense(more="attention = cudnn"), launch="launch { device = cpu }"),
    "cudnn in fp32": wrong("X419", "cudnn", "cudnn has kernels of bf16", "use attention auto", "model.attention=auto",
        model=dense(more="attention = cudnn")),
    "cudnn on devices that are older": wrong("X419", "cudnn", "cluster a100 has 8", "use attention auto",
        "model.attention=auto", model=dense(more="attention = cudnn, head_dim = 64"), cluster="cluster a100",
        precision="precision { params = bf16 }"),
    "FlashAttention on a cpu": wrong("X419", "flash4", "attention flash4 has no backward on cpu", "use attention auto",
        "model.attention=auto", model=dense(more="attention = flash4"), launch="launch { device = cpu }"),
    "FlashAttention in fp32": wrong("X419", "flash3", "computed in fp32", "use attention auto", "model.attention=auto",
        model=dense(more="attention = flash3")),
    "FlashAttention 3 on devices that are newer": wrong("X419", "flash3",
        "FlashAttention 3 is made for compute capability 9, and cluster b200 has 10", "use attention auto",
        "model.attention=auto", model=dense(more="attention = flash3"), cluster="cluster b200",
        precision="precision { params = bf16 }"),
    "FlashAttention 4 with wide heads": wrong("X419", "flash4", "up to 128 in steps of 8, and these are 256 wide",
        "use attention auto", "model.attention=auto", model=dense(more="attention = flash4, head_dim = 256"),
        precision="precision { params = bf16 }"),
    "FlashAttention with sinks": wrong("X419", "flash3", "neither sinks nor a cap of scores to FlashAttention 3",
        "use attention auto", "model.attention=auto", precision="precision { params = bf16 }",
        model="model gpt_oss { dim = 64, layers = 4, heads = 4, experts = 4, experts_per_token = 2, expert_ffn = 64, "
        "window = 64, attention = flash3 }"),
    "flex with heads that it has no kernel for": wrong("X419", "flex",
        "no kernel for heads of less than 16, and these are 8 wide", "use attention auto", "model.attention=auto",
        model="model llama { dim = 64, layers = 4, heads = 8, attention = flex }"),
    "kernels by their time that are to be the same": wrong("X448", "max_autotune", "chooses kernels by measured time",
        "use mode default", "compile.mode=default", precision="precision { deterministic = true }",
        compile="compile { mode = max_autotune }"),
    "blocks of queries on cuda": wrong("X419", "blocks",
        "made for plain products on cpu in fp32 and fp64, and the device is cuda", "use attention auto",
        "model.attention=auto", model=dense(more="attention = blocks"), launch="launch { device = cuda }"),
    "blocks of queries in bf16": wrong("X419", "blocks", "and computation is in bf16", "use attention auto",
        "model.attention=auto", model=dense(more="attention = blocks"), precision="precision { compute = bf16 }"),
    "zbv with a tied embedding": wrong("X416", "true", "schedule zbv has the first and the last stage on one rank",
        "schedule interleaved_1f1b", "model.tie_embeddings=false", model=dense(more="tie_embeddings = true"),
        parallel=parallel("pp 2 { schedule = zbv }")),
    "zbv with compile": wrong("X416", "compile", "schedule zbv splits the backward of a block",
        "schedule interleaved_1f1b", "parallel.pp.schedule=interleaved_1f1b",
        parallel=parallel("pp 2 { schedule = zbv }"), compile="compile"),
    # Copies by ddp.
    "ddp with tp": wrong("X415", "2", "stack ddp keeps a full replica of the model on every rank, and tp is 2",
        "use tp 1", "parallel.tp=1", parallel=parallel("stack = ddp, tp 2")),
    "ddp with pp": wrong("X415", "2", "and pp is 2", "use pp 1", "parallel.pp=1",
        parallel=parallel("stack = ddp, pp 2")),
    "ddp with cp": wrong("X415", "2", "and cp is 2", "stack parallel", "parallel.stack=parallel",
        parallel=parallel("stack = ddp, cp 2")),
    "ddp with ep": wrong("X415", "2", "and ep is 2", "use ep 1", "parallel.ep=1",
        parallel=parallel("stack = ddp, ep 2, tp 1, cp 1"), model=moe(), launch="launch { ranks_per_node = 2 }"),
    "ddp with fsdp": wrong("X415", "4", "stack ddp shards nothing, and fsdp is 4", "use fsdp auto",
        "parallel.fsdp=auto", parallel=parallel("stack = ddp, fsdp 4")),
    "ddp in two formats": wrong("X415", "bf16", "stack ddp computes in the format of the parameters, fp32, not in bf16",
        "use compute fp32", "precision.compute=fp32", parallel=parallel("stack = ddp"),
        precision="precision { compute = bf16 }"),
    "ddp with sums in another format": wrong("X415", "fp64",
        "stack ddp sums gradients in the format of the parameters, fp32", "use reduce fp32",
        "parallel.fsdp.reduce=fp32", parallel=parallel("stack = ddp, fsdp auto { reduce = fp64 }")),
    "ddp with reshard": wrong("X415", "false", "stack ddp gathers nothing that reshard could free", "use reshard auto",
        "parallel.fsdp.reshard=auto", parallel=parallel("stack = ddp, fsdp auto { reshard = false }")),
    "ddp with sync": wrong("X415", "step", "stack ddp sums gradients once a step", "use sync auto",
        "parallel.fsdp.sync=auto", parallel=parallel("stack = ddp, fsdp auto { sync = step }")),
    "a pipeline summed after every microbatch": wrong("X427", "microbatch",
        "pipeline schedules sum gradients once a step", "use sync auto", "parallel.fsdp.sync=auto",
        parallel=parallel("pp 2, fsdp 2 { sync = microbatch }")),
    "ddp with offload": wrong("X415", "true", "stack ddp keeps model states where they are used", "use offload false",
        "parallel.fsdp.offload=false", parallel=parallel("stack = ddp, fsdp auto { offload = true }")),
    # Memory.
    "offload on a cpu": wrong("X417", "true",
        "offload moves model states from cuda to host memory, and launch.device is cpu", "use offload false",
        "parallel.fsdp.offload=false", parallel=parallel("fsdp 2 { offload = true }"),
        launch="launch { device = cpu }"),
    "offload on a cpu, told by the device": wrong("X417", "true", "launch.device is cpu", "device cuda",
        "launch.device=cuda", parallel=parallel("fsdp 2 { offload = true }"), launch="launch { device = cpu }"),
    "recomputation of no layer": wrong("X418", "5", "every 5 selects none of 4 layers", "use every 4",
        "activation.every=4", activation="activation full { every = 5 }"),
    "all_to_all where nothing travels": wrong("X418", "[matmul, all_to_all]", "without ep or ulysses there is none",
        "use save [matmul]", "activation.save=[matmul]",
        activation="activation selective { save = [matmul, all_to_all] }"),
    "all_to_all alone": wrong("X418", "[all_to_all]", "without ep or ulysses there is none", "use save [matmul]",
        "activation.save=[matmul]", activation="activation selective { save = [all_to_all] }",
        parallel=parallel("cp 2 { ring = 2 }")),
    "full recomputation that keeps something": wrong("X418", "[matmul]",
        "full recomputation keeps only the input of a block", "use save auto", "activation.save=auto",
        activation="activation full { save = [matmul] }"),
    "selective recomputation that keeps nothing": wrong("X418", "[]", "keeps nothing is full recomputation",
        "use save [matmul]", "activation.save=[matmul]", activation="activation selective { save = [] }"),
    "more pieces than positions": wrong("X418", "300", "more than the 256 positions", "use tile_mlp auto",
        "activation.tile_mlp=256", activation="activation { tile_mlp = 300 }", batch=rows()),
    "pieces of feed-forward layers where experts are": wrong("X418", "4", "all blocks have experts instead",
        "use tile_mlp 1", "activation.tile_mlp=1", activation="activation { tile_mlp = 4 }", model=moe()),
    "pieces in a backward of two parts": wrong("X416", "4", "takes gradients of weights later", "use tile_mlp 1",
        "activation.tile_mlp=1", activation="activation { tile_mlp = 4 }",
        parallel=parallel("pp 2 { schedule = zero_bubble }")),
    # The chain.
    "shard before pack": wrong("X508", "to_tensor", "`shard` takes microbatch", "pack", CHAIN,
        collate="collate = to_tensor -> flatten -> shift_tokens -> shard -> pack", parallel=parallel("cp 2")),
    "shard twice": wrong("X508", "to_tensor", "`shard` takes microbatch", "pack", CHAIN,
        collate="collate = to_tensor -> flatten -> shift_tokens -> pack -> shard -> shard", parallel=parallel("cp 2")),
}  # fmt: skip


def compiled(path: Path, case: Wrong, fix: tuple[str, ...] = ()):
    path.write_text(spec_text(**case.blocks))
    loaded = load_spec(path, fix)
    assert loaded.spec is not None, loaded.diagnostics.render()
    return compile_plan(loaded.spec, world=case.world)


def test_the_table_is_long():
    assert len(TABLE) >= 75
    assert sum(not case.fix for case in TABLE.values()) <= 4


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_a_wrong_layout_is_named_with_a_value_that_works(case, tmp_path):
    path = tmp_path / "spec.xtrain"
    result = compiled(path, case)
    assert result.plan is None
    said = result.diagnostics.render()
    assert [error.code for error in result.diagnostics.errors] == [case.code], said
    (error,) = result.diagnostics.errors
    assert error.span is not None and case.at in error.span.text, said
    assert case.says in error.message, said
    assert case.hint in (error.hint or ""), said
    for setting in case.fix:
        value = setting.partition("=")[2]
        shown = value.partition("align = ")[2].rstrip(")") if "align" in value else value
        assert shown in (error.hint or ""), f"{setting} is not what the hint says: {error.hint}"
    if case.fix:
        again = compiled(path, case, case.fix)
        assert again.plan is not None, again.diagnostics.render()


def test_every_rule_of_the_table_knows_what_it_rests_on(tmp_path):
    """A rule without inputs of its own would be silenced by any mistake elsewhere."""
    rules = set()
    for case in TABLE.values():
        path = tmp_path / "spec.xtrain"
        path.write_text(spec_text(**case.blocks))
        spec = load_spec(path).require()
        found = Findings(spec)
        validate(spec, case.world, found)
        rules |= {check.id for check in found.checks}
        assert [check.id for check in found.checks if "*" in rule_inputs(check.id, spec)] == ["schedule.budget"]
    assert len(rules) >= 35


SEVERAL = [
    ("parallel { tp auto, fsdp 2 }", "X202", "auto"),  # only fsdp takes what is left over
    ("parallel { pp auto }", "X202", "auto"),
    ("parallel { tp 0 }", "X304", "0"),
    ("parallel { fsdp 2 { replicate = 0 } }", "X304", "0"),
    ("parallel { pp 2 { stages_per_rank = 0 } }", "X304", "0"),
    ("parallel { pp 2 { head_cost = -1 } }", "X304", "-1"),
    ("parallel { cp 2 { fold = some } }", "X305", "some"),
    ("parallel { stack = megatron }", "X305", "megatron"),
    ("activation partial", "X305", "partial"),
    ("activation full { every = 0 }", "X304", "0"),
    ("activation selective { save = [softmax] }", "X305", "softmax"),
    ("compile { mode = fastest }", "X305", "fastest"),
    (moe(experts=1), "X304", "1"),
    (moe(more="shared_experts = -1"), "X304", "-1"),
    (moe(more="expert_ffn = 0"), "X304", "0"),
    (moe(more="router { score = relu }"), "X305", "relu"),
    (moe(more="router { bias_speed = -1 }"), "X304", "-1"),
    ("collate = to_tensor -> flatten -> shift_tokens -> pack(align = 0)", "X304", "0"),
]


@pytest.mark.parametrize(("text", "code", "at"), SEVERAL, ids=[text for text, _, _ in SEVERAL])
def test_what_no_layout_can_be(text, code, at, tmp_path):
    """Values that are wrong in themselves are found by the language, at the value."""
    path = tmp_path / "spec.xtrain"
    path.write_text(spec_text(**{text.split()[0]: text}))
    loaded = load_spec(path)
    assert loaded.spec is None
    (error,) = loaded.diagnostics.errors
    assert error.span is not None
    assert (error.code, error.span.text) == (code, at) or code == "X202"
