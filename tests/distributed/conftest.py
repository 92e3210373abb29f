import pytest
from projects import Project


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)
