"""Predictions of a teacher for each token of a store, computed by one process or several of this machine."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from xtrain.dsl.schema.losses import TEACHER_IDS, TEACHER_LOGPROBS
from xtrain.plan.plan import Node, Plan
from xtrain.plan.serialise import dumps, from_json
from xtrain.plan.weight_layout import assign
from xtrain.planner.derive.further_models import TEACHER_NAME as NAME
from xtrain.planner.derive.further_models import teacher_text
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.base.ops import load_ops, op_of
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.dataset_view import data_nodes, tokenizer_of
from xtrain.runtime.feed.loader import RowFeeder
from xtrain.runtime.feed.packing.rows import pack_rows
from xtrain.runtime.feed.prepared import cache_of, prepared_from
from xtrain.runtime.feed.reading_process import chain_of
from xtrain.runtime.feed.teacher import TEACHERS, TaughtEntry, TaughtKey, open_taught
from xtrain.runtime.feed.token_store import TokenStore
from xtrain.runtime.loop.bootstrap import TIMEOUT, choose_device, set_matmul, use_threads
from xtrain.runtime.nn.axes import column_parallel_input
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.loss import cap_logits, gathered
from xtrain.runtime.nn.transformer import ModelParts, Transformer
from xtrain.runtime.nn.weights import model_tensors
from xtrain.runtime.sampling.trained_run import alone, whole_model
from xtrain.runtime.store.beginning import planned_files
from xtrain.runtime.store.stored_weights import WeightReader

CHUNK_BYTES: Final = 2**28
SAVED_EVERY = 64  # microbatches between two writes of the progress
Report = Callable[[int, int], None]
"""Called with the numbers of finished and of all microbatches."""


@frozen(eq=False)
class TeacherModel:
    """Teacher, whole or sharded: tp ranks compute the same rows, fsdp ranks different ones. rows: of a microbatch."""

    plan: Plan
    model: Transformer
    rank: Rank
    rows: int

    @classmethod
    def load(cls, plan: Plan, node: Node, number: int = 0, world: int = 1) -> "TeacherModel":
        """Load the teacher of a `setup.teacher` node. number: of this rank among `world` ranks, which then form a
        process group; tp is the plan's if it can shard the teacher. Raises DataError if it cannot be read."""
        args = node.args
        own = _own_plan(plan, node, world)
        if own.architecture.vocab != plan.architecture.vocab:
            theirs, ours = own.architecture.vocab, plan.architecture.vocab
            raise DataError(f"the teacher {args['folder']} has a vocabulary of {theirs:,}, but the model has {ours:,}")
        chosen = choose_device(plan.node("setup.bootstrap").args["device"], local_rank=number)
        use_threads(None, local_world=world)
        small = own.node("setup.bootstrap").args.get("small_products", False)
        set_matmul(plan.node("setup.bootstrap").args["matmul"], chosen, small_products=small)
        rank = alone(chosen) if world == 1 else _rank_of(own, number, chosen)
        model = whole_model(own, rank) if world == 1 else _cut(own, rank)
        with torch.no_grad():
            files = planned_files(**own.node("setup.read_weights").args)
            with WeightReader(files, assign(own.architecture, files), lambda done: None) as reader:
                reader.read([pair for pair in model_tensors(model, "").items() if reader.has(pair[0])])
        model.train(False)
        return cls(own, model.whole, rank, plan.node("setup.loader").args["micro"])

    def fill(self, entry: TaughtEntry, store: TokenStore, report: Report) -> None:
        """Write [tokens, K] ids, the most probable first, and [tokens, K + 1] log-probabilities of these and of all
        others together, for every token but the first of a document. Documents longer than a row are cut as in
        training, into independent rows. Collective."""
        columns, group = entry.columns(), self.rank.data_ranks
        feeder = self._feeder(store)
        count = -(-feeder.rows.num_rows // self.rows)
        for first in range(entry.done, count, group):
            place = first + self.rank.data_rank
            # All ranks compute equally often; surplus microbatches are not written.
            batch, real_T, targets = self._microbatch(feeder, min(place, count - 1))
            with torch.no_grad():
                hidden_TD = self._hidden(batch)[real_T]
                for part, (ids_tK, logprobs_tK1) in self._distributions(
                    hidden_TD, entry.key.top, entry.key.temperature
                ):
                    if place < count and self.rank.is_tp_first:
                        columns[TEACHER_IDS][targets[part]] = ids_tK.to(torch.int32).cpu().numpy()
                        columns[TEACHER_LOGPROBS][targets[part]] = logprobs_tK1.float().cpu().numpy()
            done = min(first + group, count)
            if done == count or done // SAVED_EVERY > first // SAVED_EVERY:
                self._save(entry, columns, done)
            report(done, count)

    def _save(self, entry: TaughtEntry, columns: Mapping[str, np.memmap], done: int) -> None:
        """Sync the columns of all ranks before the progress is recorded."""
        for column in columns.values():
            column.flush()
        if self.rank.world_size > 1:
            dist.barrier()
        if self.rank.is_first:
            entry.went_on(done)

    def _feeder(self, store: TokenStore) -> RowFeeder:
        plain = evolve(store, columns={}, values={})
        sequence = self.plan.node("setup.loader").args["sequence"]
        rows = pack_rows(store.lengths(), sequence, "split")
        documents = np.arange(store.num_documents, dtype=np.int64)
        return RowFeeder(store=plain, documents=documents, rows=rows, collate=chain_of(self.plan, self.rank))

    def _microbatch(self, feeder: RowFeeder, place: int) -> tuple[ModelBatch, Tensor, np.ndarray]:
        """Return a microbatch, its positions that hold tokens, int64 [T], and the token of the store that is predicted
        at each."""
        first = place * self.rows
        numbers = np.arange(first, min(first + self.rows, feeder.rows.num_rows), dtype=np.int64)
        batch = feeder.microbatch(numbers)
        real_T = batch.real_BS.flatten().nonzero()[:, 0]
        targets = [self._predicted(feeder, number) for number in numbers.tolist()]
        return ModelBatch.of(batch, self.rank.device), real_T.to(self.rank.device), np.concatenate(targets)

    def _hidden(self, batch: ModelBatch) -> Tensor:
        """Return [B · S, D] of whole rows, on every tp rank."""
        return column_parallel_input(self.model.hidden(batch), self.model.axes.tensor).flatten(0, 1)

    @staticmethod
    def _predicted(feeder: RowFeeder, number: int) -> np.ndarray:
        """Return the tokens of the store that a row predicts, in the order of its positions."""
        rows, offsets = feeder.rows, feeder.store.offsets
        segments = slice(int(rows.row_offsets[number]), int(rows.row_offsets[number + 1]))
        documents = rows.document[segments]
        first = offsets[documents] + rows.starts(segments)
        end = np.minimum(first + rows.capacity + 1, offsets[documents + 1])
        return np.concatenate([np.arange(a + 1, b) for a, b in zip(first.tolist(), end.tolist(), strict=True)])

    def _distributions(
        self, hidden_TD: Tensor, top: int, temperature: float
    ) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        """Yield slices of the positions with their ids [t, K] and log-probabilities [t, K + 1]."""
        weight_VD, head = self.model.head_weight(), evolve(self.model.head, tensor=self.model.axes.tensor)
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        tokens = max(1, CHUNK_BYTES // (4 * head.vocabulary))
        for first in range(0, len(hidden_TD), tokens):
            part = slice(first, first + tokens)
            logits_tV = F.linear(hidden_TD[part], weight_VD).to(exact)
            cap_logits(logits_tV, head, slope=False)
            logits_tV = logits_tV if head.tensor is None else gathered(logits_tV, head)
            yield part, largest(logits_tV.div_(temperature), top)


def _own_plan(plan: Plan, node: Node, world: int) -> Plan:
    """Return the plan of the teacher alone, on `world` ranks. Raises DataError if there is none."""
    args, rows = node.args, plan.node("setup.loader").args["micro"]
    device, source = plan.node("setup.bootstrap").args["device"], plan.node("setup.tokenizer").args["source"]
    wanted = plan.mesh.size("tp")
    problem = None
    for tp in dict.fromkeys((wanted if world % wanted == 0 else 1, 1)):
        text = teacher_text(
            args["folder"],
            source,
            sequence=args["sequence"],
            rows=rows * (world // tp),
            precision=args["precision"],
            device=device,
            tp=tp,
        )
        compiled = plan_from_text(text, NAME, world=world)
        if compiled.plan is not None:
            return compiled.plan
        problem = problem or compiled.diagnostics.errors[0]
    assert problem is not None
    raise DataError(f"the teacher {args['folder']}: {problem.message}", remedy=problem.hint)


def _rank_of(plan: Plan, number: int, device: torch.device) -> Rank:
    mesh = plan.mesh
    return Rank(
        rank=number,
        local_rank=number,
        world_size=mesh.world_size,
        data_rank=mesh.data_rank(number),
        data_ranks=mesh.data_ranks,
        device=device,
        pipeline_ranks=1,
        coordinates=mesh.coordinates(number),
    )


def _cut(plan: Plan, rank: Rank) -> ModelParts:
    """Build the model sharded as its plan says, with uninitialized memory."""
    load_ops()
    resources: dict[str, Any] = {"plan": plan, "rank": rank}
    for node in plan.nodes:
        if node.op in ("setup.mesh", "setup.build_model", "setup.weights") or node.op.startswith("setup.parallel."):
            operation = op_of(node)
            result = operation.bind(node, resources)()
            if operation.gives:
                resources[operation.gives] = result
    model: ModelParts = resources["model"]
    if isinstance(model.whole, FSDPModule):
        register_fsdp_forward_method(model.whole, "hidden")
    return model


def largest(logits_TV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the ids [T, K] of each distribution's most probable tokens, in descending order, and the log-probabilities
    of these and of all others together [T, K + 1]. `logits_TV` is overwritten."""
    lse_T = logits_TV.logsumexp(-1)
    values_TK, ids_TK = logits_TV.topk(top)
    # Summed without these tokens: a difference of sums would leave only rounding errors.
    rest_T = logits_TV.scatter_(1, ids_TK, -torch.inf).logsumexp(-1)
    tiny = torch.finfo(logits_TV.dtype).tiny
    logprobs = torch.cat((values_TK, rest_T[:, None]), 1) - lse_T[:, None]
    return ids_TK, logprobs.clamp_(min=float(np.log(tiny)))


LINE_SECONDS: Final = 10.0
REFUSED: Final = 3  # exit code of a rank that has reported an error


@frozen(eq=False)
class Lesson:
    """Dataset of a plan, and the cache of its teacher's predictions."""

    plan: Plan
    name: str
    store: TokenStore
    cache: Path
    key: TaughtKey

    @classmethod
    def of(cls, plan: Plan, name: str, store: TokenStore) -> "Lesson":
        """Describe a dataset's predictions. Raises DataError if the teacher's files cannot be read."""
        node, cache = plan.node(f"setup.teacher.{name}"), cache_of(plan) / TEACHERS
        given = {argument: node.args[argument] for argument in ("top", "temperature", "precision", "sequence")}
        return cls(plan, name, store, cache, TaughtKey.of(store, Path(node.args["folder"]), cache, **given))

    @property
    def is_there(self) -> bool:
        return open_taught(self.cache, self.key, self.store.num_tokens) is not None

    def give(self, ranks: int) -> None:
        """Compute the predictions, continuing an earlier attempt. Raises DataError, and EnvironmentFault if a device is
        missing; if a rank of several finds the error, it has reported it, and SystemExit is raised."""
        micro = self.plan.node("setup.loader").args["micro"]
        entry = TaughtEntry(self.cache, self.key, self.store.num_tokens, micro)
        with entry.begin():
            if ranks == 1:
                self._teacher(0, 1).fill(entry, self.store, progress(self.name))
            else:
                self._together(ranks, entry.done)
            entry.complete()

    def _teacher(self, number: int, world: int) -> TeacherModel:
        return TeacherModel.load(self.plan, self.plan.node(f"setup.teacher.{self.name}"), number, world)

    def _together(self, ranks: int, done: int) -> None:
        with TemporaryDirectory() as folder:
            arguments = (ranks, dumps(self.plan), self.name, done, f"{folder}/met")
            try:
                start_processes(take_part, arguments, ranks, start_method="spawn")
            except ProcessExitedException as ended:
                if ended.exit_code != REFUSED:
                    raise
                raise SystemExit(REFUSED) from ended


def take_part(number: int, world: int, plan: str, name: str, done: int, meeting: str) -> None:
    """Compute as one rank of several. done: microbatches already computed. meeting: file of the rendezvous."""
    try:
        _take_part(number, world, from_json(json.loads(plan)), name, done, meeting)
    except (DataError, EnvironmentFault) as error:
        if number == 0:
            print(f"error[{error.code}]: {error}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)


def _take_part(number: int, world: int, plan: Plan, name: str, done: int, meeting: str) -> None:
    cuda = plan.node("setup.bootstrap").args["device"] != "cpu" and torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", timeout=TIMEOUT, rank=number, world_size=world)
    try:
        # The first process has built the store already.
        store = prepared_from(plan, data_nodes(plan)[name], tokenizer_of(plan)).store
        lesson = Lesson.of(plan, name, store)
        teacher = lesson._teacher(number, world)
        entry = TaughtEntry(lesson.cache, lesson.key, store.num_tokens, teacher.rows, done)
        teacher.fill(entry, store, progress(name) if number == 0 else lambda done, count: None)
    finally:
        dist.destroy_process_group()


def progress(name: str) -> Report:
    """Return a function that prints the progress every LINE_SECONDS."""
    said = time.monotonic()

    def report(done: int, count: int) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            print(f"{name}: {done / count:.0%}, {done:,} of {count:,} microbatches", file=sys.stderr, flush=True)

    return report
