"""Rollouts that an engine of another program samples: faults, completions of older weights, layouts, and our server."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import evolve
from engine_stub import CHANGED, EngineStub, running
from forked_ranks import Outcome, RanksFailed
from projects import events, records
from served import KEY, listening, one_rank
from sweeps import episodes_trial, sampled_trial
from topologies import Topology
from trials import MODELS, TOLERANCE, Laboratory, Trial, gaps

from xtrain.planner.load import plan_from_spec

os.environ["ENGINE_KEY"] = KEY  # before ranks are forked
CUT = ("rollout.top_k=none", "rollout.top_p=1")
ADAPTER = "adapter lora { rank = 4 }\n"
LAYOUTS = {
    "fsdp": Topology(fsdp=2),
    "tp": Topology(tp=2),
    "pp": Topology(pp=2),
    "fsdp and tp": Topology(fsdp=2, tp=2),
}
SERVER = """
experiment served {{ seed = 3 }}
model {model}
tokenizer bytes
{adapter}serve {{ {trained}, max_tokens = 288, rows = 4 }}
launch {{ device = cpu }}
"""


pytestmark = pytest.mark.timeout(700)


@pytest.fixture
def stub() -> Iterator[EngineStub]:
    with running() as one:
        yield one


def trial_of(lab: Laboratory, engine: str, *, adapter: str = ADAPTER, stale: int = 0, steps: int = 3) -> Trial:
    trial = sampled_trial(lab, Topology(), loss="grpo { chunk = 8 KiB }", more=f", stale = {stale}" if stale else "")
    more = trial.more.replace(", answers = sampled", "") + adapter + engine
    return evolve(trial, steps=steps, more=more, settings=(*trial.settings, *CUT))


def engine_at(url: str, kind: str = "vllm", more: str = "") -> str:
    return f'engine {kind} {{ url = "{url}", patience = 240 s{more} }}\n'


def run(lab: Laboratory, trial: Trial, layout: tuple[str, ...] = ()) -> Outcome:
    """Of one process unless there is a layout. Programs that wait for each other are slow beside others."""
    return lab.run(trial, layout, alone=not layout, saves=False, timeout=300.0)


def shown(outcome: Outcome) -> list[list[dict[str, str]]]:
    return [event["samples"] for event in events(outcome.directory, "generate")]


def measured(outcome: Outcome) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "reward", "rollout/", "policy/", "objective")
    return [
        {name: value for name, value in record.items() if name.startswith(kept)}
        for record in records(outcome.directory, "metrics")
    ]


def warnings(outcome: Outcome) -> str:
    return "\n".join(event["message"] for event in events(outcome.directory, "warning"))


@pytest.mark.parametrize("stale", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_faults_of_an_engine_change_nothing_that_is_learned(here: Laboratory, stub: EngineStub, stale: int):
    """Answers that are lost, late, cut off or wrong, requests that are executed twice, and an engine that is new."""
    trial = trial_of(here, engine_at(stub.url), stale=stale)
    plain = run(here, trial)
    assert not warnings(plain) and len(stub.adapters) == 1 + stale
    weights = list(dict.fromkeys(stub.used))
    faults = ["lost", "unanswered", "restarted", "cut off", "busy", "late", *CHANGED]
    stub.restart()
    stub.used.clear()
    stub.faults += faults
    faulty = run(here, trial)
    assert not stub.faults and set(stub.used) == set(weights) and len(weights) == 3 - stale
    assert shown(faulty) == shown(plain) and measured(faulty) == measured(plain)
    said = warnings(faulty)
    # Which wrong answers are seen depends on time: nobody reads the answer to a request that was given up.
    assert "did not have the weights of step 0" in said and "gave a wrong answer, and was asked again: it has" in said
    assert [each["rollout/age"] for each in measured(plain)] == [min(step, stale) for step in range(3)]
    # The trainer's log-probabilities of the stub's letters are others; where weights are older, that says nothing.
    assert ["rollout/logprob_gap" in each for each in measured(plain)] == [True, not stale, not stale]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("adapter", [ADAPTER, ""], ids=["adapter", "model"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_an_engine_the_weights_of_one_process(here: Laboratory, kind: str, adapter: str, name: str):
    with running() as stub:
        trial = trial_of(here, engine_at(stub.url, kind), adapter=adapter, stale=1)
        alone = run(here, trial)
        weights = set(stub.used)
        stub.used.clear()
        outcome = run(here, trial, LAYOUTS[name].layout)
        assert set(stub.used) == weights and len(weights) == 2
    assert shown(outcome) == shown(alone)
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit


@pytest.mark.matrix
@pytest.mark.parametrize("adapter", [ADAPTER, ""], ids=["adapter", "model"])
def test_a_run_resumes_with_the_completions_that_were_asked_ahead(here: Laboratory, stub: EngineStub, adapter: str):
    """Their weights are gone, and so they are part of the checkpoint."""
    trial = trial_of(here, engine_at(stub.url), adapter=adapter, stale=2, steps=5)
    whole, later = here.resumed(trial, (), f"stale-{len(adapter)}", step=2)
    assert shown(later) == shown(whole)[2:] and measured(later)[1:] == measured(whole)[2:]
    assert [each["rollout/age"] for each in measured(whole)] == [0, 1, 2, 2, 2]


@pytest.mark.matrix
def test_an_engine_that_answers_wrongly_ends_all_ranks_with_the_reason(here: Laboratory, stub: EngineStub):
    stub.faults += ["one less"] * 100
    with pytest.raises(RanksFailed) as failed:
        run(here, trial_of(here, engine_at(stub.url)), LAYOUTS["fsdp"].layout)
    said = str(failed.value)
    assert said.startswith("failed (rank 0: exit code 1, rank 1: exit code 1)")
    assert "gave 3 wrong answers, the last: it has 2 continuations where 3 were asked for" in said


class CountedEngine:
    """An engine that counts how often it was asked for samples."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.calls = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def sample(self, queue: Any) -> None:
        self.calls += 1
        self.engine.sample(queue)


