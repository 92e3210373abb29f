"""`xtrain.client` against a server on this machine: what it sends, repeats and gives."""

import itertools
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy_engine import NumpyEngine, logprobs
from served import KEY, listening

from xtrain.client import (
    IGNORED,
    CallUnanswered,
    Pending,
    RemoteModel,
    RequestFailed,
    Server,
    ServerRefused,
    ServerUnreachable,
    TrainingRow,
)
from xtrain.client.http import HttpClient
from xtrain.server.access import ServerLimits


@pytest.fixture
def engine() -> NumpyEngine:
    return NumpyEngine()


@pytest.fixture
def url(engine: NumpyEngine, tmp_path: Path) -> Iterator[str]:
    with listening(engine, tmp_path, ServerLimits(poll=2.0, rows=3)) as found:
        yield found


@pytest.fixture
def server(url: str) -> Iterator[Server]:
    with Server(url, key=KEY) as found:
        yield found


def text(seed: int, length: int = 9, prompt: int = 1) -> TrainingRow:
    return TrainingRow.of_text(np.random.default_rng(seed).integers(1, 60, length).tolist(), prompt)


def test_a_text_is_a_row_whose_prompt_is_not_learned() -> None:
    row = TrainingRow.of_text([5, 6, 7, 8], prompt=2)
    assert row.tokens == [5, 6, 7] and row.targets == [IGNORED, 7, 8]
    assert TrainingRow.of_text([5, 6, 7]).targets == [6, 7]


def test_training_lowers_the_mean_loss(server: Server) -> None:
    model = server.create_model(rank=8, seed=1)
    rows, losses = [text(seed) for seed in range(7)], []
    for _ in range(8):
        found = model.forward_backward(rows)
        step = model.optim_step(0.05)
        losses.append(found.result().mean)
        assert step.result()["grad_norm"] > 0
    assert losses[-1] < 0.7 * losses[0]


def test_what_was_ignored_does_not_count(server: Server, engine: NumpyEngine) -> None:
    model = server.create_model(rank=4, seed=1)
    row = text(1, prompt=5)
    found = model.forward([row], "cross_entropy").result()
    expected = logprobs(None, np.array(row.tokens))
    kept = [place for place, target in enumerate(row.targets) if target != IGNORED]
    wanted = [expected[place, row.targets[place]] for place in kept]
    assert found.tokens == len(kept) == 4 and found.loss == pytest.approx(-sum(wanted), rel=1e-12)
    assert [found.logprobs[0][place] for place in kept] == pytest.approx(wanted, rel=1e-6)
    assert not found.logprobs[0][: kept[0]].any()
    strange = TrainingRow(tokens=row.tokens, targets=row.targets, weights=[9.0] * 4 + [1.0] * 4)
    assert model.forward([strange]).result().loss == found.loss


def test_a_mean_is_over_the_targets_of_all_calls(server: Server, engine: NumpyEngine) -> None:
    """The mean of many calls is that of one, and the sum divided once: neither a mean of means nor one of rows."""
    rows = [text(seed, 4 + 3 * seed, prompt=1 + seed) for seed in range(7)]
    count, norms, ends = sum(len(row.tokens) - number for number, row in enumerate(rows)), {}, {}
    for cuts in ((7,), (2, 5, 7), (1, 2, 3, 4, 5, 6, 7)):
        model, begin = server.create_model(rank=4, seed=3), 0
        for end in cuts:
            model.forward_backward(rows[begin:end])
            begin = end
        model.forward(rows)  # counts nothing
        norms[cuts] = model.optim_step(0.1, eps=1e-3, grad_clip_norm=0.01).result()["grad_norm"]
        again = model.optim_step(0.0, eps=1e-3).result()  # nothing is left to divide or to divide by
        assert again["grad_norm"] == 0
        ends[cuts] = engine.models[model.id].weights["B"]
    raw = server.create_model(rank=4, seed=3)
    raw.forward_backward(rows)
    norm = raw.optim_step(0.1, reduction="sum").result()["grad_norm"]
    for cuts, found in norms.items():
        assert found == pytest.approx(norm / count, rel=1e-12), cuts
        np.testing.assert_allclose(ends[cuts], ends[(7,)], rtol=1e-10, atol=1e-13)


