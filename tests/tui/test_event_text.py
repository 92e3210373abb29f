"""What events say: in one line beside their kind and step, and in full."""

from typing import Any

import pytest
from read_records import event_text, in_one_line

SAMPLES = [{"prompt": "def ", "text": "def f():\n    return 1"}, {"prompt": "x", "text": "x = 2"}]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"event": "checkpoint", "step": 5, "path": "c/5", "bytes": 2048, "seconds": 0.5}, "c/5  2.0 KiB  0.50 s"),
        ({"event": "data", "rows": {"code": 12345, "drills": 1}, "steps": 9}, "code 12,345 rows  drills 1 row"),
        (
            {"event": "estimate", "step": 8, "step_seconds": 0.47, "measured_steps": 7, "first_step_seconds": 0.71,
             "steps_left": 292, "seconds_left": 137.6},
            "about 2m18s for the remaining 292 steps: 0.47 s a step on this machine, measured over 7 steps, after "
            "0.71 s for the first; evaluations and saves come on top",
        ),
        ({"event": "weights", "step": 0, "path": "models/a", "done": 2**20, "total": 2**30},
            "models/a  1.0 MiB of 1.0 GiB"),
        ({"event": "weights", "step": 0, "path": "models/a", "done": 9, "total": 9, "rank_bytes": [1024, 2048],
                "rank_seconds": [0.2, 0.1]},
            "models/a  3.0 KiB in 0.20 s  1.0 KiB to 2.0 KiB a rank  0.10 s to 0.20 s, rank 0 the slowest"),
        ({"event": "weights", "step": 0, "path": "models/a", "done": 9, "total": 9, "rank_bytes": [1024, 1024],
                "rank_seconds": [0.1, 0.101]},
            "models/a  2.0 KiB in 0.10 s  1.0 KiB a rank  0.10 s, rank 1 the slowest"),
        ({"event": "reference", "dataset": "prefs", "reference": "initial", "computed": True, "done": 9, "rows": 90},
            "prefs  initial  9 of 90 rows"),
        ({"event": "reference", "dataset": "prefs", "reference": "models/a", "computed": True, "done": 90, "rows": 90,
                "seconds": 3.1}, "prefs  models/a  computed for 90 rows in 3.10 s"),
        ({"event": "reference", "dataset": "prefs", "reference": "initial", "computed": False, "done": 123,
                "rows": 123}, "prefs  initial  123 rows from the cache"),
        ({"event": "eval", "step": 5, "dataset": "arc", "loss": 2.5, "acc": 0.4123, "acc_norm": 0.5, "tokens": 900,
                "seconds": 2}, "arc  acc 41.2%  norm 50.0%  900 tokens  2.00 s"),
        ({"event": "eval", "step": 5, "dataset": "prefs", "loss": 2.5, "objective": 0.61, "tokens": 900, "seconds": 2,
                "metrics": {"rewards/accuracy": 0.75}},
            "prefs  loss 2.5000  objective 0.6100  rewards/accuracy 0.7500  900 tokens  2.00 s"),
        ({"event": "replicas", "step": 5, "taking_part": [1, 2], "joined": [2], "left": [0], "of": 3, "rows": 8},
            "2 of 3 groups take part: 1, 2  joined 2  left 0  8 rows a step"),
        ({"event": "replica_group", "step": 5, "group": 0, "state": "ended", "reason": "rank 1 killed by SIGKILL",
                "ranks": [0, 1], "number": 1}, "group 0 ended  rank 1 killed by SIGKILL"),
        ({"event": "replica_group", "step": 5, "group": 0, "state": "started", "reason": "", "ranks": [0, 1],
                "number": 2}, "group 0 started, start 2"),
        ({"event": "setup_begin", "node": "setup.mesh"}, "setup.mesh"),
        ({"event": "device", "device": "cpu", "threads": 2, "torch": "2.12.0"}, "cpu  2 threads  torch 2.12.0"),
        ({"event": "generate", "step": 9, "samples": SAMPLES}, "1/2  prompt 'def '  and 1 more sample"),
        ({"event": "failure", "rank": 3, "error": "boom\nat x"}, "rank 3  boom"),
        ({"event": "stuck", "ranks": [1, 3], "state": "frozen", "node": "step.agree", "seconds": 62.0},
            "ranks 1, 3 frozen  in step.agree  for 62.0 s"),
        ({"event": "stuck"}, "rank unknown"),
        ({"event": "profile", "first": 7, "last": 9, "ranks": 2, "path": "p/7", "bytes": 2048, "seconds": 1},
            "steps 7 to 9  2 ranks  p/7  2.0 KiB  1.00 s"),
        ({"event": "profile", "first": 7, "last": 7, "path": "p", "seconds": 1, "note": "cut short"},
            "step 7  p  1.00 s  cut short"),
        ({"event": "memory_snapshot", "ranks": 1, "path": "m/9", "bytes": 512}, "1 rank  m/9  512 B  –"),
        ({"event": "invented", "step": 3, "time": 1.0, "colour": "red"}, "colour red"),
        ({"event": "run_end", "status": "done", "step": 6, "seconds": 9}, "done  step 6  9s"),
    ],
)  # fmt: skip
def test_in_one_line(record: dict[str, Any], line: str) -> None:
    assert in_one_line(record) == line


def test_what_does_not_fit_one_line_is_kept() -> None:
    first, second = event_text({"event": "generate", "step": 9, "samples": SAMPLES})
    assert first.more == ("def f():", "    return 1") and second.more == ("x = 2",)
    (failure,) = event_text({"event": "failure", "rank": 0, "error": "a\nb", "traceback": "Traceback\n  File"})
    assert (failure.at, failure.more) == ("step –", ("b", "Traceback", "  File"))


def test_a_line_without_a_name_says_nothing() -> None:
    assert event_text({"step": 3}) == ()


def test_no_field_is_needed() -> None:
    kinds = "run_start setup eval generate checkpoint signal stop control restart rollback alert notify phase health"
    looks = ("profile", "memory_snapshot", "estimate", "reference")
    for kind in [*kinds.split(), "tokenise", "failure", "run_end", "resumed", "paused", "device", "nonfinite", *looks]:
        assert all(said.word for said in event_text({"event": kind}))
        in_one_line({"event": kind})


def test_long_fields_are_counted():
    sums = {f"layers.{layer}.weight": "0123456789abcdef" for layer in range(24)}
    assert in_one_line({"event": "digests", "step": 9, "parameters": sums, "gradients": {}}) == (
        "parameters 24  gradients {}"
    )
    assert in_one_line({"event": "row_losses", "place": 8, "losses": [1.5] * 40, "tokens": [7, 8]}) == (
        "place 8  losses 40  tokens [7, 8]"
    )
