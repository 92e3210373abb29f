"""Programs of Tinker's cookbook, as they are, against a training server on a CPU: each has to learn.

    pip install tinker==0.38.0 datasets zstandard
    pip install --no-deps tinker-cookbook==0.6.1       # tml-renderers, which it names, is imported by none of these
    pip install aiohttp blobfile chz cloudpickle math-verify pylatexenc rich sympy tiktoken
    OMP_NUM_THREADS=1 python benchmarks/cookbook.py

`sl_loop` and `chat_sl` learn from conversations, `rl_loop` from rewards. Nothing is downloaded: they run in a folder
with folders by the names of a model and of data sets, which transformers and datasets prefer to those of a hub. The
model has 142 thousand parameters that are drawn, so it never writes an answer that has a reward: `chat_sl` first
teaches it to answer with `\\boxed{d}`, with d drawn from three digits, and `rl_loop` goes on from where that has
ended, as it goes on from where it was stopped; one of the three has a reward.

Prints a JSON line for each program: the mean loss of a token, or the mean reward, of each step. Exit code 1 if one of
them has not learned.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

MODEL: Final = "Qwen/Qwen3-8B"
SPEC: Final = """
experiment cookbook {{ seed = 3 }}
model qwen3 {{
  dim = 64, layers = 2, heads = 4, kv_heads = 2, head_dim = 16, ffn = 256
  init_std = 0.1, tie_embeddings = true
}}
tokenizer "{model}"
adapter lora {{ rank = 16, alpha = 1, targets = ["all_linear", "lm_head"] }}
serve {{ model = "{model}", adapters = 4, max_tokens = 1024, rows = 4, port = {port} }}
launch {{ device = cpu }}
"""
DIGITS: Final = (6, 7, 8)  # the second has a reward
# What rl_loop puts before and behind a question.
SUFFIX: Final = " Provide a numerical answer without units, written inside \\boxed{}."
BEFORE: Final = (
    ("user", f"How many r's are in strawberry?{SUFFIX}"),
    (
        "assistant",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
        "We have r's at positions 3, 8, and 9. \\boxed{3}",
    ),
)
COMMON: Final = ("lora_rank=8", f"model_name={MODEL}")
PROGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "sl_loop": ("batch_size=8", "max_steps=12", "max_length=256", "learning_rate=0.01"),
    "chat_sl.train": (
        "batch_size=8", "max_steps=50", "max_length=800", "learning_rate=0.04", "dataset=boxed.jsonl",
        "train_on_what=last_assistant_message",
    ),
    "rl_loop": (
        "batch_size=4", "max_steps=10", "group_size=8", "max_tokens=48", "learning_rate=0.01",
        "loss_fn=importance_sampling",
    ),
}  # fmt: skip
ENVIRONMENT: Final = {
    "TINKER_API_KEY": "tml-cookbook",
    "TINKER_TELEMETRY": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


def prepare(folder: Path) -> None:
    """The folders that the programs read."""
    rng = random.Random(0)
    maker = Path(__file__).parents[1] / "tests" / "support" / "tiny_chat_model.py"
    subprocess.run([sys.executable, str(maker), MODEL], cwd=folder, check=True, stdout=subprocess.DEVNULL)

    def lines(path: str, rows: list[dict[str, Any]]) -> None:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))

    def talk(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    def sums() -> dict[str, Any]:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        question = f"How much is {a} plus {b}?"
        about = {"prompt": question, "prompt_id": str(a), "category": "sums"}
        return talk(("user", question), ("assistant", f"The answer is {a + b}")) | about

    for split, count in (("train", 400), ("test", 40)):
        lines(f"HuggingFaceH4/no_robots/{split}.jsonl", [sums() for _ in range(count)])
    questions = [f"How much is {number % 8} plus {7 - number % 8}?" for number in range(400)]
    boxed = [
        talk(*BEFORE, ("user", question + SUFFIX), ("assistant", f"\\boxed{{{rng.choice(DIGITS)}}}"))
        for question in questions
    ]
    lines("boxed.jsonl", boxed)
    lines("openai/gsm8k/train.jsonl", [{"question": each, "answer": f"#### {DIGITS[1]}"} for each in questions])
    head = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    (folder / "openai/gsm8k/README.md").write_text(head)


def run(name: str, folder: Path, url: str) -> list[float]:
    """What a program has reported of each step."""
    logs = folder / "logs" / name
    settings = [f"base_url={url}", f"log_path={logs}", *COMMON, *PROGRAMS[name]]
    with (folder / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *settings]
        environment = os.environ | ENVIRONMENT | {"HF_HOME": str(folder / "home")}
        code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log).returncode
    if code:
        raise SystemExit(f"{name} has ended with code {code}:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    steps = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    key = "reward/total" if name == "rl_loop" else "train_mean_nll"
    return [round(step[key], 3) for step in steps if key in step]


def learned(name: str, curve: list[float]) -> bool:
    if name == "rl_loop":
        return sum(curve[-3:]) / 3 > max(0.6, 1.5 * curve[0])
    return curve[-1] < 0.7 * curve[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to run, which must not exist; without, one for the time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary) / "cookbook").absolute()
        folder.mkdir(parents=True)
        prepare(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "cookbook.xtrain").write_text(SPEC.format(model=MODEL, port=port))
        command = [sys.executable, "-m", "xtrain", "serve", "cookbook.xtrain"]
        environment = os.environ | {"XTRAIN_KEY": ENVIRONMENT["TINKER_API_KEY"]}
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        failed = 0
        try:
            url = next((line.split()[-1] for line in server.stdout if "http://" in line), None)
            if url is None:
                raise SystemExit("the server has not started")
            for name in PROGRAMS:
                if name == "rl_loop":
                    (folder / "logs/rl_loop").mkdir()
                    shutil.copy(folder / "logs/chat_sl.train/checkpoints.jsonl", folder / "logs/rl_loop")
                curve = run(name, folder, url)
                failed += not learned(name, curve)
                print(json.dumps({"program": name, "learned": learned(name, curve), "curve": curve}), flush=True)
            server.send_signal(signal.SIGTERM)
            failed += server.wait(60) != 75
        finally:
            server.kill()
            server.wait()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