@contextmanager
def our_server(lab: Laboratory, adapter: str, restarts: tuple[int, ...] = (), fresh: bool = False) -> Iterator[str]:
    """The URL of a server of the trial's model. restarts: calls for samples at which it ends, and starts again on its
    folder, or on a fresh one."""
    spec = lab.folder / "served.xtrain"
    trained = "adapters = 4" if adapter else "mode = full"
    spec.write_text(SERVER.format(model=MODELS["dense"], adapter=adapter, trained=trained))
    compiled = plan_from_spec(spec, ("precision.params=fp64", "model.layers=2"), 1)
    assert compiled.plan is not None, compiled.diagnostics.render()
    urls: list[str] = []
    stop, ready = threading.Event(), threading.Event()

    def serve(engine: Any) -> None:
        for number, at in enumerate((*restarts, None)):
            port = int(urls[0].rpartition(":")[2]) if urls else 0
            with listening(engine, lab.folder / f"server-{id(stop)}-{number * fresh}", port=port) as url:
                urls.append(url)
                ready.set()
                while not stop.wait(0.02) and (at is None or engine.calls < at):
                    pass

    with one_rank(compiled.plan, lab.folder / f"ranks-{id(stop)}") as engine:
        thread = threading.Thread(target=serve, args=(CountedEngine(engine),))
        thread.start()
        try:
            assert ready.wait(60)
            yield urls[0]
        finally:
            stop.set()
            thread.join()


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [(), ("parallel.fsdp=2",)], ids=["one rank", "fsdp"])
@pytest.mark.parametrize("adapter", [ADAPTER, ""], ids=["adapter", "model"])
def test_our_server_samples_what_the_ranks_of_the_run_would(here: Laboratory, adapter: str, layout: tuple[str, ...]):
    """Of the weights of each step, with the draws of the run."""
    own = here.alone(trial_of(here, "", adapter=adapter))
    with our_server(here, adapter) as url:
        trial = trial_of(here, engine_at(url, "server", ', key = "ENGINE_KEY"'), adapter=adapter)
        served = run(here, trial, layout)
    assert shown(served) == shown(own) and len(shown(own)) == 3 and not warnings(served)
    found = gaps(served, own)
    assert found.worst < TOLERANCE["fp64"]
    assert max(each["rollout/logprob_gap_max"] for each in measured(served)) < 1e-6


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [(), ("parallel.fsdp=2",)], ids=["one rank", "fsdp"])
def test_our_server_samples_the_turns_of_episodes(here: Laboratory, layout: tuple[str, ...]):
    """After the same replies of the environment, with the draws of the run."""
    trial = episodes_trial(here, Topology())
    trial = evolve(trial, steps=3, more=trial.more.replace(", answers = sampled", "") + ADAPTER)
    own = here.alone(trial, timeout=300.0)
    with our_server(here, ADAPTER) as url:
        asked = evolve(trial, more=trial.more + engine_at(url, "server", ', key = "ENGINE_KEY"'))
        served = run(here, asked, layout)
    assert shown(served) == shown(own) and len(shown(own)) == 3 and not warnings(served)
    assert gaps(served, own).worst < TOLERANCE["fp64"]
    for ours, theirs in zip(measured(served), measured(own), strict=True):
        for name in ("reward", "rollout/turns", "rollout/lost", "rollout/tokens"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12)
        assert ours["rollout/logprob_gap_max"] < 1e-6
    assert max(each["rollout/turns"] for each in measured(own)) > 1


@pytest.mark.matrix
@pytest.mark.parametrize("fresh", [False, True], ids=["its folder", "a fresh folder"])
def test_our_server_may_end_and_start_again_at_any_time(here: Laboratory, fresh: bool):
    own = here.alone(trial_of(here, "", steps=4))
    with our_server(here, ADAPTER, restarts=(2, 4, 6), fresh=fresh) as url:
        trial = trial_of(here, engine_at(url, "server", ', key = "ENGINE_KEY"'), steps=4)
        served = run(here, trial)
    assert shown(served) == shown(own) and gaps(served, own).worst < TOLERANCE["fp64"]
    assert ("did not have the weights" in warnings(served)) == fresh
