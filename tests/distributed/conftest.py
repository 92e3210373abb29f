from collections.abc import Iterator

import pytest
from gang import Gang
from projects import Project
from trials import Laboratory


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Iterator[Laboratory]:
    """One gang for all tests; what one process computes of a trial is computed once."""
    with Gang() as gang:
        yield Laboratory.open(tmp_path_factory.mktemp("lab"), gang)