def test_a_loss_of_this_program_has_the_gradient_of_the_same_loss_of_the_server(server: Server) -> None:
    rows, slopes = [text(1), text(2, 6)], [np.linspace(-1, 2, 8), np.linspace(0.5, 0.25, 5)]
    weighted = [
        TrainingRow(tokens=row.tokens, targets=row.targets, weights=list(-slope))
        for row, slope in zip(rows, slopes, strict=True)
    ]
    models = [server.create_model(rank=4, seed=3) for _ in range(2)]
    models[0].forward_backward(weighted)
    value = models[1].forward_backward_custom(
        rows, lambda found: (sum(float((a * b).sum()) for a, b in zip(found, slopes, strict=True)), slopes)
    )
    norms = [model.optim_step(0.1, reduction="sum").result()["grad_norm"] for model in models]
    assert norms[0] == norms[1] > 0
    assert value == pytest.approx(models[0].forward(rows).result().loss, abs=100)


def test_policy_rows_have_their_numbers_where_the_answer_is(server: Server) -> None:
    model = server.create_model(rank=4, seed=3)
    (answer,) = model.sampler().sample([3, 4, 5], max_tokens=4, seed=1).result()
    row = TrainingRow.of_answer([3, 4, 5], answer, 2.0)
    assert row.targets == [IGNORED, IGNORED, *answer.tokens]
    found = model.forward_backward([row], "importance_sampling").result()
    assert found.tokens == 4
    assert found.loss == pytest.approx(-2.0 * 4, rel=1e-5)  # all ratios are 1: the sampler has the same weights
    assert found.logprobs[0][2:] == pytest.approx(answer.logprobs, abs=1e-5)


def test_samples_stay_those_of_their_weights(server: Server) -> None:
    model = server.create_model(rank=8, seed=3)
    sampler, base = model.sampler(), server.sampler()
    before = sampler.sample([7], max_tokens=5, count=3, seed=4)
    model.forward_backward([text(1)])
    model.optim_step(0.5).result()
    assert sampler.sample([7], max_tokens=5, count=3, seed=4).result() == before.result()
    assert len(before.result()) == 3 and len({tuple(each.tokens) for each in before.result()}) > 1
    assert (
        base.sample([7], max_tokens=5, temperature=0.0).result()
        == sampler.sample([7], max_tokens=5, temperature=0.0).result()
    )  # a new adapter changes nothing
    assert model.sampler().sample([7], max_tokens=5, count=3, seed=4).result() != before.result()


