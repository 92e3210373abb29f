"""What can be known of this machine before ranks are started: better told now than by sixty-four of them."""

from pathlib import Path

from ..planner.plan import Plan
from .data.sources import open_source
from .data.tokenizers import load_tokenizer
from .errors import EnvironmentFault


def check_machine(plan: Plan, local_ranks: int) -> None:
    """Raise EnvironmentFault or DataError if the plan cannot run here: devices, tokenizer, data files."""
    if plan.node("setup.bootstrap").args["device"] == "cuda":
        import torch

        count = torch.cuda.device_count()
        if count < local_ranks:
            message = f"{local_ranks} ranks need a CUDA device each and there are {count} here"
            raise EnvironmentFault("X702", f"{message}; use --world {count}, or launch.device = cpu")
    load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())
    for node in plan.nodes:
        if node.op == "setup.data":
            args = node.args
            open_source(
                args["kind"],
                patterns=tuple(args["patterns"]),
                text_field=args["text_field"],
                base=Path.cwd(),
                bad_record_limit=args["bad_records"],
            )


def check_one_machine(plan: Plan) -> None:
    """Raise EnvironmentFault if the plan is for several machines: this command starts the ranks of one."""
    nodes = plan.launch["nodes"]
    if nodes > 1:
        raise EnvironmentFault(
            "X703",
            f"the plan is for {nodes} machines, and this starts ranks on one; start it on each of them with "
            f"`torchrun --nnodes {nodes} --nproc-per-node {plan.launch['ranks_per_node']} … -m xtrain run …`, "
            "or set launch.nodes=1",
        )


def check_device(plan: Plan, device: str) -> None:
    """Raise EnvironmentFault if the plan needs cuda and `device` is another, as `launch.device = auto` can turn out."""
    if device == "cuda":
        return
    build = plan.node("setup.build_model").args
    wants = [f"attention {kernel}" for kernel in ("flex",) if build["attention"].get(device) == kernel]
    wants += ["fsdp offload"] if plan.node("setup.weights").args["offload"] else []
    if wants:
        raise EnvironmentFault("X702", f"{' and '.join(wants)} needs cuda, and this rank computes on {device}")


def check_world(plan: Plan, started: int) -> None:
    """Raise EnvironmentFault if another number of ranks was started than planned."""
    planned = plan.mesh.world_size
    if started != planned:
        message = f"the plan is for {planned} ranks and {started} were started"
        raise EnvironmentFault("X703", f"{message}; start {planned}, or plan for {started} with --world {started}")
