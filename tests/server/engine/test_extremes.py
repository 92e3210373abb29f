"""Well-formed requests with numbers of any size, on ranks in fp32: they spoil no model but their own."""

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from proto_writer import Writer
from served import served as on_ranks_served
from served import server_plan
from server_client import PROTOBUF, Client, Served, body_of, datum, row

from xtrain.server.access import ServerLimits

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SINGLE: Final = (0.0, -0.0, 1e-45, 1e-38, -1e-20, 1.0, -1.0, 1e4, -1e4, 1e19, 3e38, -3e38)
DOUBLE: Final = (*SINGLE, 5e-324, 1e-300, 1e300, -1e300)
LOSSES: Final = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
STOPS: Final = (None, [], "a", ["ab", 3], [-5], [2**31 - 1], ["\0"], ["\U0001f600"])
LENGTHS: Final = (1, 2, 15, 16, 17, 63, 64)
MOE: Final = (
    "qwen3_moe { dim = 16, layers = 2, heads = 2, kv_heads = 1, head_dim = 8, experts = 4, experts_per_token = 2, "
    "expert_ffn = 16, init_std = 0.2, router { aux_loss = 0 } }"
)
DENSE: Final = "llama { dim = 16, layers = 2, heads = 2, kv_heads = 1, ffn = 24, init_std = 0.2 }"


@pytest.mark.parametrize(
    ("model", "layout"),
    [(DENSE, ()), (MOE, ()), (DENSE, ("parallel.fsdp=2",)), (DENSE, ("parallel.tp=2", "model.kv_heads=2"))],
    ids=["dense", "moe", "fsdp", "tp"],
)
def test_numbers_of_any_size_spoil_one_model_alone(tmp_path: Path, model: str, layout: tuple[str, ...]) -> None:
    """In fp32, where most of them are none: no rank ends, and another model has the very numbers that it had before."""
    plan = server_plan(tmp_path, "precision.params=fp32", *layout, model=model)
    found = on_ranks_served(plan, attacked, tmp_path / "run", 100)
    assert found["errors"] == [] and found["changed"] == 0
    kinds = found["kinds"]
    assert kinds["ok"] > 30 and kinds["user"] > 3 and set(kinds) <= {"ok", "user", "refused"}


