"""Shared test settings: hypothesis profiles (`--hypothesis-profile=deep` for a long search), and opened models."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ds4v41 import Model

settings.register_profile("default", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def _close_models() -> Iterator[None]:
    """Models that tests keep open are let go before the interpreter ends."""
    yield
    if "tests.model.support" in sys.modules:
        sys.modules["tests.model.support"].forget()


@pytest.fixture
def tiny_bf16() -> Model:
    """The golden tiny model, bf16."""
    from tests.model.support import tiny

    return tiny("bf16")


@pytest.fixture
def tiny_fp32() -> Model:
    """The golden tiny model, nothing rounded but K/V and index vectors."""
    from tests.model.support import tiny

    return tiny("fp32")


@pytest.fixture
def tiny_fp8() -> Model:
    """The golden tiny model in release precision."""
    from tests.model.support import tiny

    return tiny("fp8")


@pytest.fixture
def nano_model() -> Model:
    """The trained model that ships with the library."""
    from tests.model.support import nano

    return nano()


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell: programs that the tests start would inherit a deaf ear for Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
