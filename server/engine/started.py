"""Ranks of a server as processes of this machine: started, called, and restarted."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import asdict, define, field
from msgspec import structs

from xtrain.plan.graph import SETUP, WHOLE
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import to_json
from xtrain.records.events import events_since
from xtrain.records.names import EVENTS_FILE
from xtrain.regular_files import reason_of
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.locks import LAUNCHER_LOCK, HeldLock, hold
from xtrain.runtime.jobs.launch import failures_in
from xtrain.runtime.store.run_directory import locate
from xtrain.server.engine.messages import LOSSES, RankMessage
from xtrain.server.engine.passes import pack
from xtrain.server.engine.rank import READY
from xtrain.server.engine.ranks import REFUSED, Closed, Connection
from xtrain.server.engine.slots import attending
from xtrain.server.engine_interface import (
    Adam,
    AdapterSettings,
    Candidates,
    Capabilities,
    DrawnSample,
    EngineLost,
    Pass,
    PassResult,
    SampleQueue,
    SampleRequest,
    SampleResult,
    UserError,
)

Call = Callable[[RankMessage], RankMessage]


@define(eq=False)
class RanksEngine:
    """Engine over ranks. call: executes a request on all ranks and returns the first one's answer; raises EngineLost.

    models: the settings of each, as in the slots.
    """

    plan: Plan
    call: Call
    models: dict[str, AdapterSettings | None] = field(factory=dict)

    def start(self) -> Capabilities:
        """Remove all models of the ranks."""
        for model in list(self.models):
            self.remove_model(model)
        return self.capabilities

    @property
    def capabilities(self) -> Capabilities:
        plan, args = self.plan, self.plan.node(SETUP).args
        source = plan.node("setup.tokenizer").args["source"]
        return Capabilities(
            names=(args["model_name"],),
            architecture=plan.architecture.family,
            tokenizer=source,
            vocabulary=plan.architecture.vocab,
            context=args["max_tokens"],
            rank=args["max_rank"],
            models=args["adapters"],
            losses={name: loss.offer for name, loss in LOSSES.items()},
            matrices=_matrices(plan),
            targets=args["rows"] * args["max_tokens"],
            text=True,
        )

    def create_model(self, model: str, adapter: AdapterSettings | None) -> None:
        if adapter is None and self.capabilities.rank != WHOLE:
            raise UserError("this server trains adapters, not the model itself: set a rank")
        chosen = AdapterSettings(rank=WHOLE, seed=0) if adapter is None else adapter
        self._ask("open", model=model, shape=structs.asdict(chosen))
        self.models[model] = adapter

    def remove_model(self, model: str) -> None:
        self._ask("close", model=model)
        del self.models[model]

    def forward_backward(self, passes: Sequence[Pass]) -> Sequence[PassResult | UserError]:
        answer = self._call(
            pack(
                [(p.model, p.loss, p.settings, p.forward_only, [(d.tokens, d.inputs) for d in p.data]) for p in passes]
            )
        )
        logprobs, at, results = answer.arrays["logprobs"], 0, []
        for computed_pass, loss in zip(passes, answer.values["losses"], strict=True):
            outputs = []
            for datum in computed_pass.data:
                shape = datum.inputs["target_tokens"].shape
                size = int(np.prod(shape))
                outputs.append({"logprobs": logprobs[at : at + size].astype(np.float32).reshape(shape)})
                at += size
            results.append(PassResult(outputs=outputs, metrics={"loss:sum": loss}))
        return results

    def optim_step(self, model: str, adam: Adam) -> Mapping[str, float]:
        answer = self._ask("optim_step", model=model, adam=asdict(adam))
        if not answer.values["finite"]:
            raise UserError("the gradient is not finite: it was dropped, and the model is unchanged")
        return {"grad_norm": answer.values["grad_norm"]}

    def save(self, model: str, folder: Path) -> None:
        self._ask("keep", model=model, folder=str(folder.absolute()))

    def load(self, model: str, folder: Path, *, optimizer: bool) -> None:
        self._ask("load", model=model, folder=str(folder.absolute()), optimizer=optimizer)

    def export(self, model: str, folder: Path) -> None:
        self._ask("export", model=model, folder=str(folder.absolute()))

    def forget(self, weights: Path) -> None:
        self._ask("forget", folder=str(weights.absolute()))

    def sample(self, queue: SampleQueue) -> None:
        """Generate for all waiting requests together, a few tokens at a time; new requests join."""
        open: dict[str, SampleRequest] = {}
        new, first = list(queue.requests), True
        while new or open:
            open |= {request.id: request for request in new}
            prompts = {f"prompt.{request.id}": np.asarray(request.prompt, np.int32) for request in new}
            values = {"first": first, "requests": [_values(request) for request in new]}
            answer = self._call(RankMessage(name="sample", values=values, arrays=prompts))
            for id in answer.values["done"]:
                request = open.pop(id)
                queue.finished(request, _result(answer, request))
            for id, reason in answer.values["refused"].items():
                queue.finished(open.pop(id), UserError(reason))
            new, first = list(queue.arrived()), False

    def close(self) -> None:
        """Do nothing: the ranks are ended by their starter."""

    def _ask(self, name: str, **values: Any) -> RankMessage:
        return self._call(RankMessage(name=name, values=values))

    def _call(self, message: RankMessage) -> RankMessage:
        answer = self.call(message)
        if answer.name == REFUSED:
            raise UserError(answer.values["reason"])
        return answer


def _matrices(plan: Plan) -> frozenset[str]:
    """Return the kinds of matrices that have an adapter in a slot."""
    adapted = {tensor.adapter for tensor in plan.parameters.tensors if tensor.task}
    head = {plan.architecture.head_parameter.name} & adapted
    attend = adapted.intersection(attending(plan.architecture.base)) if adapted else set[str]()
    kinds = {"attn": attend, "mlp": adapted - attend - head, "unembed": head}
    return frozenset(kind for kind, names in kinds.items() if names)


def _values(request: SampleRequest) -> dict[str, Any]:
    values = asdict(request, filter=lambda attribute, value: attribute.name != "prompt")
    weights = None if request.weights is None else str(request.weights.absolute())
    return values | {"weights": weights, "stop_tokens": sorted(request.stop_tokens)}


def _result(answer: RankMessage, request: SampleRequest) -> SampleResult:
    arrays, id = answer.arrays, request.id
    samples = [
        DrawnSample(
            tokens=arrays[f"tokens.{id}.{number}"],
            logprobs=arrays[f"logprobs.{id}.{number}"],
            stopped=answer.values["stopped"][id][number],
            top=_candidates(arrays, f"{id}.{number}", "top"),
        )
        for number in range(request.count)
    ]
    return SampleResult(
        samples=samples,
        prompt_logprobs=arrays.get(f"prompt_logprobs.{id}"),
        prompt_top=_candidates(arrays, id, "prompt_top"),
    )


def _candidates(arrays: Mapping[str, np.ndarray], name: str, kind: str) -> Candidates | None:
    if f"{kind}_tokens.{name}" not in arrays:
        return None
    return Candidates(tokens=arrays[f"{kind}_tokens.{name}"], logprobs=arrays[f"{kind}_logprobs.{name}"])


PLAN: Final = "plan.json"
SPEC: Final = "spec.xtrain"
LOOK: Final = 0.5  # seconds between two checks that ranks are alive, during a request
LEAVE: Final = 10.0  # seconds that ranks have to exit


@define(eq=False)
class StartedRanks:
    """Ranks of a server. directory: of the server, with plan, records and logs of its ranks. begun: offset in the
    events file at which this start begins."""

    plan: Plan
    directory: Path
    _lock: HeldLock
    processes: list[subprocess.Popen[bytes]] = field(factory=list)
    _connection: Connection | None = None
    _begun: int = 0
    _number: int = 0

    @classmethod
    def open(cls, plan: Plan, spec_text: str) -> "StartedRanks":
        """Prepare the directory, which no other server may use and which may have no models of another base. Raises
        EnvironmentFault."""
        directory = locate(plan, None).absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = hold(directory, LAUNCHER_LOCK)
            _check_same(directory, plan)
            for name in ("ranks", "logs"):
                (directory / name).mkdir(exist_ok=True)
            durable.write(directory / PLAN, json.dumps(to_json(plan), sort_keys=True))
            durable.write(directory / SPEC, spec_text)
        except OSError as error:
            raise EnvironmentFault(
                "X706", f"the run directory {directory} cannot be written: {reason_of(error)}"
            ) from error
        return cls(plan, directory, lock)

    def start(self) -> None:
        """Start all ranks, ending earlier ones; return when they accept requests. Raises EngineLost."""
        self.end()
        events = self.directory / EVENTS_FILE
        self._begun, self._number = events.stat().st_size if events.exists() else 0, self._number + 1
        here, there = socket.socketpair()
        port, world = _free_port(), self.plan.mesh.world_size
        for rank in range(world):
            more = [str(there.fileno())] if rank == 0 else []
            command = [
                sys.executable,
                "-P",
                "-m",
                "xtrain.server.engine.rank",
                str(self.directory),
                str(os.getpid()),
                *more,
            ]
            with (self.directory / "logs" / f"rank{rank}-{self._number}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **_environment(rank, world, port)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(there.fileno(),) if rank == 0 else (),
                    )
                )
        there.close()
        self._connection = Connection(here)
        if self._answer().name != READY:
            raise EngineLost("the first rank sent an unexpected message")

    def call(self, message: RankMessage) -> RankMessage:
        """Execute a request on all ranks; return the first one's answer. Raises EngineLost."""
        if self._connection is None:
            raise EngineLost("the ranks have ended")
        try:
            self._connection.send(message)
        except Closed:
            raise self._lost() from None
        return self._answer()

    def _answer(self) -> RankMessage:
        assert self._connection is not None
        while True:
            try:
                message = self._connection.receive(LOOK)
            except Closed:
                raise self._lost() from None
            if message is not None:
                return message
            if any(process.poll() is not None for process in self.processes):
                raise self._lost()

    def _lost(self) -> EngineLost:
        """End the remaining ranks; return the error."""
        self.end(patience=1.0)
        said = failures_in(events_since(self.directory / EVENTS_FILE, self._begun))
        first = next((failure for failure in said if not failure.lost), None)
        if first is None:
            return EngineLost(f"a rank ended; see {self.directory / 'logs'}")
        return EngineLost(f"rank {first.rank}: {first.error}")

    def end(self, patience: float = LEAVE) -> None:
        """Let all ranks exit; kill those that do not."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        until = time.monotonic() + patience
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self.processes = []


@define(eq=False)
class StartedEngine(RanksEngine):
    """Engine that starts its ranks, and restarts them after they were lost."""

    ranks: StartedRanks = field(kw_only=True)

    @classmethod
    def over(cls, ranks: StartedRanks) -> "StartedEngine":
        return cls(ranks.plan, ranks.call, ranks=ranks)

    def start(self) -> Capabilities:
        self.models = {}
        self.ranks.start()
        return self.capabilities

    def close(self) -> None:
        self.ranks.end()


def _check_same(directory: Path, plan: Plan) -> None:
    """Raise EnvironmentFault if the directory has models of another base, adapter or seed."""
    try:
        before = json.loads((directory / PLAN).read_text())["config_id"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # no plan, or one that was never served
        return
    if before != plan.config_id:
        message = f"{directory} has the models of a server with another spec ({before}; this one is "
        message += f"{plan.config_id}), which would be lost; serve that spec, {directory / SPEC}, or give this server "
        raise EnvironmentFault("X705", f"{message}another name with workspace.run")


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    if world == 1:
        return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
