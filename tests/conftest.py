"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# No deadline: a test must not fail because the machine is busy.
settings.register_profile("elastictrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("elastictrain")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest ones begin first, so that no one has to wait for them in the end."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
