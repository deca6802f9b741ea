"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline: a test must not fail because the machine is busy.
settings.register_profile("elastictrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("elastictrain")
