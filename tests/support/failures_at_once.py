"""A plugin that says at once what has failed, and not at the end: a run of hours that is cut short has said it.

PYTHONPATH=tests/support pytest -p failures_at_once -m "slow or matrix"
"""

from typing import Any

import pytest

SHOWN = 2000  # characters, the last ones of what was said


class FailuresAtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}  {report.when}, {report.duration:.0f} s")
            terminal.write_line(str(report.longrepr)[-SHOWN:])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
