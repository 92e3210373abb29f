"""The captures in docs/screens are what is shown."""

from capture_dashboard import SCREENS, captures
from capture_quickstart import quickstart_screens


def test_captures_are_what_is_shown(tmp_path):
    now = captures(tmp_path)
    stored = {path.name: path.read_text(encoding="utf-8") for path in SCREENS.glob("dashboard-*")}
    assert sorted(now) == sorted(stored), "run `python tests/support/capture_dashboard.py --write`"
    for name in now:
        assert now[name] == stored[name], f"{name}: run `python tests/support/capture_dashboard.py --write`"


def test_screens_of_the_quickstart_are_what_a_terminal_shows():
    for name, text in quickstart_screens().items():
        stored = (SCREENS / name).read_text(encoding="utf-8")
        assert text == stored, f"{name}: run `python tests/support/capture_quickstart.py`"
