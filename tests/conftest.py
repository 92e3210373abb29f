"""Which tests run beside each other: those that start ranks keep to one process, of the others each file does."""

import pytest

# The longest first, so that no process is left alone with one of them at the end.
FIRST = ("tests/test_quickstart.py", "ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal tests to the processes of pytest-xdist (`-n`); without it only their order changes.

    Ranks of several tests at once would fight for the cores, and a gang of ranks serves a whole session.
    """
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: FIRST.index(groups[item]) if groups[item] in FIRST else len(FIRST))


def _group(item: pytest.Item) -> str:
    file = item.location[0]
    starts_ranks = file.startswith("tests/distributed/") or item.get_closest_marker("distributed") is not None
    return "ranks" if starts_ranks else file
