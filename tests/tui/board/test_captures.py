"""The captures in docs/screens are what the dashboard shows."""

from capture_dashboard import SCREENS, captures


def test_captures_are_what_is_shown(tmp_path):
    now = captures(tmp_path)
    stored = {path.name: path.read_text(encoding="utf-8") for path in SCREENS.glob("dashboard-*")}
    assert sorted(now) == sorted(stored), "run `python tests/support/capture_dashboard.py --write`"
    for name in now:
        assert now[name] == stored[name], f"{name}: run `python tests/support/capture_dashboard.py --write`"
