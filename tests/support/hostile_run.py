"""A run's directory in which every text is hostile: to a terminal, and to a page of HTML."""

import json
from pathlib import Path

from made_runs import MadeRun, made_run

SCRIPT = "</script><script>alert(1)</script>"
HOSTILE = f"\"'><img src=x onerror=alert(1)>{SCRIPT}<!-- ]]> \x1b[2J\x00\u202e\ud800 {{{{ 7*7 }}}} &amp;"


def hostile_run(directory: Path) -> MadeRun:
    """A run of which every text is hostile."""
    run = made_run(directory, "dense", logged=8, end="running")
    plan = json.loads((directory / "plan.json").read_text())
    plan["name"] = HOSTILE
    plan["config"][HOSTILE] = {HOSTILE: HOSTILE}
    (directory / "plan.json").write_text(json.dumps(plan))
    metrics = directory / "metrics.jsonl"
    for record in [json.loads(line) for line in metrics.read_text().splitlines()]:
        run.append("metrics.jsonl", record | {"step": record["step"] + 8, f"hook/{HOSTILE}": 1e308, "phase": HOSTILE})
    for event, fields in {
        "alert": {"kind": HOSTILE, "state": "raised", "message": HOSTILE},
        "warning": {"message": HOSTILE},
        "failure": {"rank": 1, "error": HOSTILE, "traceback": HOSTILE},
        "eval": {"dataset": HOSTILE, "node": HOSTILE, "loss": "nan", "tokens": 10**30},
        "generate": {"samples": [{"prompt": HOSTILE, "text": HOSTILE}], "weights": HOSTILE},
        "device": {"device": HOSTILE, "matmul": HOSTILE},
        HOSTILE: {HOSTILE: HOSTILE},
        "signal": {"name": HOSTILE, "reason": HOSTILE, "time": 1e300},
        "run_end": {"status": HOSTILE, "reason": HOSTILE},
    }.items():
        run.append("events.jsonl", {"time": 1.0, "step": 16, "event": event, **fields})
    (directory / "metadata/environment.json").write_text(json.dumps({HOSTILE: HOSTILE, "command": [HOSTILE]}))
    (directory / "metadata/git.yaml").write_bytes(HOSTILE.encode("utf-8", "replace") + b": \xff\n")
    (directory / "spec.xtrain").write_bytes(HOSTILE.encode("utf-8", "replace"))
    return run
