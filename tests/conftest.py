"""Shared test settings: hypothesis profiles (`--hypothesis-profile=deep` for a long search)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")
