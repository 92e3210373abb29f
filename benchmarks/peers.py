"""A training step beside those of other trainers: the same weights, rows, optimizer and number formats, in turns.

    OMP_NUM_THREADS=2 python benchmarks/peers.py                       # three sizes, 50 steps, three turns
    OMP_NUM_THREADS=1 python benchmarks/peers.py --sizes tiny --turns 5
    python benchmarks/peers.py --matmul highest --sides xtrain plain trainer

xtrain runs as its command runs it (`xtrain run`, every step logged), in a folder with weights and rows that
transformers' model reads too. The others are:

    same      the loop one would write first, over the model, the rows and the optimizer of xtrain
    plain     that loop over transformers' model, with torch's fused AdamW
    trainer   transformers' Trainer
    trl       TRL's SFTTrainer, where it is installed

Matrix products are computed as each side does by default, all of them in fp32: xtrain's `matmul = auto`, and on the
other sides torch's `highest`; or with --matmul as given on all sides.

A side is a process. What counts is the time between its second step and its last: the least of the turns, of the clock
and of the processor (all threads and processes of that side), which other work on the machine disturbs less. The losses
of all sides must agree; how far each is from those of the plain loop in fp64, which is run once, says whose roundings
set them apart. Prints a table for each size, and the same as a JSON line.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 96, "vocab": 4096},
        "batch": {"sequence": 64, "rows": 4, "micro": 4},
    },
    "quickstart": {
        "model": {"dim": 128, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 384, "vocab": 258},
        "batch": {"sequence": 256, "rows": 32, "micro": 8},
    },
    "5.5m": {
        "model": {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 768, "vocab": 2048},
        "batch": {"sequence": 512, "rows": 4, "micro": 4},
    },
}
SIDES = ("xtrain", "same", "plain", "trainer", "trl")
RATE, BETAS, CLIP = 3e-3, (0.9, 0.95), 1.0
SPEC = """
experiment peers {{ seed = 0, budget = {steps} steps }}
model "base"
tokenizer bytes
dataset rows {{ source = jsonl("rows.jsonl"), tokens = "tokens" }}
batch {{ sequence = {sequence}, rows = {rows}, micro = {micro} }}
collate = to_tensor -> flatten -> shift_tokens -> pack(sequential)
optimizer adamw {{ lr = 3e-3, betas = [0.9, 0.95], weight_decay = 0, clip = 1.0 }}
scheduler constant
precision {{ matmul = {matmul} }}
launch {{ device = cpu }}
checkpoint {{ keep = none }}
every 1 step log
every 1000000 steps checkpoint
"""
DEFAULT = "default"
EXACT = "fp64"
FIRST = 2  # before it kernels are chosen and memory is taken
AGREE = 1e-4


@frozen
class Measured:
    """Seconds a step, of the clock and of the processor, and the losses of all steps."""

    wall: float
    processor: float
    losses: list[float]


def made(folder: Path, size: str, steps: int) -> None:
    """Weights as a folder of transformers, documents that each fill a row, and the rows in the order of a run."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from xtrain.planner.load import plan_from_spec
    from xtrain.runtime.loop.executor import Executor

    model, batch = SIZES[size]["model"], SIZES[size]["batch"]
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=model["dim"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"],
        head_dim=model["head_dim"],
        intermediate_size=model["ffn"],
        vocab_size=model["vocab"],
        max_position_embeddings=batch["sequence"],
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "base")
    random = torch.Generator().manual_seed(1)
    with (folder / "rows.jsonl").open("w") as out:
        for _ in range(batch["rows"] * steps):
            # Each token depends on the one before, so that there is something to learn.
            noise = torch.randint(0, 8, (batch["sequence"] + 1,), generator=random)
            out.write(json.dumps({"tokens": (noise.cumsum(0) % 256).tolist()}) + "\n")
    (folder / "peers.xtrain").write_text(SPEC.format(steps=steps, matmul="auto", **batch))
    plan = plan_from_spec(folder / "peers.xtrain").plan
    assert plan is not None
    executor = Executor(plan, folder / "order", rank=0)
    executor._set_up(0.0)
    loader = executor.resources["feed"].loader
    inputs, labels = [], []
    for each in (each for step in range(steps) for each in loader.microbatches(step)):
        assert bool(each.real_BS.all()), "each row is one document"
        inputs.append(each.input_ids_BS.clone())
        labels.append(each.labels_BS.clone())
    torch.save({"inputs": torch.stack(inputs), "labels": torch.stack(labels)}, folder / "rows.pt")