def test_what_was_saved_goes_on_in_another_model(server: Server, tmp_path: Path) -> None:
    model = server.create_model(rank=4, seed=3)
    model.forward_backward([text(1)])
    model.optim_step(0.1)
    path = model.save("half").result()
    other = server.load_model(path)
    for each in (model, other):
        each.forward_backward([text(2)])
        each.optim_step(0.1)
    assert other.forward([text(3)]).result().loss == model.forward([text(3)]).result().loss
    weights = model.save_for_sampler("whole").result()
    assert server.sampler(weights).sample([1], max_tokens=2).result()
    assert {each["tinker_path"] for each in server.checkpoints()} == {path, weights}
    server.download(path, tmp_path / "half.tar")
    with tarfile.open(tmp_path / "half.tar") as found:
        assert any(name.endswith("state.npz") for name in found.getnames())
    server.delete(path)
    assert [each["tinker_path"] for each in server.checkpoints()] == [weights]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_download_that_is_cut_is_not_taken_as_whole(tmp_path: Path, chunked: bool) -> None:
    class Cut(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", "10")))
            self.end_headers()
            self.wfile.write(b"4\r\nhalf\r\n" if chunked else b"half")
            self.close_connection = True

        def log_message(self, *of: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Cut) as cutting:
        threading.Thread(target=cutting.serve_forever, daemon=True).start()
        http = HttpClient(f"http://127.0.0.1:{cutting.server_port}", None, 0.0)
        with pytest.raises(ServerUnreachable, match=r"6 bytes are missing|IncompleteRead"):
            list(http.download("archive"))
        cutting.shutdown()


def test_mistakes_are_told(server: Server, url: str) -> None:
    model = server.create_model(rank=4)
    with pytest.raises(RequestFailed, match=r"rows\[0\].*0..63, or -100") as failed:
        model.forward_backward([TrainingRow(tokens=[1], targets=[64])]).result()
    assert failed.value.category == "user"
    with pytest.raises(RequestFailed, match="lora_config is missing"):
        server.create_model()
    with pytest.raises(ServerRefused, match="wrong") as refused:
        Server(url, key="other")
    assert refused.value.status == 401
    with pytest.raises(ServerRefused, match="Expected `int`"):
        model.forward_backward([TrainingRow(tokens=[0.5], targets=[1])])  # pyright: ignore
    assert model.optim_step(0.1).result()["grad_norm"] == 0  # what was refused has used up no number
    with pytest.raises(ValueError, match="not the address of a server"):
        Server("localhost:8000")
    with pytest.raises(ServerUnreachable, match="Refused"):
        Server("http://127.0.0.1:9", patience=0.2)


class Unreliable(BaseHTTPRequestHandler):
    """Hands requests on. lost: what becomes of the next ones: they, or their answers, are lost, or answers break off
    behind their head or in their middle. lengths: whether an answer says how long it is."""

    protocol_version = "HTTP/1.1"
    target, lengths = "", True
    upstream: httpx.Client
    lost: Iterator[str] = iter(())
    lock = threading.Lock()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", "0")))
        with self.lock:
            lost = next(Unreliable.lost, "")
        if lost == "busy":
            return self._busy()
        headers = {name: self.headers[name] for name in ("x-api-key", "content-type") if name in self.headers}
        found = self.upstream.request(self.command, self.target + self.path, content=content, headers=headers)
        if lost == "answer":
            self.close_connection = True
            return self.connection.close()
        self.send_response(found.status_code)
        if self.lengths or found.status_code == 204:
            self.send_header("Content-Length", str(len(found.content)))
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        size = {"content": 0, "half": len(found.content) // 2}.get(lost, len(found.content))
        self.wfile.write(found.content[:size])
        self.close_connection = bool(lost) or not self.lengths
        return None

    do_GET = do_DELETE = do_POST

    def _busy(self) -> None:
        self.send_response(429)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def between(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of something unreliable before the server."""
    monkeypatch.setattr("xtrain.client.http.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr("xtrain.client.remote.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(Unreliable, "target", url)
    monkeypatch.setattr(Unreliable, "lost", iter(()))
    Unreliable.upstream = httpx.Client(timeout=60, verify=False)
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Unreliable)
    thread = threading.Thread(target=lambda: listener.serve_forever(0.01))
    thread.start()
    yield f"http://127.0.0.1:{listener.server_port}"
    listener.shutdown()
    listener.server_close()
    Unreliable.upstream.close()
    thread.join()


@pytest.mark.parametrize("lengths", [True, False])
def test_lost_answers_and_busy_servers_change_nothing(
    between: str, engine: NumpyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: bool
) -> None:
    monkeypatch.setattr(Unreliable, "lengths", lengths)
    monkeypatch.setattr(Unreliable, "lost", itertools.cycle(("busy", "answer", "content", "half", "")))
    with Server(between, key=KEY) as server:
        model = server.create_model(rank=4, seed=3)
        for _ in range(3):
            model.forward_backward([text(seed) for seed in range(4)])
            assert model.optim_step(0.1).result()["grad_norm"] > 0
        own = [call.partition(" ")[0] for call in engine.calls if call.endswith(model.id)]
        path = model.save("one").result()
        server.download(path, tmp_path / "one.tar")
        with tarfile.open(tmp_path / "one.tar") as found:
            assert found.getnames() == ["one/state.npz"]
        server.delete(path)
        assert server.checkpoints() == [] and not list(tmp_path.glob("*.partial"))
    assert own == ["create", *["forward_backward", "forward_backward", "optim_step"] * 3]


CALLS: dict[str, Callable[[RemoteModel], Any]] = {
    "forward_backward": lambda model: model.forward_backward([text(seed) for seed in range(7)]),
    "forward": lambda model: model.forward([text(1)]),
    "optim_step": lambda model: model.optim_step(0.1),
    "save": lambda model: model.save("again"),
    "save_for_sampler": lambda model: model.save_for_sampler("again"),
    "sampler": lambda model: model.sampler(),
}


@pytest.mark.parametrize(
    ("name", "again", "before"),
    [*((name, "repeat", 0) for name in CALLS), *((name, "call", 0) for name in CALLS), ("forward_backward", "call", 2)],
)
def test_a_call_without_an_answer_is_repeated_before_any_other(
    between: str, engine: NumpyEngine, name: str, again: str, before: int
) -> None:
    """before: of its parts, of which the first has three, so many have had an answer."""
    with Server(between, key=KEY, patience=0) as server:
        model, whole = server.create_model(rank=4, seed=3), server.create_model(rank=4, seed=3)
        for one in (model, whole):
            one.forward_backward([text(9)]).result()
        Unreliable.lost = iter([""] * before + ["answer"])
        with pytest.raises(ServerUnreachable, match=r"`repeat\(\)` of the model sends this"):
            CALLS[name](model)
        for other in CALLS:
            if other != name:
                with pytest.raises(CallUnanswered, match=r"with seq_id 2, had no answer.*`repeat\(\)`"):
                    CALLS[other](model)
        with pytest.raises(CallUnanswered):
            model.forward_backward([text(8)])
        Unreliable.lost = iter(["half"])
        with pytest.raises(ServerUnreachable):
            model.repeat()
        pending = model.repeat() if again == "repeat" else CALLS[name](model)
        if isinstance(pending, Pending):
            pending.result()
        with pytest.raises(ValueError, match="were answered"):
            model.repeat()
        CALLS[name](whole)
        norms = [one.optim_step(0.1).result()["grad_norm"] for one in (model, whole)]
        assert norms[0] == norms[1]
        calls = [[call.partition(" ")[0] for call in engine.calls if call.endswith(one.id)] for one in (model, whole)]
        assert calls[0] == calls[1], "nothing is done twice"


def test_a_model_of_which_nothing_came_back_is_the_same_one(between: str, engine: NumpyEngine) -> None:
    with Server(between, key=KEY, patience=0) as server:
        for lost in (["answer"], ["", "half"]):  # of the request, and of its result
            Unreliable.lost = iter(lost)
            with pytest.raises(ServerUnreachable):
                server.create_model(rank=4, seed=len(lost))
        models = [server.create_model(rank=4, seed=seed) for seed in (2, 1, 3)]
        assert [model.id.rpartition(":")[2] for model in models] == ["1", "0", "2"]
        assert len([call for call in engine.calls if call.startswith("create")]) == 3


def test_samples_go_on_after_one_without_an_answer(between: str) -> None:
    with Server(between, key=KEY, patience=0) as server:
        sampler = server.sampler()
        Unreliable.lost = iter(["answer"])
        with pytest.raises(ServerUnreachable):
            sampler.sample([1], max_tokens=2, seed=1)
        for seed in (2, 1):
            assert len(sampler.sample([1], max_tokens=2, seed=seed).result()[0].tokens) == 2


def test_parts_that_were_taken_before_one_was_refused_have_used_their_numbers(server: Server) -> None:
    model = server.create_model(rank=4)
    rows = [text(1), text(2), text(3), TrainingRow(tokens=[0.5], targets=[1])]  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ServerRefused, match=r"part 2 of 2 of forward_backward; the parts before it were taken: .*`int`"
    ):
        model.forward_backward(rows)
    assert model.optim_step(0.1).result()["grad_norm"] > 0


def test_two_models_of_a_session_have_samplers_at_the_same_place(server: Server) -> None:
    models = [server.create_model(rank=4, seed=seed) for seed in range(2)]
    assert len({model.sampler().id for model in models}) == 2


def test_a_program_goes_on_when_its_server_is_started_again(tmp_path: Path) -> None:
    engine = NumpyEngine()
    with listening(engine, tmp_path) as url:
        server = Server(url, key=KEY)
        model = server.create_model(rank=4, seed=3)
        model.forward_backward([text(1)]).result()
    with listening(NumpyEngine(), tmp_path, port=int(url.rpartition(":")[2])):
        norm = model.optim_step(0.1).result()["grad_norm"]
        whole = server.create_model(rank=4, seed=3)
        whole.forward_backward([text(1)])
        assert norm == whole.optim_step(0.1).result()["grad_norm"] > 0  # the number of targets was kept as well
        server.close()


def test_nothing_heavy_is_loaded() -> None:
    code = "import sys, xtrain.client; print([m for m in ('torch', 'starlette', 'xtrain.server') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
