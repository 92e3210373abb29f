"""`xtrain` in this process: what a command prints and how it ends, where a new interpreter would prove nothing more."""

import contextlib
import io
import os
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from xtrain.cli.main import main

ROOT = Path(__file__).parents[2]


def xtrain(*arguments: object, cwd: Path = ROOT) -> CompletedProcess[str]:
    """Run the command in a folder, its streams being no terminals."""
    command, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with (
        mock.patch.dict(os.environ, plain, clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(command)
        except SystemExit as ended:  # of argparse
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())