def attacked(engine: Any, folder: Path, count: int) -> dict[str, Any]:
    """Errors in the log, what came of requests, and how far the other model's log-probabilities have moved."""
    said = _Errors()
    logging.getLogger().addHandler(said)
    limits = ServerLimits(poll=5.0, queue=10**5, checkpoints=10**5)
    with Served(folder / "server", engine, limits, name=engine.capabilities.names[0]) as served:
        clean = served.model(number=1)
        clean.train([row(1)], 2)
        before = clean.logprobs([row(2)])
        attack = _Attack(served, random.Random(count))
        for number in range(count):
            attack.ask(number)
        changed = float(np.abs(clean.logprobs([row(2)]) - before).max())
        clean.train([row(1)])
        return {"errors": [*said.found, *served.ended], "changed": changed, "kinds": dict(attack.kinds)}


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class _Attack:
    """One client, whose model is a new one now and then, as it soon has no finite number."""

    def __init__(self, served: Served, rng: random.Random) -> None:
        self.served, self.rng = served, rng
        self.client = served.model(number=0)
        self.kinds: Counter[str] = Counter()
        self.samplers: list[str] = []
        self.saved: list[str] = []

    def ask(self, number: int) -> None:
        rng, client = self.rng, self.client
        named = {"model_id": client.id, "seq_id": client.seq + 1}
        what = rng.choice(["pass", "pass", "step", "step", "export", "save", "model", "sample", "sample"])
        if what == "pass":
            self.send("forward_backward", self.message(), media=PROTOBUF)
        elif what == "step":
            self.send("optim_step", named | {"adam_params": self.adam(), "reduction": rng.choice(["sum", "mean"])})
        elif what == "export":
            found = self.send("save_weights_for_sampler", named | {"sampling_session_seq_id": number})
            self.samplers += [found["sampling_session_id"]] if "sampling_session_id" in found else []
        elif what == "save":
            found = self.send("save_weights", named | {"path": f"n{number}"})
            self.saved += [found["path"]] if "path" in found else []
        elif what == "model":
            self.new_model(number + 2)
        elif self.samplers:
            self.send("asample", self.sample(number))
        known = self.served.server.store.state.models[self.client.id]
        self.client.seq = known.next - 1

    def send(self, path: str, body: dict[str, Any] | bytes, media: str = "application/json") -> dict[str, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        found = self.served.call("POST", path, content=content, headers={"content-type": media})
        assert found.status_code in (200, 400, 422), found.text
        if found.status_code != 200:
            self.kinds["refused"] += 1
            return {}
        result = self.served.result(found.json())
        answer = result if isinstance(result, dict) else {}
        self.kinds[answer.get("category", "ok")] += 1
        return answer

    def new_model(self, number: int) -> None:
        session, rng = self.client.session, self.rng
        made = {"session_id": session, "model_seq_id": number}
        if self.saved and rng.random() < 0.4:
            found = self.send("load_weights", made | {"path": rng.choice(self.saved), "optimizer": True})
        else:
            lora = {"rank": rng.choice([1, 2, 8]), "seed": rng.choice([0, -(2**63), 2**63 - 1])}
            found = self.send("create_model", made | {"base_model": self.served.name, "lora_config": lora})
        self.client = Client(self.served, found["model_id"])

    def adam(self) -> dict[str, float]:
        rng, tame = self.rng, self.rng.random() < 0.5
        return {
            "learning_rate": 0.01 if tame else rng.choice(DOUBLE),
            "beta1": rng.choice([0, 0.9, 1 - 2**-53, 1e-300]),
            "beta2": rng.choice([0, 0.95, 1 - 2**-53, 1e-300]),
            "eps": rng.choice([1e-30, 1e-12, 1.0, 3e38, 1e300]),
            "weight_decay": 0.0 if tame else rng.choice(DOUBLE),
            "grad_clip_norm": rng.choice(DOUBLE),
        }

    def message(self) -> bytes:
        rng, loss = self.rng, self.rng.choice(LOSSES)
        length, rows = rng.choice(LENGTHS), []
        for _ in range(rng.choice([1, 1, 2, 5])):
            tokens = np.array([rng.randrange(257) for _ in range(length)])
            inputs = {"target_tokens": tokens.astype("<i8")}
            names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
            rows.append(datum(tokens, inputs | {name: self.numbers(length) for name in names}))
        out = body_of(self.client.id, self.client.seq + 1, rows, loss, forward=rng.random() < 0.3)
        names = {"ppo": "clip_high_threshold", "cispo": "clip_low_threshold", "dro": "beta"}
        if loss in names and rng.random() < 0.5:
            out += bytes(Writer().content(5, Writer().content(1, names[loss]).double(2, rng.choice(DOUBLE))))
        return out

    def numbers(self, length: int) -> np.ndarray:
        rng = self.rng
        return np.array([rng.choice(SINGLE) if rng.random() < 0.3 else rng.gauss(0, 1) for _ in range(length)], "<f4")

    def sample(self, number: int) -> dict[str, Any]:
        rng, length = self.rng, self.rng.choice(LENGTHS)
        params = {
            "max_tokens": rng.choice([None, 1, 2]),
            "temperature": rng.choice([0, 5e-324, 1e-300, 1e-5, 1, 1e6]),
            "top_k": rng.choice([-1, 1, 2, 256, 257, 258, 2**31]),
            "top_p": rng.choice([1, 0.5, 1e-9, 5e-324, 0.999999]),
            "seed": rng.choice([None, 0, -(2**63), 2**63 - 1]),
            "stop": rng.choice(STOPS),
        }
        return {
            "sampling_session_id": rng.choice(self.samplers[-3:]),
            "seq_id": number,
            "prompt": {"chunks": [{"tokens": [rng.randrange(257) for _ in range(length)]}]},
            "num_samples": rng.choice([1, 2, 9, 70]),
            "sampling_params": params,
            "prompt_logprobs": rng.random() < 0.3,
            "topk_prompt_logprobs": rng.choice([0, 0, 0, 20]),
            "topk_sample_logprobs": rng.choice([0, 0, 1, 20]),
            "format": rng.choice(["json", "protobuf"]),
        }
