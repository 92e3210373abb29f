"""Pages of what is found when a spec is planned or run: X4xx topology, X6xx budget, X7xx environment."""

from typing import Final

from xtrain.dsl.diagnostics.pages_language import CodePage

PAGES: Final = (
    CodePage("X401", "the axes do not give the world size", """
        The world size is pp · replicate · fsdp · ring · ulysses · tp ranks, spread evenly over the nodes. With `fsdp
        auto` the remaining ranks go to fsdp, and the product of the other axes must divide the world size; with fixed
        sizes the product of all axes must be the world size.
        """, "launch { nodes = 1, ranks_per_node = 8 }\nparallel { tp 3, fsdp auto }",
        "launch { nodes = 1, ranks_per_node = 8 }\nparallel { tp 2, fsdp auto }"),
    CodePage("X402", "heads cannot be divided among tp or ulysses ranks", """
        Tensor parallelism gives each rank whole heads, and ulysses exchanges whole heads: `heads` must be a multiple of
        tp, and the heads of one rank a multiple of ulysses.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { tp 4 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { tp 2 }"),
    CodePage("X403", "key and value heads cannot be divided among tp or ulysses ranks", """
        `kv_heads` must be a multiple of tp, because each rank holds whole key and value heads. The key and value heads
        of one rank must be a multiple of ulysses, or ulysses a multiple of them: if there are fewer heads than ranks,
        each is copied to the same number of ranks.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6, kv_heads = 3 }\nparallel { tp 2 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6, kv_heads = 2 }\nparallel { tp 2 }"),
    CodePage("X404", "layers and pipeline stages do not fit", """
        Each of the pp · stages_per_rank stages needs at least one layer. If `layers` is given, it has one number per
        stage, and they add up to the layers of the model. gpipe and 1f1b run one stage on a rank, zbv two,
        interleaved_1f1b and zero_bubble any number.
        """, "model qwen3 { dim = 192, layers = 2, heads = 6 }\nparallel { pp 4 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { pp 4 }"),
    CodePage("X405", "the sequence cannot be divided", """
        With `tp N { sequence = true }`, and with experts in any case, the length of a row must be a multiple of tp;
        ring attention cuts it into 2 · ring chunks for load balance, and each chunk must be a multiple of ulysses.
        """, "batch { sequence = 513 }\nparallel { tp 2 }", "batch { sequence = 512 }\nparallel { tp 2 }"),
    CodePage("X406", "experts cannot be divided among ep ranks", """
        Expert parallelism gives each rank whole experts: `experts` must be a multiple of ep.
        """, "parallel { ep 3 }  # with experts = 8", "parallel { ep 4 }  # with experts = 8"),
    CodePage("X407", "ep does not fit into the ranks of a replica", """
        ep adds no ranks: it reuses the ranks of fsdp · ring · ulysses · tp, and must divide that product.
        """, "parallel { ep 8, fsdp 4 }", "parallel { ep 4, fsdp 4 }"),
    CodePage("X408", "the sizes of attention do not match", """
        `dim` must be a multiple of `heads` unless `head_dim` is given; the width of a head must be even, for rotary
        positions; `heads` must be a multiple of `kv_heads`.
        """, "model qwen3 { dim = 100, layers = 4, heads = 6 }", "model qwen3 { dim = 192, layers = 4, heads = 6 }"),
    CodePage("X409", "experts on a dense model", """
        Expert parallelism spreads experts over ranks, and this family has none. `xtrain docs model.experts` names the
        families that have experts.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { ep 2 }",
        "model qwen3_moe { dim = 192, layers = 4, heads = 6, experts = 8 }\nparallel { ep 2 }"),
    CodePage("X410", "more than one axis is auto", """
        The size of an axis that is `auto` is the world size divided by the other axes, so only one axis can be auto.
        """, "parallel { fsdp auto, pp auto }", "parallel { fsdp auto, pp 2 }"),
    CodePage("X411", "microbatches that the pipeline cannot run", """
        A pipeline needs at least as many microbatches in a step as it has ranks, and may have 10,000 at most, as the
        plan lays out the order of all of them. The schedules interleaved_1f1b and zero_bubble run n microbatches in
        n // pp rounds of equal size; a multiple of pp always works.
        """, "batch { sequence = 512, accumulate = 2 }\nparallel { pp 4 }",
        "batch { sequence = 512, accumulate = 8 }\nparallel { pp 4 }"),
    CodePage("X412", "more experts for a token than there are", """
        A token is sent to different experts, so `experts_per_token` is at most `experts`.
        """, "model mixtral { dim = 192, layers = 4, heads = 6, experts = 2, experts_per_token = 4 }",
        "model mixtral { dim = 192, layers = 4, heads = 6, experts = 8, experts_per_token = 2 }"),
    CodePage("X432", "scaled positions that do not fit", """
        `rope { scaling }` lets a model read longer texts than it was trained on. dynamic, llama3 and yarn need
        `original`, the number of positions before scaling; `low` is below `high`, and `beta_slow` below `beta_fast`.
        What dynamic computes beyond `original` depends on the length of each text, so rows are not longer than that.
        """, "model llama { dim = 192, layers = 4, heads = 6, rope { scaling = llama3, factor = 8 } }",
        "model llama { dim = 192, layers = 4, heads = 6, rope { scaling = llama3, factor = 8, original = 8192 } }"),
    CodePage("X433", "blocks without experts that do not fit", """
        `dense_layers` and `expert_every` say which blocks of a model with experts have none. Blocks are counted from 0,
        and at least one has experts.
        """, "model qwen3_moe { dim = 192, layers = 4, heads = 6, experts = 8, dense_layers = [4] }",
        "model qwen3_moe { dim = 192, layers = 4, heads = 6, experts = 8, dense_layers = [3] }"),
    CodePage("X434", "frozen parameters that do not fit", """
        `frozen` names modules and parameters as the plan does. A name is compared part by part: `*` is any text inside
        a part, and `0-3` the numbers 0 to 3. Each name means at least one parameter of the model, and at least one
        parameter is left to train.
        """, 'model qwen3 { dim = 192, layers = 4, heads = 6, frozen = ["embedding", "layers.0-1"] }',
        'model qwen3 { dim = 192, layers = 4, heads = 6, frozen = ["embed_tokens", "layers.0-1"] }'),
    CodePage("X435", "an adapter that does not fit", """
        `targets` names matrices of blocks by parts of their names in the plan: `q_proj`, `self_attn`,
        `layers.0-3.mlp`; `all_linear` means all matrices of attention and feed-forward layers. Routed experts have an
        adapter where `experts` is among the parts, as `experts.down_proj`; routers, norms, the embedding and the head
        can have none: `train` names what is trained in full beside the adapter. Nothing else of the model is trained,
        so there is nothing for `frozen` to say, and balance biases of routers do not move.
        """, 'adapter lora { rank = 16, targets = ["qkv_proj"] }',
        'adapter lora { rank = 16, targets = ["q_proj", "k_proj", "v_proj"] }'),
    CodePage("X436", "a group of parameters that does not fit", """
        `group NAME { … }` says how some of the parameters are updated. NAME means modules or parameters as a pattern of
        `frozen` does: at least one that is trained, and none that another group has. `weight_decay` of a group needs an
        optimizer with weight decay, and the optimizer of the spec must be left with parameters to update.
        """, 'group "layers.0-9" { lr_scale = 0.5 }\ngroup "layers.0" { lr_scale = 0.1 }',
        'group "layers.1-3" { lr_scale = 0.5 }\ngroup "layers.0" { lr_scale = 0.1 }'),
    CodePage("X437", "an optimizer that does not fit the rest", """
        `stochastic_rounding` rounds new weights at random, so that updates that are smaller than the distance of two
        numbers count on average. Weights in fp32 and fp64 have room for such updates: it is for `precision { params =
        bf16 }` alone.
        A block of `adamw8bit` lies on one rank: where tensor parallelism cuts rows of a matrix, a rank has a multiple
        of `block` of each.
        `schedule_free` averages weights in place of a learning rate that falls, and goes with `scheduler constant`.
        """, "optimizer adamw { lr = 3e-4, stochastic_rounding = true }",
        "precision { params = bf16 }\noptimizer adamw { lr = 3e-4, stochastic_rounding = true }"),
    CodePage("X438", "matrices that cannot be stored in codes", """
        `precision { base }` stores matrices of blocks that are not trained as codes with a scale for every `block` of
        neighbouring numbers, a power of two. There must be such matrices, and a block lies in one row of what a rank
        has: where tp cuts a matrix by its inputs, and in matrices of experts, `block` divides the width of these rows.
        """, "model llama { dim = 192, layers = 4, heads = 6 }\nprecision { base nf4 }",
        'model llama { dim = 192, layers = 4, heads = 6, frozen = ["layers.0-1"] }\nprecision { base nf4 }'),
    CodePage("X439", "settings of a loss that exclude each other", """
        Some settings of a loss are for one way of it alone: `label_smoothing` of dpo is for the forms sigmoid and
        robust, `max_tokens` for `normalise = dr_grpo`, `kl_weight` counts only beside `kl`. Remove what has no effect,
        or choose the way that it is for.
        """, "loss grpo { max_tokens = 512 }", "loss grpo { normalise = dr_grpo, max_tokens = 512 }"),
    CodePage("X440", "tasks that cannot be trained together", """
        Each `task` has an adapter and trains it on the rows of its own datasets, as a run of its own would: with as
        many rows in every step, which `mixture { exact = true }` sees to, over its own valid tokens, with its own norm
        of gradients and its own optimizer. A dataset is of one task, and every dataset that is trained on is of one.
        What treats all gradients or rows alike has no place beside tasks: groups, averages, clipping of spikes, losses
        of routers, parts of the model that are trained in full, compiled blocks, and a step of your own.
        """, "dataset sql { source = python_stdlib() }\ndataset chat { source = synthetic() }\n"
        "mixture { sql = 1, chat = 1 }\nbatch { sequence = 256, rows = 8 }\n"
        "task sql { adapter lora { rank = 8 } }\ntask chat { adapter lora { rank = 16 } }",
        "dataset sql { source = python_stdlib() }\ndataset chat { source = synthetic() }\n"
        "mixture { sql = 1, chat = 1, exact = true }\nbatch { sequence = 256, rows = 8 }\n"
        "task sql { adapter lora { rank = 8 } }\ntask chat { adapter lora { rank = 16 } }"),
    CodePage("X441", "a teacher that does not fit", """
        `loss distill` compares the distribution of each next token with that of its teacher, so both must have the same
        tokens: a vocabulary of the same size and the same `tokenizer.json`. `top` counts tokens of that vocabulary, and
        leaves some for the rest. One that is `live` computes beside the model, and is there when the plan is made.
        """, 'loss distill { teacher = "teachers/large", top = 100k }',
        'loss distill { teacher = "teachers/large", top = 64 }'),
    CodePage("X444", "a reference of a loss that cannot be computed", """
        The log-probabilities of a reference are computed with the model of the run, of documents as they are stored. So
        `adapter_off` needs an adapter; the model in a folder has the architecture of that of the run; collators that
        change documents, and weights that nobody can find again, as those a state of another run has begun with, leave
        no way to compute them. With `reference = precomputed` they are a column of the data.
        """, 'dataset prefs { source = jsonl("prefs.jsonl"), chosen = "good", rejected = "bad" }\n'
        "loss dpo { reference = adapter_off }",
        'dataset prefs { source = jsonl("prefs.jsonl"), chosen = "good", rejected = "bad" }\n'
        "loss dpo { reference = initial }"),
    CodePage("X442", "probabilities of a model that gives rewards", """
        With a loss of rewards, as `bradley_terry`, the model has a head that gives each sequence one number, and none
        that gives tokens probabilities. Nothing can be generated with it, and no question with choices be answered.
        """, 'dataset pairs { source = jsonl("pairs.jsonl"), chosen = "chosen", rejected = "rejected" }\n'
        'loss bradley_terry\nevery 10 steps generate { prompts = ["Once"] }',
        'dataset pairs { source = jsonl("pairs.jsonl"), chosen = "chosen", rejected = "rejected", holdout = 5% }\n'
        'loss bradley_terry\nevery 10 steps eval pairs'),
    CodePage("X443", "products in fp8 that cannot be", """
        `compute = fp8` multiplies matrices of blocks whose widths on a rank are multiples of 16, on CUDA devices with
        such kernels: compute capability 8.9 or more, as Ada, Hopper and Blackwell have. A CPU does the same arithmetic
        with numbers of more bits, which is slow, and is for tests. Adapters and `base` change the same products in
        another way, `tile_mlp` multiplies some tokens at a time, where scales may be those of all, and schedules of a
        pipeline that split the backward would compute such products twice.
        """, "model qwen3 { dim = 72, layers = 2, heads = 9, head_dim = 8, ffn = 200 }\n"
        "precision { compute = fp8 { recipe = rowwise } }",
        "model qwen3 { dim = 64, layers = 2, heads = 8, head_dim = 8, ffn = 192 }\n"
        "precision { compute = fp8 { recipe = rowwise } }"),
    CodePage("X445", "further tokens that cannot be predicted", """
        Modules that predict further tokens (`mtp`) stand behind the last block and use its embedding and its head. They
        learn by the plain cross-entropy, with all of the model, from its first step on: not beside an adapter, parts
        that are frozen, a folder of a family whose files have none, rollouts, a step of your own, compiled blocks, or a
        schedule of a pipeline that splits the backward.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6, mtp = 1 }\nloss cross_entropy { focal = 2.0 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6, mtp = 1 }"),
    CodePage("X446", "products that cannot go on while pieces travel", """
        `tp { overlap = true }` lets torch.compile cut products of matrices into pieces, each computed while the next
        one travels between ranks, through memory that CUDA devices share. So blocks must be compiled, activations
        between them sharded by sequence, which makes the collectives that are cut, and the device one of CUDA.
        """, "launch { device = cuda }\nparallel { tp 2 { overlap = true } }",
        "launch { device = cuda }\nparallel { tp 2 { overlap = true } }\ncompile {}"),
    CodePage("X448", "kernels that are not the same each time", """
        `precision { deterministic = true }` takes algorithms alone that give the same numbers each time on the same
        machine. `compile { mode = max_autotune }` measures kernels when the run starts, and takes the fastest: another
        start may take another one.
        """, "precision { deterministic = true }\ncompile { mode = max_autotune }",
        "precision { deterministic = true }\ncompile {}"),
    CodePage("X447", "a server that cannot be", """
        A server trains adapters, so a spec with `serve` has `adapter`: the largest that a client may ask for. It
        listens on the machine itself; any other address needs `key`, the name of an environment variable with what
        clients must show. fsdp alone sums its gradients: over ranks of cp too, and not those of an embedding that is
        the head on another stage of a pipeline.
        """, 'serve { host = "0.0.0.0" }', 'serve { host = "0.0.0.0", key = "XTRAIN_KEY" }'),
    CodePage("X413", "cp is not ring · ulysses", """
        The ranks of context parallelism are ring · ulysses; if both are given, their product is the size.
        """, "parallel { cp 4 { ring = 2, ulysses = 4 } }", "parallel { cp 4 { ring = 2, ulysses = 2 } }"),
    CodePage("X414", "documents are not aligned", """
        A ring cuts every document into 2 · ring equal chunks, an early and a late one for each rank. Documents are
        padded to a multiple of `align` positions before they are packed, so `align` must be a multiple of 2 · ring and
        divide the length of a row. `auto` is the smallest such number; give a number to pack the same rows on another
        mesh.
        Padding behind the last document comes in segments of at most 1024 positions, and `align` cannot be longer.
        """, "parallel { cp 2 { ring = 2, ulysses = 1 } }\n"
        "collate = to_tensor -> flatten -> shift_tokens -> pack(align = 2)",
        "parallel { cp 2 { ring = 2, ulysses = 1 } }\n"
        "collate = to_tensor -> flatten -> shift_tokens -> pack(align = 4)"),
    CodePage("X415", "a stack with something that it does not support", """
        A stack may support some axes, formats and settings only: `xtrain docs --capabilities` lists which.
        `stack = ddp` keeps a full replica of the model on every rank and lets torch's DistributedDataParallel sum the
        gradients. It supports no other axes, no sharding and one number format. Leave `fsdp` auto, so that all ranks
        are replicas, or give their number: `fsdp auto { replicate = 4 }`. `stack = deepspeed` leaves the engine of
        DeepSpeed to cut what its stage says, and to change parameters: what needs whole gradients, or parameters
        outside of the model, does not work with it. docs/stacks.md says what each stage leaves. `stack = torchft` adds
        up losses and gradients over its replica groups, and nothing else: what ranks exchange besides, what goes back
        to a checkpoint, and files of each rank do not work with it.
        """, "parallel { stack = ddp, tp 2 }", "parallel { stack = ddp, fsdp auto { replicate = 2 } }"),
    CodePage("X416", "a zero-bubble schedule with an incompatible setting", """
        The schedules zero_bubble and zbv compute the gradients of weights later than those of activations. Parameters
        that `reshard` has freed in between lose their gradients without an error from torch, and the backward of a
        compiled block cannot be split. The backward of feed-forward layers in pieces (`tile_mlp`) computes both kinds
        together. zbv places the first and the last stage on the same rank, where a tied embedding
        would have to be part of both.
        """, "batch { sequence = 512, accumulate = 8 }\n"
        "parallel { pp 2 { schedule = zbv }, fsdp auto { reshard = true } }",
        "batch { sequence = 512, accumulate = 8 }\nparallel { pp 2 { schedule = zbv }, fsdp auto }"),
    CodePage("X417", "offload on a CPU", """
        `offload` keeps parameters, gradients and optimizer state in host memory and copies them to the CUDA device
        block by block. On a CPU they are in host memory already.
        """, "launch { device = cpu }\nparallel { fsdp auto { offload = true } }",
        "launch { device = cuda }\nparallel { fsdp auto { offload = true } }"),
    CodePage("X418", "recomputation that changes nothing", """
        With `every = n` every n-th block is recomputed, so n is at most the number of layers. `save` names operations
        whose results selective recomputation keeps; the blocks must have them: there is an all_to_all only with ep or
        ulysses. `tile_mlp` cuts feed-forward layers without experts into at most as many pieces as a rank has
        positions.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6 }\nactivation full { every = 5 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nactivation full { every = 2 }"),
    CodePage("X419", "an attention kernel that cannot be used here", """
        flex has no backward on a CPU, and on CUDA no kernel for heads of less than 16. blocks, plain products of 64
        queries at a time, is made for a CPU, in fp32 and fp64 and not compiled. The kernels blocks, flex and mask need
        whole rows, and ring attention exchanges parts of rows: with a ring use `attention` auto or documents.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6, attention = mask }\nparallel { cp 2 { ring = 2 } }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { cp 2 { ring = 2 } }"),
    CodePage("X420", "widths cannot be divided among tp ranks", """
        Tensor parallelism splits the feed-forward layers evenly: `ffn` must be a multiple of tp. The vocabulary may be
        split unevenly, as long as every rank has some rows and torch can combine it with fsdp shards; rounding `vocab`
        up to a multiple of tp always works, and the additional ids are then never used.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6, ffn = 511 }\nparallel { tp 2 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6, ffn = 512 }\nparallel { tp 2 }"),
    CodePage("X427", "gradients of a pipeline are summed once a step", """
        With `sync = microbatch` gradients are summed over ranks after every microbatch. Pipeline schedules sum them
        once, after the last microbatch of the step.
        """, "parallel { pp 2, fsdp auto { sync = microbatch } }", "parallel { pp 2, fsdp auto }"),
    CodePage("X428", "elastic without an axis that is auto", """
        With `elastic` a run can continue on fewer ranks; the size of fsdp, if it is `auto`, then follows from the
        number of ranks. If every axis has a fixed size, their product is the only possible number of ranks.
        """, "parallel { fsdp 4 }\nfault_tolerance { restarts = 3, elastic = 2..4 }",
        "parallel { fsdp auto }\nfault_tolerance { restarts = 3, elastic = 2..4 }"),
    CodePage("X429", "the declared number of ranks is outside the elastic range", """
        `elastic` gives all numbers of ranks that a run may have, including the one it starts with. The number that
        `--world` or `launch` gives must be one of them.
        """, "launch { nodes = 1, ranks_per_node = 8 }\nfault_tolerance { restarts = 3, elastic = 2..4 }",
        "launch { nodes = 1, ranks_per_node = 8 }\nfault_tolerance { restarts = 3, elastic = 2..8 }"),
    CodePage("X430", "fewer than two numbers of ranks of the range work", """
        For each number of ranks in the range a plan with the same rows in a step is needed: the number must be a
        multiple of the axes with a fixed size, the rows must divide evenly into microbatches on its data ranks, and
        everything else that a plan needs must hold. Numbers without a plan are left out, `xtrain plan` says why, and at
        least two must remain. A range may have at most 65,536 numbers.
        """, "batch { sequence = 512, rows = 8 }\nfault_tolerance { restarts = 3, elastic = 5..7 }",
        "batch { sequence = 512, rows = 8 }\nfault_tolerance { restarts = 3, elastic = 4..8 }"),
    CodePage("X431", "a step of your own on a pipeline", """
        With `pp` above 1 the schedule of the pipeline decides which microbatch goes forward and backward through which
        stage. A function that takes the place of the forward of a step (`step`, `evaluation_step`) takes whole
        microbatches through the whole model, so it needs pp 1.
        """),
    CodePage("X421", "the cluster is smaller than the run", """
        `cluster` says how many machines there are and how many devices each has, and the run needs more than that: use
        fewer ranks, or correct the cluster.
        """, "cluster h100 { nodes = 1, devices = 8 }\nparallel { fsdp 16 }",
        "cluster h100 { nodes = 2, devices = 8 }\nparallel { fsdp 16 }"),
    CodePage("X422", "the cluster has other devices than the run asks for", """
        A preset of `cluster` names the device of its machines, and `launch.device` asks for one of another kind.
        """, "cluster h100 { nodes = 1 }\nlaunch { device = cpu }", "cluster h100 { nodes = 1 }"),
    CodePage("X601", "rows is not micro · accumulate · data ranks", """
        A step takes micro · accumulate · data ranks rows. If `rows` is given as well, it must be that product. With
        `ramp_from`, the rows of the first step, these must be fewer, and a multiple of micro · data ranks as well.
        """, "batch { sequence = 512, micro = 8, accumulate = 1, rows = 30 }",
        "batch { sequence = 512, micro = 8, rows = 32 }"),
    CodePage("X602", "warm-up and decay are longer than the training", """
        Warm-up and decay of the learning rate have to fit into the budget. If one of them is given in epochs, this is
        checked by the plan if the tokenized data is in the cache, and otherwise by the run before its first step, which
        then ends with exit code 3. The `ramp` of `batch` must fit into the budget, too.
        """, "experiment try { budget = 100 steps }\nscheduler cosine { warmup = 200 steps }",
        "experiment try { budget = 1k steps }\nscheduler cosine { warmup = 200 steps }"),
    CodePage("X605", "a stop event that does not stop the run", """
        Whoever sends a signal (a scheduler, a launcher, a person) will end the processes soon anyway, and a limit must
        be kept. The actions of these events must end with `stop`, so that the run stops in time and nothing is lost.
        """, "on sigterm checkpoint", "on sigterm checkpoint then stop"),
    CodePage("X606", "two phases begin with the same step", """
        Each phase lasts until the next one begins. If two phases begin with the same step, the first has no steps.
        """, "phase warm { from = 10%, lr_scale = 0.5 }\nphase cool { from = 10%, lr_scale = 0.1 }",
        "phase warm { from = 10%, lr_scale = 0.5 }\nphase cool { from = 80%, lr_scale = 0.1 }"),
    CodePage("X607", "a phase begins when the run has ended", """
        The start of a phase lies at or after the end of the budget, so that the phase has no steps. If the start is
        given in epochs, this may be found by the run, once its data is counted (see X602).
        """, "experiment try { budget = 100 steps }\nphase anneal { from = 200 steps, lr_scale = 0.5 }",
        "experiment try { budget = 100 steps }\nphase anneal { from = 90%, lr_scale = 0.5 }"),
    CodePage("X610", "a trigger that can never occur", """
        `time_limit`, `stop_at` and `stop_file` are settings of `launch`, and the events of these names occur only where
        they are set. Without the setting the trigger would never run.
        """, "on time_limit checkpoint then requeue then stop",
        "launch { time_limit = 4 h }\non time_limit checkpoint then requeue then stop"),
    CodePage("X611", "requeue out of place", """
        `requeue` asks Slurm to requeue the job, and Slurm ends the job as soon as it is asked. `requeue` must be the
        last action before `stop`, on an event that stops the run.
        """, "on sigusr1 requeue then checkpoint then stop", "on sigusr1 checkpoint then requeue then stop"),
    CodePage("X612", "wrong actions for non-finite steps", """
        `on nan(n)` has exactly one of these actions: `skip` skips such steps and ends the run as failed at the n-th in
        a row, `rollback` goes back to the last good checkpoint, `stop` ends the run as failed. `skip` and `rollback`
        are allowed nowhere else. `checkpoint` is not allowed there: the weights may be damaged, and the last checkpoint
        before must stay the latest.
        """, "on nan checkpoint then stop", "on nan(3) rollback"),
    CodePage("X613", "a rollback in a run that saves nothing", """
        `on nan rollback` goes back to a checkpoint of the run, and `checkpoint.enabled` is false.
        """, "checkpoint { enabled = false }\non nan(3) rollback", "on nan(3) rollback"),
    CodePage("X614", "a profile without steps to record", """
        A profile, and the history of a memory snapshot, record the steps that follow. After `stop`, and on `finish`, a
        signal or a limit, no steps follow.
        """, "on finish profile", "every 500 steps profile"),
    CodePage("X615", "two profiles at once", """
        A profile takes wait + warmup + active steps, and a process can record one profile at a time. The period of a
        profile must be at least that long, and two ticks must not profile at the same time. If the ticks depend on the
        clock, the run skips the later profile with a warning.
        """, "every 4 steps profile { active = 8 }", "every 100 steps profile { active = 8 }"),
    CodePage("X617", "an action other than notify on stalled", """
        Only `notify` can follow `on stalled`: every other action runs on all ranks together, and here some ranks do not
        respond. `fault_tolerance { stuck }` says when such a run is ended, and `restarts` how often it is then
        restarted.
        """, "on stalled checkpoint", 'on stalled notify("./page-me.sh")'),
    CodePage("X620", "a best checkpoint by a metric that is not measured", """
        `best` selects by the loss on the held-out part of a dataset, and a tick has to measure it: `eval` of that
        dataset, in steps in which a checkpoint is saved.
        """, "checkpoint { best = eval.web.loss }  # and no `every … eval web`",
        "every 500 steps eval web then checkpoint\ncheckpoint { best = eval.web.loss }"),
    CodePage("X640", "a sweep that cannot be", """
        A sweep varies settings of the experiment, and needs an objective that its trials measure: the loss on what a
        dataset held out, evaluated by a tick. A grid needs to know how many values of a range it tries. `method asha`
        compares trials at budgets before their end, the first of them not before the first evaluation. Where trials lie
        and how long they train, the sweep says itself.
        """, "sweep {\n  optimizer.lr in log(1e-4, 1e-2)\n  method grid\n  objective = eval.web.loss\n}",
        "sweep {\n  optimizer.lr in log(1e-4, 1e-2, 5)\n  method grid\n  objective = eval.web.loss\n}"),
    CodePage("X641", "a point of a sweep that has no plan", """
        Every point that a sweep is known to try is planned before a trial begins: all of a grid and of a random search,
        and the ends of the dimensions where later points follow from results. The note says why the point has no plan,
        with the code of that.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6 }\nsweep { model.heads in [6, 7] }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nsweep { model.heads in [6, 8] }"),
    CodePage("X621", "a checkpoint of one file with several ranks", """
        With `backend = file` one process writes the whole checkpoint into one file. With several ranks each holds a
        part of the state, and with `dcp` each rank writes its own part; a run on any number of ranks can resume from a
        checkpoint of either backend.
        """, "parallel { fsdp 2 }\ncheckpoint { backend = file }",
        "parallel { fsdp 2 }\ncheckpoint { backend = dcp }"),
    CodePage("X622", "a name that W&B does not accept", """
        A project has no `/`, `\\`, `#`, `?`, `%` or `:` in its name, no name has more than 128 characters, and a tag
        has 1 to 64. W&B would refuse it after the run has started.
        """, 'log { wandb { project = "team/llama" } }', 'log { wandb { project = "llama", entity = "team" } }'),
    CodePage("X460", "a launcher with a wrong setting", """
        A setting of `launcher` is not written as it has to be, or does not go with another one. A job of Slurm needs
        more time than the run has to save and stop at its end; pods of Kubernetes need a volume for the runs.
        """, "launcher slurm { time = 5 min }", "launcher slurm { time = 4 h }"),
    CodePage("X461", "a job cannot be submitted, found or cancelled", """
        `xtrain launch` and `xtrain runs` call the commands of Slurm (`sbatch`, `squeue`, `scancel`) or `kubectl`. One
        of them is not installed here, does not answer, or refuses; the message has what it says. `xtrain launch --dry`
        only prints what would be submitted.
        """),
    CodePage("X702", "a device is missing", """
        The run needs a device that this machine does not have, or more devices than it has.
        """),
    CodePage("X703", "the wrong number of ranks", """
        The number of processes that were started is not the world size of the plan. A process that finds RANK,
        WORLD_SIZE and MASTER_ADDR in its environment is a rank that another launcher has started, also where these were
        left over in a shell: unset them there.
        """),
    CodePage("X704", "a plan that cannot be used", """
        The file is missing, is not a plan, has the format of another version, or its content is no longer what its id
        says. Plans are not edited: change the spec and plan it again.
        """),
    CodePage("X705", "a checkpoint does not fit the plan", """
        The checkpoint holds the state of another model, of a wider number format, or of other data. The message says
        what differs; `xtrain diff RUN SPEC` reports the same before a run is started. Of a server: its directory has
        the models of clients over another model, another adapter or another seed.
        """),
    CodePage("X706", "the run directory cannot be written", """
        The run directory below `workspace.root` cannot be created or written: permissions, a full disk, or a file in
        its place. `xtrain checkpoint prune RUN --keep 1 --yes` frees disk space by removing old checkpoints. The doctor
        says the same of `parallel.deepspeed.nvme_path`.
        """),
    CodePage("X707", "another process runs in the run directory", """
        The same experiment is running already, or has a job that waits. Wait until it ends, or give this run another
        name with `workspace.run`. Trials of a sweep that have jobs go on with `xtrain launch`, or once these are
        cancelled.
        """),
    CodePage("X708", "no checkpoint yet", """
        The run has not saved a checkpoint that can be used.
        """),
    CodePage("X709", "an environment variable is not set, or has no keys", """
        `env("NAME")` without a default needs the variable. Give a default as the second argument. A plan that shows
        `env(NAME)` needs the variable on every machine of the run.
        """, 'workspace { root = env("NO_SUCH_VARIABLE") }', 'workspace { root = env("NO_SUCH_VARIABLE", "runs") }'),
    CodePage("X710", "the spec has changed since the plan was made", """
        The spec of a saved plan, planned again in the same way, now gives another plan. The notes name the values that
        differ. Plan the spec again, or run the saved plan unchanged with `--accept-drift`. What a spec reads, such as a
        tokenizer or an environment variable, counts as part of the spec.
        """),
    CodePage("X711", "xtrain has changed since the plan was made", """
        The plan was made by xtrain with other source files: the same nodes may now be executed differently, and the
        spec may give another plan. Plan the spec again, or run the saved plan unchanged with `--accept-drift`.
        """),
    CodePage("X712", "a device has less memory than the plan counts on", """
        The devices of this machine have less memory than `cluster` says; or the parameters, gradients and optimizer
        states of a rank alone are larger than the memory of a device.
        """),
    CodePage("X714", "data workers keep dying", """
        With `workers` in `batch`, separate processes read the data. A worker that dies is replaced and nothing is lost,
        but here three in a row died at the same step. They may have run out of memory, or a collator of yours ends its
        process. The log of the rank says more; with `workers = 0` the rank itself reads the data.
        """),
    CodePage("X715", "a package is missing, too old, or cannot be loaded", """
        `log` needs a package that is not installed: `pip install 'xtrain[tensorboard]'` for TensorBoard event files,
        `pip install 'xtrain[wandb]'` for Weights & Biases. `stack = deepspeed` needs `pip install 'xtrain[deepspeed]'`,
        `stack = torchft` needs `pip install 'xtrain[torchft]'`, also where the spec is planned. What DeepSpeed offloads
        to nvme goes through code that it compiles at the first start, with libaio, a C++ compiler, ninja, and the CUDA
        toolkit on GPUs; or a build of it that was killed has left a lock, which the message names, that all later
        starts would wait for. The pipeline schedules `zero_bubble` and `zbv` need torch 2.13, as a backward
        in two parts fails with earlier ones. Or a component comes with an
        installed package, and the package's module that runs it cannot be imported: the message has the module and the
        reason.
        """),
    CodePage("X716", "the ranks do not find each other", """
        Ranks that another launcher has started meet at MASTER_ADDR and MASTER_PORT before they begin. Nothing answers
        there, the name does not resolve within a minute, the first rank has ended, or others have not come half an hour
        after it was ready. What stands above it on the screen, or in the log of the rank that is missing, says why; see
        also whether every machine reaches that address, and whether another program has the port. Ranks of one machine
        meet at a loopback address and need no name.
        """),
    CodePage("X720", "there is no such checkpoint", """
        `checkpoint.from`, `checkpoint.pretrained` or a command names a path, and there is no intact checkpoint: the
        path must be a folder `ckpt-s…` or `model-s…`, one of the pointers beside them, or a run that has a checkpoint.
        The planner reports a path that holds something else; the run reports a missing or damaged checkpoint.
        """),
    CodePage("X721", "a checkpoint could not be written", """
        The disk is full, cannot be written to, or failed. Earlier checkpoints are untouched and the half-written folder
        is removed. Training continues and the next save tries again, until `checkpoint.failures` saves in a row have
        failed; at the end of a run and on a signal a save has to succeed. Free some disk space and run the same command
        again: the run resumes from its last checkpoint. With a smaller `checkpoint.keep` it first removes old
        checkpoints; `xtrain checkpoint prune RUN --keep 1 --yes` does so without starting the run.
        """),
    CodePage("X722", "nothing is left to train", """
        The checkpoint that the run would start from has already reached the step at which the budget ends. The budget
        counts from step 0, also for a run that starts from another run's checkpoint: use a larger budget. To start from
        the weights alone, use `checkpoint.pretrained`; to end a run where it is, set its budget to the step of its
        checkpoint. A run that has ended can be started again: it reports this and exits.
        """),
    CodePage("X723", "a model could not be exported", """
        There is something at the path already, the disk is full or fails, or the checkpoint lacks what was asked for:
        it has no averaged weights, a value is NaN, or too large for the number format. Nothing is left under the name
        of the folder. What an export that was killed has left beside it, `….partial`, is removed by the next one.
        """),
    CodePage("X730", "a disk has too little room for a run", """
        `xtrain doctor` compares what is free below `workspace.root` with the checkpoints that the run keeps at the same
        time, without those that it has already. `xtrain plan` shows how much that is. What is free below
        `parallel.deepspeed.nvme_path` is compared with what DeepSpeed offloads to nvme, also when a rank starts.
        """),
    CodePage("X731", "the locks of a file system do not work", """
        A run directory is locked, so that no two processes write to it. Below `workspace.root` the file system refuses
        locks, or gives the same one to two processes. Mount it with locks, or set `workspace.root` to another one.
        """),
    CodePage("X732", "machines do not reach each other", """
        `xtrain doctor` was started on several machines, and one of them does not answer another, or no number can be
        summed over all of them with gloo or NCCL. Ranks connect to each other on ports that the kernel chooses: all TCP
        ports have to be open between the machines, on the network that `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`
        name, or that the names of the machines lead to. Gloo takes the address of a machine's own name: where the name
        does not resolve, or leads to a loopback address, a run on several machines and the doctor report it.
        """),
    CodePage("X733", "the driver is too old for torch", """
        Each release of CUDA needs a driver of NVIDIA that is not older than a certain one, and torch is built for one
        release. Install a newer driver, or a torch that is built for an older CUDA.
        """),
    CodePage("X734", "the tokenizer does not fit the model", """
        The tokenizer has more ids than the model of the plan, so that it is not the one that was planned with; or the
        weights that the run begins with come with a tokenizer that gives other ids to the same text.
        """),
    CodePage("X735", "machines have different versions", """
        Torch, xtrain, Python or the driver differ between the machines of a run. Ranks that exchange tensors have to
        compute the same: install the same on all of them.
        """),
    CodePage("X736", "shared memory (/dev/shm) is too small", """
        NCCL exchanges tensors between devices of a machine through `/dev/shm` where these do not reach each other
        directly. Containers have 64 MiB there unless they are started with more, such as `--shm-size=1g`.
        """),
    CodePage("X737", "a machine has too little memory for its ranks", """
        On CPUs, ranks take all of their memory from the machine; on GPUs, what is offloaded, and copies of checkpoints
        that are being written. It is compared with what the kernel has to give and with the limit of the job's control
        group, as a scheduler or a container sets it.
        """),
    CodePage("X738", "a limit on open files or processes is too low", """
        A rank opens a connection to each other rank of its groups, files of its data, pipes to its workers, and starts
        threads; the limits of this user or container (`ulimit -n`, `ulimit -u`, pids of a control group) leave too few.
        `xtrain run` and `xtrain doctor` compare them with what the plan needs, with room, and raise the soft limit of
        open files up to the hard one. A limit that is met later, as other processes start, has this code too.
        """),
    CodePage("X739", "the clock of a machine is wrong", """
        The clock is before 2020 or after 2200. Waits, records and times of files are computed with it, and numbers of
        nanoseconds end in the year 2262. A clock that was set while a run trained has no effect on what it learns.
        """),
    CodePage("W401", "a setting that changes nothing here", """
        Because of other settings this setting has no effect: for instance, it concerns an axis of size 1, gradient
        reduction where nothing is sharded, saving where nothing is saved, the width of a layer that the model does not
        have, the decay of a constant learning rate, fp32 products where all are fp64, or a GPU feature on a CPU; or a
        mixture has one dataset, or a phase has the shares and the learning rate of the phase before it, or a dataset
        gives numbers that the loss does not read. The run learns the same without the setting.
        """, "parallel { tp 1 { loss = false } }", "parallel { tp 2 { loss = false } }"),
    CodePage("W423", "a device has too little memory for the run", """
        The rank that needs most memory would need more than a device has, or leave less than 8 % free, which
        fragmentation or uneven expert load can use up after days. The figures are estimates; `xtrain plan --trace`
        gives exact ones. The hint names settings that were tried: with each of them the run would fit.
        """, "cluster h100 { devices = 1 }\nmodel llama { dim = 4Ki, layers = 32, heads = 32 }",
        "cluster h100 { devices = 8 }\nmodel llama { dim = 4Ki, layers = 32, heads = 32 }"),
    CodePage("W424", "a large pipeline bubble", """
        The ranks of a pipeline are idle while it fills and drains, here for more than a fifth of a step. More
        microbatches make this bubble smaller, and so do several stages on a rank: with p ranks, v stages on each and m
        microbatches it is (p - 1) / (v · m + p - 1) of a step.
        """, "cluster h100 { devices = 8 }\nbatch { sequence = 512, accumulate = 8 }\nparallel { pp 8, fsdp 1 }",
        "cluster h100 { devices = 8 }\nbatch { sequence = 512, accumulate = 64 }\nparallel { pp 8, fsdp 1 }"),
    CodePage("W425", "tensor parallel between machines", """
        Tensor parallelism exchanges activations in every layer and waits for them. Inside a machine links are about ten
        times as fast as between machines: keep tp inside a machine and use fsdp or pp for the remaining ranks.
        """, "launch { nodes = 2, ranks_per_node = 2 }\nparallel { tp 4, fsdp auto }",
        "launch { nodes = 2, ranks_per_node = 2 }\nparallel { tp 2, fsdp auto }"),
    CodePage("W426", "tensor parallel that is not needed", """
        The run fits with fsdp alone, and a step would be faster: tensor parallelism makes matrix products smaller and
        waits for communication in each layer, which costs 15 to 20 points of MFU in published runs of models that fit
        without it.
        """, "cluster h100 { devices = 8 }\nparallel { tp 2, fsdp auto }",
        "cluster h100 { devices = 8 }\nparallel { fsdp auto }"),
    CodePage("W431", "elastic without restarts", """
        A run continues on fewer ranks when it is restarted, and `restarts` is 0. `elastic` then has an effect only if
        torchrun or Slurm start the same command with another number of ranks, or if there are fewer devices than ranks
        when the command starts.
        """, "fault_tolerance { elastic = 2..4 }", "fault_tolerance { restarts = 3, elastic = 2..4 }"),
    CodePage("W432", "more failures than restarts", """
        By `cluster.mtbf` devices of the run are expected to fail more often than `xtrain run` starts it again, or no
        checkpoint is saved on the way, so that a failure loses everything, or failures come so often that next to
        nothing of the time trains. If torchrun, Slurm or Kubernetes start the command again, nothing is wrong with the
        first of these.
        """, "experiment try { budget = 1T tokens }\ncluster h100 { devices = 1, mtbf = 200 h }",
        "experiment try { budget = 1T tokens }\ncluster h100 { devices = 1, mtbf = 200 h }\n"
        "fault_tolerance { restarts = 1000 }"),
    CodePage("W601", "a tick that never fires", """
        The period is longer than the whole run; or the action is a profile, and the run has no step left to record.
        """, "experiment try { budget = 100 steps }\nevery 200 steps log",
        "experiment try { budget = 100 steps }\nevery 20 steps log"),
    CodePage("W602", "a best checkpoint that is never found", """
        A checkpoint can only be the best if its own state was evaluated, so `eval` and `checkpoint` have to come in the
        same step. With these periods they never do.
        """, "experiment try { budget = 100 steps }\nevery 9 steps eval web\nevery 20 steps checkpoint\n"
        "checkpoint { best = eval.web.loss }",
        "experiment try { budget = 100 steps }\nevery 10 steps eval web\nevery 20 steps checkpoint\n"
        "checkpoint { best = eval.web.loss }"),
    CodePage("W603", "a stop that is never reached", """
        `stop_at` and `stop_after` of `launch` stop a run before its budget is used up. Here the budget is used up
        first.
        """, "experiment try { budget = 100 steps }\nlaunch { stop_at = 200 steps }",
        "experiment try { budget = 100 steps }\nlaunch { stop_at = 50 steps }"),
    CodePage("W608", "a checkpoint that has reached the end of the run", """
        The checkpoint of `checkpoint.from` has reached the step at which the budget or `launch.stop_at` ends: its steps
        count. A run that starts there is refused (X722).
        """, 'experiment try { budget = 5 steps }\ncheckpoint { from = "runs/a/b/checkpoints/ckpt-s000000000034" }',
        'experiment try { budget = 39 steps }\ncheckpoint { from = "runs/a/b/checkpoints/ckpt-s000000000034" }'),
    CodePage("W604", "a rollback with little to go back to", """
        `on nan rollback` goes back to a checkpoint that was saved during the run. Either none is saved, or only one is
        kept: if that one is already affected, there is no older one.
        """, "checkpoint { keep = 1 }\non nan(3) rollback", "checkpoint { keep = 3 }\non nan(3) rollback"),
    CodePage("W605", "an average that is never updated", """
        `ema { every }` is longer than the whole run, so that there are no averaged weights: the trained weights are
        evaluated and published instead.
        """, "experiment try { budget = 100 steps }\nema { every = 200 }",
        "experiment try { budget = 100 steps }\nema { every = 5 }"),
    CodePage("W606", "a stuck timeout that is too short", """
        A rank reports progress once per microbatch, and in a pipeline once per step. Here this is likely to take longer
        than `stuck`, after which ranks count as stuck and the run is ended: use a longer time.
        """, "cluster cpu { flops = 100G, link = 10 GiB, network = 1 GiB }\n"
        "batch { sequence = 4Ki, micro = 64 }\nfault_tolerance { stuck = 1 s }",
        "cluster cpu { flops = 100G, link = 10 GiB, network = 1 GiB }\n"
        "batch { sequence = 4Ki, micro = 64 }\nfault_tolerance { stuck = 30 min }"),
    CodePage("W607", "an alert that is never raised", """
        After `fault_tolerance.stuck` without progress the run is ended, so the alert `stalled` must come earlier. By
        default it is raised after 60 s, or after half of `stuck` if that is shorter.
        """, "fault_tolerance { stuck = 5 min }\nalerts { stalled = 10 min }",
        "fault_tolerance { stuck = 20 min }\nalerts { stalled = 10 min }"),
    CodePage("W705", "the spec of a plan cannot be compared", """
        A saved plan contains its spec and can be run anywhere. The file of the spec is not at the path that the plan
        names, or the plan does not say how it was made, so that the two cannot be compared.
        """),
    CodePage("W706", "a plan is run in spite of drift", """
        The spec or xtrain itself has changed since the plan was made, and with `--accept-drift` the plan is run
        unchanged.
        """),
    CodePage("W707", "the machine is not the planned one", """
        The plan can run here, but its estimates were made for other devices.
        """),
    CodePage("W708", "the clocks of machines differ", """
        The records of ranks are put in the order of their times. Have the clocks of all machines set by a time server.
        """),
    CodePage("W709", "a disk is slow for the checkpoints of a run", """
        A run that is asked to stop has `launch.stop_deadline` for its last checkpoint. At the speed that
        `xtrain doctor` has measured, with one process that writes, a checkpoint takes longer. Several ranks may write
        faster together.
        """),
    CodePage("W710", "nothing can be compiled for a GPU", """
        `attention = flex`, which `auto` is on CUDA, and `compile` make kernels with Triton in the first step of a run,
        which calls a C compiler (`CC`, gcc or clang) and needs the headers of Python. Slim containers have neither.
        What another run has compiled is found in Triton's cache.
        """),
)  # fmt: skip