# ---- sides; each prints `step loss` as it goes on


def said(step: int, loss: float) -> None:
    print(step, repr(float(loss)), flush=True)


def plain(folder: Path, batch: dict[str, int], steps: int, *, exact: bool) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder / "base")
    if exact:
        model = model.double()
    rows = torch.load(folder / "rows.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    many = batch["rows"] // batch["micro"]
    targets = batch["rows"] * batch["sequence"]
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for index in range(step * many, (step + 1) * many):
            inputs, labels = rows["inputs"][index], rows["labels"][index]
            loss = model(input_ids=inputs, labels=labels, shift_labels=labels, num_items_in_batch=targets).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        said(step + 1, total.item())


def same(folder: Path, steps: int) -> None:
    import torch

    from xtrain.planner.load import plan_from_spec
    from xtrain.runtime.loop.executor import Executor
    from xtrain.runtime.nn.batch import ModelBatch

    plan = plan_from_spec(folder / "peers.xtrain").plan
    assert plan is not None
    executor = Executor(plan, folder / "same", rank=0)
    executor._set_up(0.0)
    parts = executor.resources
    model, optimizer, loader = parts["model"], parts["optimizer"], parts["feed"].loader
    device = torch.device("cpu")
    for step in range(steps):
        optimizer.zero_grad()
        microbatches = loader.microbatches(step)
        targets = sum(each.num_valid for each in microbatches)
        total = torch.zeros(())
        for each in microbatches:
            loss = model.whole(None, ModelBatch.of(each, device)).sum() / targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        said(step + 1, total.item())


def trainer(folder: Path, batch: dict[str, int], steps: int, *, sft: bool) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.utils.data import Dataset, SequentialSampler
    from transformers import Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows = torch.load(folder / "rows.pt")
    inputs_RS, labels_RS = (rows[name].flatten(0, 1) for name in ("inputs", "labels"))

    class Rows(Dataset):  # labels are those of the next positions
        def __len__(self) -> int:
            return len(inputs_RS)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            labels = labels_RS[index]
            return {"input_ids": inputs_RS[index], "labels": labels, "shift_labels": labels}

    class Steps(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                said(state.global_step, logs["loss"])

    class InOrder:
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(rows_of)

    given: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": batch["micro"],
        "gradient_accumulation_steps": batch["rows"] // batch["micro"],
        "max_steps": steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    base: Any = Trainer
    arguments: Any = TrainingArguments
    rows_of: Any = Rows()
    more: dict[str, Any] = {}
    if sft:
        import datasets
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

        base, arguments = SFTTrainer, SFTConfig
        given |= {"bf16": False, "gradient_checkpointing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
        columns = {"input_ids": inputs_RS, "labels": labels_RS, "shift_labels": labels_RS}
        columns["attention_mask"] = torch.ones_like(inputs_RS)
        arrays = {name: column.numpy() for name, column in columns.items()}
        rows_of = datasets.Dataset.from_dict(arrays).with_format("torch")
        # It wants a tokenizer, which nothing is tokenized with.
        words: Any = Tokenizer(WordLevel({"<eos>": 0}, "<eos>"))
        more["processing_class"] = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    ordered: Any = type("Ordered", (InOrder, base), {})

    def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([each[name] for each in rows]) for name in rows[0]}

    model = Qwen3ForCausalLM.from_pretrained(folder / "base")
    more |= {"data_collator": stacked, "callbacks": [Steps()]}
    ordered(model=model, args=arguments(**given), train_dataset=rows_of, **more).train()


def side(name: str, folder: Path, size: str, steps: int, matmul: str) -> None:
    import torch

    if matmul != DEFAULT:
        torch.set_float32_matmul_precision(matmul)
    torch.manual_seed(0)
    batch = SIZES[size]["batch"]
    if name == "same":
        same(folder, steps)
    elif name in ("plain", EXACT):
        plain(folder, batch, steps, exact=name == EXACT)
    else:
        trainer(folder, batch, steps, sft=name == "trl")


# ---- measuring


def processor(root: int) -> float:
    """Processor seconds so far of a process and of all below it that still run."""
    parents, seconds = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        parents[int(entry.name)] = int(fields[1])
        # utime, stime, and those of children that have ended
        seconds[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def belongs(process: int) -> bool:
        while process in parents:
            if process == root:
                return True
            process = parents[process]
        return False

    return sum(value for process, value in seconds.items() if belongs(process))


def steps_of_xtrain(lines: Iterator[str]) -> Iterator[tuple[int, float, float]]:
    """The end of a step stands in its record: these are printed some at a time."""
    for line in lines:
        record = json.loads(line)
        if record["kind"] == "metrics":
            yield record["step"], record["loss"], record["time"]


def steps_of_others(lines: Iterator[str]) -> Iterator[tuple[int, float, float]]:
    for line in lines:
        first, _, rest = line.partition(" ")
        if first.isdigit():
            yield int(first), float(rest), time.time()


def measured(name: str, folder: Path, size: str, steps: int, matmul: str) -> Measured:
    if name == "xtrain":
        own = "auto" if matmul == DEFAULT else matmul
        text = SPEC.format(steps=steps, matmul=own, **SIZES[size]["batch"])
        (folder / "peers.xtrain").write_text(text)
        command = [sys.executable, "-m", "xtrain", "run", "peers.xtrain", "--ui", "json"]
        command += ["--set", f"workspace.run=turn{time.time_ns()}"]
    else:
        command = [sys.executable, __file__, "--side", name, "--folder", str(folder), "--sizes", size]
        command += ["--steps", str(steps), "--matmul", matmul]
    with (folder / f"{name}.log").open("w+") as errors:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        read = steps_of_xtrain if name == "xtrain" else steps_of_others
        marks, losses = {}, []
        for step, loss, at in read(iter(process.stdout.readline, "")):
            losses.append(loss)
            if step in (FIRST, steps):
                marks[step] = at, processor(process.pid)
        if process.wait() or len(marks) < 2:
            errors.seek(0)
            raise SystemExit(f"{name} failed:\n{errors.read()[-3000:]}")
    wall, cpu = ((marks[steps][i] - marks[FIRST][i]) / (steps - FIRST) for i in (0, 1))
    return Measured(wall, cpu, losses)


def compared(size: str, sides: list[str], steps: int, turns: int, matmul: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.chdir(folder):
            made(folder, size, steps)
        found: dict[str, list[Measured]] = {each: [] for each in sides}
        for _ in range(turns):
            for each in sides:
                found[each].append(measured(each, folder, size, steps, matmul))
        exact = measured(EXACT, folder, size, steps, matmul).losses
    first = found[sides[0]][0].losses
    apart, off = (
        {each: max(abs(a - b) for a, b in zip(found[each][0].losses, other, strict=True)) for each in sides}
        for other in (first, exact)
    )
    wrong = [f"{each} by {value:.2g}" for each, value in apart.items() if value > AGREE]
    if wrong:
        print(f"losses of {size} differ from those of {sides[0]}: {', '.join(wrong)}", file=sys.stderr)
    least = {
        each: Measured(min(one.wall for one in all_), min(one.processor for one in all_), all_[0].losses)
        for each, all_ in found.items()
    }
    print(f"{size}, {steps} steps, {turns} turns, matmul {matmul}")
    share = f"of {sides[0]}"
    print(f"  {'':8} {'ms':>9} {share:>10} {'processor ms':>13} {share:>10} {'last loss':>10}  apart  from fp64")
    for each, one in least.items():
        wall, cpu = one.wall / least[sides[0]].wall, one.processor / least[sides[0]].processor
        figures = f"{one.wall * 1e3:9.2f} {wall:10.2f} {one.processor * 1e3:13.2f} {cpu:10.2f}"
        print(f"  {each:8} {figures} {one.losses[-1]:10.4f}  {apart[each]:.1e}  {off[each]:.1e}")
    rows = {
        each: {**asdict(one), "losses": one.losses[-1:], "apart": apart[each], "from_fp64": off[each]}
        for each, one in least.items()
    }
    return {"size": size, "steps": steps, "turns": turns, "matmul": matmul, "sides": rows, "agree": not wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--matmul", choices=(DEFAULT, "highest", "high", "medium"), default=DEFAULT)
    parser.add_argument("--side", choices=(*SIDES[1:], EXACT), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side(given.side, given.folder, given.sizes[0], given.steps, given.matmul)
        return 0
    sides = [each for each in given.sides if each != "trl" or importlib.util.find_spec("trl")]
    if sides != given.sides:
        print("TRL is not installed; the other sides are compared", file=sys.stderr)
    results = [compared(size, sides, given.steps, given.turns, given.matmul) for size in given.sizes]
    for each in results:
        print(json.dumps(each))
    return 0 if all(each["agree"] for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
