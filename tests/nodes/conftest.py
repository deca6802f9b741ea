"""What the tests of nodes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.drill.nodes.cluster import Cluster
from tests.nodes.possible import skip_unless_possible


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts that share the test's folder."""
    skip_unless_possible()
    with Cluster(3, shared=[tmp_path]) as cluster:
        yield cluster
