"""Tests on several hosts are skipped where this machine cannot have them."""

from __future__ import annotations

import pytest

from elastictrain.drill.nodes.cluster import why_impossible


def skip_unless_possible() -> None:
    if why := why_impossible():
        pytest.skip(why)
