"""Plugin of pytest: counts launches in place of the profiler, and fails tests for faults of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import driver
from tests.support.fake_cuda.launches import errors, launched

#: Tests that cannot run here, with the reasons.
SKIPPED = {
    "test_a_tensor_of_more_elements_than_32_bits_count": "2**31 elements: the emulator would need hours",
    "test_second_moment[native]": "10,000 steps of the longest kernel: the emulator needs 20 minutes",
}


def launches(step: Callable[[], object], device: str) -> int:
    """Count launches, in place of ``benchmarks.timing.launches``: torch's profiler needs a card."""
    torch.cuda.synchronize()
    driver.counters()
    step()
    torch.cuda.synchronize()
    return driver.counters().get("launches", 0)


def pytest_report_header() -> str:
    return f"fake CUDA: {torch.cuda.device_count()} devices, torch {torch.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in SKIPPED:
            item.add_marker(pytest.mark.skip(reason=f"not with --fake-gpu: {SKIPPED[item.name]}"))
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if getattr(getattr(module, "launches", None), "__module__", "") == "benchmarks.timing":
            module.launches = launches


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test for faults, and clear them: the next test begins with a working card."""
    _forget()
    try:
        result = yield
        driver.drain()
        if errors:
            pytest.fail(f"fake CUDA: {errors[0]}", pytrace=False)
    except Exception as error:
        if errors:  # of which the exception is a consequence
            raise RuntimeError(f"fake CUDA: {errors[0]}") from error
        raise
    finally:
        _forget()
    return result


def _forget() -> None:
    driver.drain()
    driver.forget_faults()
    errors.clear()
    launched.clear()
