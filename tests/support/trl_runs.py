"""Train configurations with TRL's own command line, and write what its trainer has logged.

python tests/support/trl_runs.py OUT.json sft=a.yml dpo=b.yml ...     # file → [[loss, gradient norm, learning rate], …]
"""

import json
import sys
from importlib import import_module
from pathlib import Path


def main(out: str, *runs: str) -> None:
    from transformers import Trainer

    logged, trained = {}, Trainer.train
    for run in runs:
        command, _, file = run.partition("=")
        script = import_module(f"trl.scripts.{command}")

        def train(self, *arguments, file=file, **options):
            result = trained(self, *arguments, **options)
            lines = self.state.log_history[:-1]
            logged[file] = [[line[key] for key in ("loss", "grad_norm", "learning_rate")] for line in lines]
            return result

        Trainer.train = train
        try:
            parsed = script.make_parser().parse_args_and_config(args=["--config", file], return_remaining_strings=True)
            script.main(*parsed[:4])
        except Exception as problem:
            logged[file] = repr(problem)
    Path(out).write_text(json.dumps(logged), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
