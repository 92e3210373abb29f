"""Pages of what is found when a spec is planned or run: X4xx topology, X6xx budget, X7xx environment."""

from typing import Final

from .page import Code

PAGES: Final = (
    Code("X401", "the axes do not give the world size", """
        The world is pp · replicate · fsdp · ring · ulysses · tp ranks, spread evenly over the nodes. With `fsdp auto`
        the remaining ranks go to fsdp, and the other axes must divide the world; with fixed sizes their product must be
        the world.
        """, "launch { nodes = 1, ranks_per_node = 8 }\nparallel { tp 3, fsdp auto }",
        "launch { nodes = 1, ranks_per_node = 8 }\nparallel { tp 2, fsdp auto }"),
    Code("X402", "heads cannot be divided among tp or ulysses ranks", """
        Tensor parallelism gives each rank whole heads, and ulysses exchanges whole heads: `heads` must be a multiple of
        tp, and the heads of one rank a multiple of ulysses.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { tp 4 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { tp 2 }"),
    Code("X403", "key and value heads cannot be divided among tp or ulysses ranks", """
        `kv_heads` must be a multiple of tp, because each rank holds whole key and value heads. Those of one rank must
        be a multiple of ulysses, or ulysses a multiple of them: fewer heads than ranks are copied, each to equally
        many.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6, kv_heads = 3 }\nparallel { tp 2 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6, kv_heads = 2 }\nparallel { tp 2 }"),
    Code("X404", "layers and pipeline stages do not fit", """
        Each of the pp · stages_per_rank stages needs at least one layer. If `layers` lists them, the list has a number
        for every stage, and they add up to the layers of the model. The schedule must be one that can run so many
        stages on a rank: gpipe and 1f1b run one, zbv two, interleaved_1f1b and zero_bubble any number.
        """, "model qwen3 { dim = 192, layers = 2, heads = 6 }\nparallel { pp 4 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { pp 4 }"),
    Code("X405", "the sequence cannot be divided", """
        With `tp N { sequence = true }`, and with experts in any case, the length of a row must be a multiple of tp;
        context parallelism cuts it into 2 · ring parts for balance, each divided by ulysses.
        """, "batch { sequence = 513 }\nparallel { tp 2 }", "batch { sequence = 512 }\nparallel { tp 2 }"),
    Code("X406", "experts cannot be divided among ep ranks", """
        Expert parallelism gives each rank whole experts: `experts` must be a multiple of ep.
        """, "parallel { ep 3 }  # with experts = 8", "parallel { ep 4 }  # with experts = 8"),
    Code("X407", "ep does not fit into the ranks of a replica", """
        ep counts no ranks of its own: it is laid over fsdp · ring · ulysses · tp and must divide that product.
        """, "parallel { ep 8, fsdp 4 }", "parallel { ep 4, fsdp 4 }"),
    Code("X408", "the widths of attention do not fit", """
        `dim` must be a multiple of `heads` unless `head_dim` is given; the width of a head must be even, for rotary
        positions; `heads` must be a multiple of `kv_heads`.
        """, "model qwen3 { dim = 100, layers = 4, heads = 6 }", "model qwen3 { dim = 192, layers = 4, heads = 6 }"),
    Code("X409", "experts on a dense model", """
        Expert parallelism spreads experts over ranks, and only the families qwen3_moe and mixtral have experts.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { ep 2 }",
        "model qwen3_moe { dim = 192, layers = 4, heads = 6, experts = 8 }\nparallel { ep 2 }"),
    Code("X410", "more than one axis is auto", """
        `auto` takes the ranks that the other axes leave over, so only one axis can be auto.
        """, "parallel { fsdp auto, pp auto }", "parallel { fsdp auto, pp 2 }"),
    Code("X411", "microbatches that the pipeline cannot run", """
        A pipeline needs at least as many microbatches in a step as it has ranks, or some would never work. The
        schedules interleaved_1f1b and zero_bubble run them in n // pp rounds, which must be of equal size; those of a
        multiple of pp always are.
        """, "batch { sequence = 512, accumulate = 2 }\nparallel { pp 4 }",
        "batch { sequence = 512, accumulate = 8 }\nparallel { pp 4 }"),
    Code("X412", "more experts for a token than there are", """
        A token is sent to different experts, so `experts_per_token` is at most `experts`.
        """, "model mixtral { dim = 192, layers = 4, heads = 6, experts = 2, experts_per_token = 4 }",
        "model mixtral { dim = 192, layers = 4, heads = 6, experts = 8, experts_per_token = 2 }"),
    Code("X413", "cp is not ring · ulysses", """
        The ranks of context parallelism are ring · ulysses; if both are given, their product is the size.
        """, "parallel { cp 4 { ring = 2, ulysses = 4 } }", "parallel { cp 4 { ring = 2, ulysses = 2 } }"),
    Code("X414", "documents are not aligned", """
        A ring cuts every document into 2 · ring equal chunks, an early and a late one for each rank. Documents are
        padded to a multiple of `align` positions before they are packed, so `align` must be a multiple of 2 · ring and
        divide the length of a row. Auto is the smallest that fits; give it to pack the same rows on another mesh.
        Padding behind the last document comes in segments of at most 1024 positions, and `align` cannot be longer.
        """, "parallel { cp 2 { ring = 2, ulysses = 1 } }\n"
        "collate = to_tensor -> flatten -> shift_tokens -> pack(align = 2)",
        "parallel { cp 2 { ring = 2, ulysses = 1 } }\n"
        "collate = to_tensor -> flatten -> shift_tokens -> pack(align = 4)"),
    Code("X415", "more than copies with the stack ddp", """
        `stack = ddp` keeps a whole copy of the model on every rank and lets torch's DistributedDataParallel sum the
        gradients. It has no other axes, shards nothing and knows one number format. Leave `fsdp` auto: all ranks are
        copies, or say how many with `fsdp auto { replicate = 4 }`.
        """, "parallel { stack = ddp, tp 2 }", "parallel { stack = ddp, fsdp auto { replicate = 2 } }"),
    Code("X416", "a zero-bubble schedule with something it breaks", """
        The schedules zero_bubble and zbv compute the gradients of weights apart from those of activations, and later.
        Parameters that `reshard` has freed in between lose their gradients without a word from torch, and compiled
        blocks cannot be taken apart. zbv brings the last stage back to the rank of the first one, where a tied
        embedding would have to be part of both.
        """, "batch { sequence = 512, accumulate = 8 }\n"
        "parallel { pp 2 { schedule = zbv }, fsdp auto { reshard = true } }",
        "batch { sequence = 512, accumulate = 8 }\nparallel { pp 2 { schedule = zbv }, fsdp auto }"),
    Code("X417", "nothing to offload from", """
        `offload` keeps parameters, gradients and optimizer state in host memory and brings them to a cuda device block
        by block. On a cpu they lie there already.
        """, "launch { device = cpu }\nparallel { fsdp auto { offload = true } }",
        "launch { device = cuda }\nparallel { fsdp auto { offload = true } }"),
    Code("X418", "recomputation that changes nothing", """
        `every` chooses one block of so many neighbours, so it is at most the number of layers. `save` names what a
        selective recomputation keeps, something that blocks of this model and mesh have: an all_to_all is there with ep
        or ulysses.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6 }\nactivation full { every = 5 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nactivation full { every = 2 }"),
    Code("X419", "an attention kernel that cannot be used here", """
        flex has no backward on a cpu. The kernels flex and mask look at whole rows; a ring passes parts of rows around
        and has a block kernel of its own, which goes document by document: `attention` auto or documents stands for it.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6, attention = mask }\nparallel { cp 2 { ring = 2 } }",
        "model qwen3 { dim = 192, layers = 4, heads = 6 }\nparallel { cp 2 { ring = 2 } }"),
    Code("X420", "widths cannot be divided among tp ranks", """
        Tensor parallelism cuts the feed-forward layers evenly: `ffn` must be a multiple of tp. The rows of the
        vocabulary may be uneven, as long as every rank has some, and fsdp shards of them can be told apart again; a
        vocabulary that is a multiple of tp always works, and its last ids are then never used.
        """, "model qwen3 { dim = 192, layers = 4, heads = 6, ffn = 511 }\nparallel { tp 2 }",
        "model qwen3 { dim = 192, layers = 4, heads = 6, ffn = 512 }\nparallel { tp 2 }"),
    Code("X427", "gradients of a pipeline are summed once a step", """
        With `sync = microbatch` gradients are summed over ranks after every microbatch. The schedules of a pipeline
        let go of several microbatches in turn and sum when the last one is done.
        """, "parallel { pp 2, fsdp auto { sync = microbatch } }", "parallel { pp 2, fsdp auto }"),
    Code("X421", "the cluster is smaller than the run", """
        `cluster` says how many machines there are and how many devices each has. The run needs more of them than
        that: use fewer ranks, or correct the cluster.
        """, "cluster h100 { nodes = 1, devices = 8 }\nparallel { fsdp 16 }",
        "cluster h100 { nodes = 2, devices = 8 }\nparallel { fsdp 16 }"),
    Code("X422", "the cluster has other devices than the run asks for", """
        A preset of `cluster` names the device of its machines, and `launch.device` asks for one of another kind.
        """, "cluster h100 { nodes = 1 }\nlaunch { device = cpu }", "cluster h100 { nodes = 1 }"),
    Code("X601", "rows is not what the ranks take", """
        A step takes micro · accumulate · data ranks rows. If `rows` is given as well, it must be that product.
        """, "batch { sequence = 512, micro = 8, accumulate = 1, rows = 30 }",
        "batch { sequence = 512, micro = 8, rows = 32 }"),
    Code("X602", "warm-up and decay are longer than the training", """
        The rise and the final fall of the learning rate have to fit into the budget. With anything in epochs that is
        checked when the spec is planned if the data is in the cache, else by the run once it has counted it, before the
        first step: it then ends with exit status 3.
        """, "experiment try { budget = 100 steps }\nscheduler cosine { warmup = 200 steps }",
        "experiment try { budget = 1k steps }\nscheduler cosine { warmup = 200 steps }"),
    Code("X605", "a stop event that does not stop the run", """
        Signals come from a scheduler, a launcher or a person who will end the processes soon in any case, and limits
        are there to be kept. What is declared for them has to end with `stop`, so that nothing is lost.
        """, "on sigterm checkpoint", "on sigterm checkpoint then stop"),
    Code("X606", "two phases begin with the same step", """
        Each phase holds until the next one begins. Of two that begin together the first would have no step.
        """, "phase warm { from = 10%, lr_scale = 0.5 }\nphase cool { from = 10%, lr_scale = 0.1 }",
        "phase warm { from = 10%, lr_scale = 0.5 }\nphase cool { from = 80%, lr_scale = 0.1 }"),
    Code("X607", "a phase begins when the run has ended", """
        The start of a phase lies at or behind the end of the budget, so that no step of the run belongs to it. Of what
        is in epochs this may be found by the run, once its data is counted (see X602).
        """, "experiment try { budget = 100 steps }\nphase anneal { from = 200 steps, lr_scale = 0.5 }",
        "experiment try { budget = 100 steps }\nphase anneal { from = 90%, lr_scale = 0.5 }"),
    Code("X610", "a reaction to something that cannot occur", """
        `time_limit`, `stop_at` and `stop_file` are settings of `launch`, and the events of these names occur only where
        they are set. Without one the reaction would never run.
        """, "on time_limit checkpoint then requeue then stop",
        "launch { time_limit = 4 h }\non time_limit checkpoint then requeue then stop"),
    Code("X611", "requeue out of place", """
        `requeue` asks Slurm to start the job again, and Slurm ends the job as soon as it is asked. It belongs behind
        all else that a run does when it is to stop, and nowhere else.
        """, "on sigusr1 requeue then checkpoint then stop", "on sigusr1 checkpoint then requeue then stop"),
    Code("X612", "not one thing that is done about steps that are no numbers", """
        `on nan(n)` does one of three: `skip` leaves such steps out and fails at the n-th in a row, `rollback` goes back
        to the last good checkpoint, `stop` fails. `skip` and `rollback` stand nowhere else. Nothing is saved there: the
        weights may be what is wrong, and the last checkpoint before is the one to keep.
        """, "on nan checkpoint then stop", "on nan(3) rollback"),
    Code("X613", "a rollback in a run that saves nothing", """
        `on nan rollback` goes back to a checkpoint of the run, and `checkpoint.enabled` is false.
        """, "checkpoint { enabled = false }\non nan(3) rollback", "on nan(3) rollback"),
    Code("X614", "a profile of steps that do not come", """
        A profile, and the history of a memory snapshot, are about the steps that follow. Behind `stop`, on `finish`, on
        a signal and on a limit there are none.
        """, "on finish profile", "every 500 steps profile"),
    Code("X615", "two profiles at once", """
        A profile takes wait + warmup + active steps, and a process can record one at a time. A tick must leave the one
        before it that long, and two ticks must not meet; what only the clock decides is met with a warning in the run,
        and the later one is left out.
        """, "every 4 steps profile { active = 8 }", "every 100 steps profile { active = 8 }"),
    Code("X620", "a best checkpoint of something that is not measured", """
        `best` follows the loss on what a dataset of this spec held out, and a tick has to measure it: `eval` of that
        dataset, in steps in which a checkpoint is saved.
        """, "checkpoint { best = eval.web.loss }  # and no `every … eval web`",
        "every 500 steps eval web then checkpoint\ncheckpoint { best = eval.web.loss }"),
    Code("X621", "a checkpoint of one file, and several ranks", """
        With `backend = file` one process writes all of a checkpoint as one file. Of several ranks each holds a part of
        the state, and `dcp` lets each write its own; a run of any number of ranks goes on from a checkpoint of either.
        """, "parallel { fsdp 2 }\ncheckpoint { backend = file }",
        "parallel { fsdp 2 }\ncheckpoint { backend = dcp }"),
    Code("X622", "a name that W&B does not take", """
        A project has no `/`, `\\`, `#`, `?`, `%` or `:` in its name, no name has more than 128 characters, and a tag
        has 1 to 64. W&B would refuse it when the run has begun.
        """, 'log { wandb { project = "team/llama" } }', 'log { wandb { project = "llama", entity = "team" } }'),
    Code("X702", "a device is not there", """
        The run asks for a device this machine does not have, or for more of them than it has.
        """),
    Code("X703", "the wrong number of ranks", """
        The plan is for one world size and another number of processes was started.
        """),
    Code("X704", "a plan that cannot be used", """
        The file is missing, is not a plan, has the format of another version, or its content is no longer what its id
        says. Plans are not edited: change the spec and plan it again.
        """),
    Code("X705", "a checkpoint does not fit the plan", """
        The run directory holds a state of another model, of a finer number format or of another stream of data. The
        message says what differs; `xtrain diff RUN SPEC` says it before a run is started.
        """),
    Code("X706", "the run directory cannot be written", """
        The folder below `workspace.root` cannot be made or written: permissions, a full disk, or a file in its place.
        On a disk without room for a few small files `xtrain checkpoint prune RUN --keep 1 --yes` makes some.
        """),
    Code("X707", "another process runs in the run directory", """
        The same experiment is running. Wait for it, or give this run another name with `workspace.run`.
        """),
    Code("X708", "no checkpoint yet", """
        The run has not saved a state that could be used.
        """),
    Code("X709", "an environment variable is not set", """
        `env("NAME")` without a default needs the variable. Give a default as the second argument.
        """, 'workspace { root = env("NO_SUCH_VARIABLE") }', 'workspace { root = env("NO_SUCH_VARIABLE", "runs") }'),
    Code("X710", "the spec has changed since the plan was made", """
        A saved plan is run as it stands, and the spec that it was made of, planned again in the same way, now gives
        another one. The notes name values that differ. Plan it again, or run the plan all the same with
        `--accept-drift`. What a spec reads, such as a tokenizer or an environment variable, counts as part of it.
        """),
    Code("X711", "xtrain has changed since the plan was made", """
        A saved plan names what is done, and xtrain's source files say how. They are not the ones that the plan was made
        with: the same nodes may be executed in another way, and the spec may be planned otherwise. Plan it again, or
        run the plan all the same with `--accept-drift`.
        """),
    Code("X712", "a device has less memory than the plan counts on", """
        The plan is held against the memory of a device that `cluster` gives, and the devices here have less of it; or
        they could not even hold the parameters, gradients and optimizer states of a rank.
        """),
    Code("X714", "processes that read end again and again", """
        With `workers` in `batch`, processes of their own read the data. One that is killed is replaced and nothing is
        lost; three in a row ended at the same step. They may lack memory, or a collator of yours ends its process. The
        log of the rank says more; `workers = 0` reads in the rank itself.
        """),
    Code("X715", "a package is missing", """
        `log` names something that needs a package which is not installed here: `pip install 'xtrain[tensorboard]'` for
        event files of TensorBoard, `pip install 'xtrain[wandb]'` for Weights & Biases.
        """),
    Code("X716", "the ranks do not find each other", """
        Ranks that another launcher has started meet at MASTER_ADDR and MASTER_PORT before they begin. Nothing answers
        there, the first rank has ended, or others have not come half an hour after it was ready. What stands above it
        on the screen, or in the log of the rank that is missing, says why; see also whether every machine reaches that
        address, and whether another program has the port.
        """),
    Code("X720", "there is no such checkpoint", """
        `checkpoint.from`, `checkpoint.pretrained` or a command names a checkpoint, and nothing sound is there: a folder
        `ckpt-s…` or `model-s…`, one of the pointers beside them, or a run that has one. The plan says so where
        something else lies at the path; the run where nothing does, or what is there is damaged.
        """),
    Code("X721", "a checkpoint could not be written", """
        The disk is full, cannot be written to, or failed. What was saved before is untouched and the half-written
        folder is removed. Training goes on and the next save tries again, until as many have failed in a row as
        `checkpoint.failures` says; at the end of a run and on a signal a save has to succeed. Make room, and give the
        same command again: the run goes on from its last checkpoint. With a smaller `checkpoint.keep` it first removes
        what is too old; `xtrain checkpoint prune RUN --keep 1 --yes` does so without a start.
        """),
    Code("X722", "nothing is left to train", """
        The state that the run begins with has as many steps behind it as the budget, or more. The budget counts from
        step 0, also where a run goes on from another one: give it more. For the weights alone there is
        `checkpoint.pretrained`; to end a run where it stands, make its budget the step of its checkpoint. A run that
        has ended is not refused when it is started again: it says so and ends.
        """),
    Code("W401", "a setting that changes nothing here", """
        Another setting leaves this one nothing to act on: it speaks of an axis that has one rank here, of sums of
        gradients where nothing is sharded, of saving where nothing is saved, of the width of a layer that no block has,
        of the fall of a learning rate that does not fall, of fp32 products where all are of fp64, of what only a GPU
        has on a CPU; a mixture has one dataset, or a phase the shares and the learning rate of the one before it. The
        run does what it would do without it, and is the same experiment.
        """, "parallel { tp 1 { loss = false } }", "parallel { tp 2 { loss = false } }"),
    Code("W423", "a device has too little memory for the run", """
        The fullest rank would hold more than a device has, or leave less than 8 % of it free, which fragmentation or an
        uneven load of experts can use up after days. The figures are estimates, `xtrain plan --trace` has exact ones.
        The hint names settings that were tried: with each of them the run would fit.
        """, "cluster h100 { devices = 1 }\nmodel llama { dim = 4Ki, layers = 32, heads = 32 }",
        "cluster h100 { devices = 8 }\nmodel llama { dim = 4Ki, layers = 32, heads = 32 }"),
    Code("W424", "ranks of a pipeline wait too long", """
        A rank of a pipeline waits while the first microbatches come and the last ones leave, here for more than a fifth
        of a step. More microbatches make the wait a smaller part; several stages on a rank, which take turns, shorten
        it: p ranks, v stages on each and m microbatches wait for (p - 1) / (v · m + p - 1) of a step.
        """, "cluster h100 { devices = 8 }\nbatch { sequence = 512, accumulate = 8 }\nparallel { pp 8, fsdp 1 }",
        "cluster h100 { devices = 8 }\nbatch { sequence = 512, accumulate = 64 }\nparallel { pp 8, fsdp 1 }"),
    Code("W425", "tensor parallel between machines", """
        Tensor parallelism exchanges activations in every layer and waits for them. Inside a machine links are about ten
        times as fast as between machines; leave what is left over to fsdp or pp.
        """, "launch { nodes = 2, ranks_per_node = 2 }\nparallel { tp 4, fsdp auto }",
        "launch { nodes = 2, ranks_per_node = 2 }\nparallel { tp 2, fsdp auto }"),
    Code("W426", "tensor parallel that is not needed", """
        The run fits with fsdp alone, and its step would be shorter: tensor parallelism makes products smaller and waits
        for messages in each layer, which costs 15 to 20 points of utilisation in published runs of models that fit
        without it.
        """, "cluster h100 { devices = 8 }\nparallel { tp 2, fsdp auto }",
        "cluster h100 { devices = 8 }\nparallel { fsdp auto }"),
    Code("W601", "a tick that never fires", """
        The period is longer than the whole run; or what comes due is a profile, and the run has no step left that it
        could record.
        """, "experiment try { budget = 100 steps }\nevery 200 steps log",
        "experiment try { budget = 100 steps }\nevery 20 steps log"),
    Code("W602", "a best checkpoint that is never found", """
        A checkpoint can only be the best if its own state was measured: `eval` and `checkpoint` have to come in the
        same step now and then, and with these periods they never do.
        """, "experiment try { budget = 100 steps }\nevery 9 steps eval web\nevery 20 steps checkpoint\n"
        "checkpoint { best = eval.web.loss }",
        "experiment try { budget = 100 steps }\nevery 10 steps eval web\nevery 20 steps checkpoint\n"
        "checkpoint { best = eval.web.loss }"),
    Code("W603", "a stop that comes no sooner than the end", """
        `stop_at` and `stop_after` of `launch` stop a run before it has come to its end. Here the budget is used up
        first.
        """, "experiment try { budget = 100 steps }\nlaunch { stop_at = 200 steps }",
        "experiment try { budget = 100 steps }\nlaunch { stop_at = 50 steps }"),
    Code("W608", "a run that begins where it is to end", """
        `checkpoint.from` names a state of a later step than the budget, or `launch.stop_at`, has: steps are counted on
        from those of the state. A run that begins there is refused (X722).
        """, 'experiment try { budget = 5 steps }\ncheckpoint { from = "runs/a/b/checkpoints/ckpt-s000000000034" }',
        'experiment try { budget = 39 steps }\ncheckpoint { from = "runs/a/b/checkpoints/ckpt-s000000000034" }'),
    Code("W604", "a rollback with little to go back to", """
        `on nan rollback` goes back to a checkpoint that was saved along the way. Either none is, or one alone is kept:
        should the fault be in it already, there is no older one.
        """, "checkpoint { keep = 1 }\non nan(3) rollback", "checkpoint { keep = 3 }\non nan(3) rollback"),
    Code("W605", "an average that takes in nothing", """
        `ema { every }` is longer than the whole run, so that there never are averaged weights: trained ones are
        evaluated and published in their place.
        """, "experiment try { budget = 100 steps }\nema { every = 200 }",
        "experiment try { budget = 100 steps }\nema { every = 5 }"),
    Code("W606", "ranks that compute would be taken for stuck", """
        A rank tells of its progress with every microbatch, and in a pipeline with every step. Here one is likely to
        take longer than `stuck`, after which ranks are given up: leave it room for the slowest.
        """, "cluster cpu { flops = 100G, link = 10 GiB, network = 1 GiB }\n"
        "batch { sequence = 4Ki, micro = 64 }\nfault_tolerance { stuck = 1 s }",
        "cluster cpu { flops = 100G, link = 10 GiB, network = 1 GiB }\n"
        "batch { sequence = 4Ki, micro = 64 }\nfault_tolerance { stuck = 30 min }"),
    Code("W705", "whether the spec of a plan has changed is not known", """
        A saved plan carries its spec and can be run anywhere. The file that it was made of is not where the plan names
        it, or the plan does not say how it was made, so that the two cannot be compared.
        """),
    Code("W706", "a plan is run in spite of drift", """
        The spec or xtrain itself has changed since the plan was made, and `--accept-drift` says to run it as it stands.
        """),
    Code("W707", "the machine is not the planned one", """
        The plan can run here, but its estimates were made for other devices.
        """),
)  # fmt: skip
