"""Planted faults are found, and the report names what a developer needs: kernel, argument, thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4v41 import _ext
from ds4v41.errors import BackendError, OptionError

from .both import CHECKED

pytestmark = pytest.mark.skipif(
    not hasattr(_ext, "standin"), reason="this build has no stand-in for Metal (DS4_STANDIN=ON)"
)
standin: Any = getattr(_ext, "standin", None)

N = 64


def run(kernel: str, *, groups: int = 1, order: str = "forward", checked: bool = True,
        buffers: dict[int, Any] | None = None, threadgroup: int = 0) -> None:  # fmt: skip
    if checked and not CHECKED:
        pytest.skip("this build has no checked kernels")
    if buffers is None:
        ins = [p for p in standin.signature(kernel)["params"] if p[1].startswith("device")]
        buffers = {p[2]: np.zeros(N, np.uint32) for p in ins}
    standin.launch(
        kernel,
        (groups, 1, 1),
        (N, 1, 1),
        buffers,
        {0: threadgroup} if threadgroup else {},
        order=order,
        checked=checked,
    )


RACES = [
    ("planted_no_barrier", "threadgroup memory index 0 ('scratch')", "thread"),
    ("planted_wrong_memory", "threadgroup memory index 0 ('scratch')", "no barrier between"),
    ("planted_read_then_write", "writes threadgroup memory index 0 ('scratch')", "read, with no barrier"),
    ("planted_no_simd_barrier", "threadgroup memory index 0 ('scratch')", "thread"),
]


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
@pytest.mark.parametrize(("kernel", "what", "more"), RACES)
def test_a_missing_barrier_is_found_in_every_order(kernel: str, what: str, more: str, order: str) -> None:
    with pytest.raises(BackendError) as caught:
        run(kernel, order=order, threadgroup=4 * N)
    text = str(caught.value)
    # In some orders the race shows as a read of memory that nobody has written yet.
    assert kernel in text and what in text and "of threadgroup (0, 0, 0)" in text
    assert more in text or "no thread of its threadgroup wrote" in text


def test_with_its_barrier_the_same_is_right() -> None:
    out = np.zeros(N, np.uint32)
    run("right_simd_barrier", buffers={0: out}, threadgroup=4 * N)
    np.testing.assert_array_equal(out, np.arange(N) ^ 1)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (
            "planted_write_outside",
            "thread (63, 0, 0) of threadgroup (0, 0, 0)|writes outside|"
            "byte 256 of buffer index 1 ('out'), which has 256",
        ),
        ("planted_read_outside", "thread (0, 0, 0)|reads outside|byte -4 of buffer index 0 ('in')"),
        ("planted_local_outside", "writes outside|byte 256 of threadgroup memory index 0 ('scratch')"),
        ("planted_unwritten", "thread (3, 0, 0)|byte 12, which no thread of its threadgroup wrote"),
    ],
)
def test_memory_outside_and_unwritten_memory_are_found(kernel: str, what: str) -> None:
    needs = any(p[1] == "threadgroup" for p in standin.signature(kernel)["params"])
    with pytest.raises(BackendError) as caught:
        run(kernel, threadgroup=4 * N if needs else 0)
    for part in (kernel, *what.split("|")):
        assert part in str(caught.value)


def test_a_write_outside_does_not_happen() -> None:
    memory = np.full(N + 16, 9, np.uint32)
    with pytest.raises(BackendError, match="writes outside"):
        run("planted_write_outside", buffers={0: np.zeros(N, np.uint32), 1: memory[:N]})
    assert (memory[N:] == 9).all()


def test_threadgroups_that_collide_are_found() -> None:
    with pytest.raises(BackendError, match="a thread of another threadgroup wrote"):
        run("planted_groups_collide", groups=2)
    run("planted_groups_collide", groups=1)


def test_plain_and_atomic_accesses_to_one_place_are_found() -> None:
    both = np.zeros(1, np.uint32)
    with pytest.raises(BackendError, match="planted_plain_and_atomic"):
        run("planted_plain_and_atomic", buffers={0: both, 1: both})
    run("planted_plain_and_atomic", buffers={0: both, 1: np.zeros(1, np.uint32)})


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("planted_some_at_barrier", "threads 0 to 39 at threadgroup_barrier|threads 40 to 63 returned"),
        ("planted_two_barriers", "at different barriers|planted.metal"),
        ("planted_early_return", "thread 63 returned|threads 0 to 62 at threadgroup_barrier"),
        ("planted_lanes_apart", "at simd_shuffle_xor|returned"),
        ("planted_two_operations", "different operations|simd_shuffle_xor|simd_broadcast"),
    ],
)
def test_divergence_is_found_in_every_build(kernel: str, what: str, checked: bool) -> None:
    for _ in range(2):  # and the runtime is sound afterwards
        with pytest.raises(BackendError) as caught:
            run(kernel, checked=checked)
        for part in (kernel, *what.split("|")):
            assert part in str(caught.value)
    test_with_its_barrier_the_same_is_right()


def test_what_is_bound_is_checked() -> None:
    a, b = np.zeros(N, np.uint32), np.zeros(N, np.uint32)
    with pytest.raises(BackendError, match=r"argument 'out' needs buffer index 1, nothing is bound there"):
        run("right_double", buffers={0: a, 2: b}, checked=False)
    with pytest.raises(BackendError, match=r"'scratch' needs threadgroup memory at index 0"):
        run("planted_no_barrier", checked=False)
    with pytest.raises(BackendError, match=r"written by the kernel, but its bytes were set"):
        run("right_double", buffers={0: a, 1: bytes(4 * N)}, checked=False)
    with pytest.raises(BackendError, match=r"reads a struct of 8 bytes, bound are 4"):
        standin.launch("probe_row_f32", (1, 1, 1), (32, 1, 1), {0: bytes(4), 1: a, 2: a, 3: b})
    with pytest.raises(BackendError, match=r"aligned to 4 bytes"):
        run("right_double", buffers={0: a.view(np.uint8)[1:], 1: b}, checked=False)
    with pytest.raises(OptionError, match="0 to 30, found 31"):
        run("right_double", buffers={31: a}, checked=False)
    with pytest.raises(OptionError, match="no kernel 'nothing'"):
        standin.launch("nothing", (1, 1, 1), (32, 1, 1), {})


def test_limits_of_the_hardware_hold() -> None:
    with pytest.raises(BackendError, match="33792 bytes of threadgroup memory, at most 32768"):
        run("planted_no_barrier", threadgroup=33 * 1024)
    with pytest.raises(BackendError, match="must be a multiple of 16"):
        run("planted_no_barrier", threadgroup=4 * N + 4)
    x = np.zeros(4096, np.uint32)
    with pytest.raises(BackendError, match="1056 threads in a threadgroup, 1 to 1024"):
        standin.launch("right_double", (1, 1, 1), (1056, 1, 1), {0: x, 1: x})
    with pytest.raises(BackendError, match="a multiple of 32"):
        standin.launch("planted_early_return", (1, 1, 1), (48, 1, 1), {0: x})


# ---------------------------------------------------------------- dispatches, through the classes of Metal


def double(source: str, target: str) -> dict[str, Any]:
    return {"kernel": "right_double", "groups": (2, 1, 1), "group_size": (32, 1, 1), "buffers": {0: source, 1: target}}


BARRIER: dict[str, Any] = {"barrier": None}


@pytest.fixture
def options() -> Any:
    def set_options(**given: Any) -> None:
        if given.get("checked") and not CHECKED:
            pytest.skip("this build has no checked kernels")
        standin.set_options(**given)

    yield set_options
    standin.set_options(order="forward", checked=False, execute=True)


def chain(steps: list[dict[str, Any]], concurrent: bool = True) -> np.ndarray:
    arrays = {name: np.zeros(N, np.uint32) for name in "bcd"} | {"a": np.arange(N, dtype=np.uint32)}
    standin.encode(steps, arrays, concurrent=concurrent)
    return arrays["c"]


def test_a_missing_barrier_between_dispatches_is_found(options: Any) -> None:
    options(checked=True)
    for order in ("forward", "reverse"):
        options(order=order)
        with pytest.raises(
            BackendError, match=r"the dispatch of kernel right_double before (wrote|read), with no memoryBarrier"
        ):
            chain([double("a", "b"), double("b", "c")])
        with pytest.raises(BackendError, match=r"with no memoryBarrier"):  # the barrier is for another buffer
            chain([double("a", "b"), {"barrier": "a"}, double("b", "c")])
        expected = 4 * np.arange(N)
        np.testing.assert_array_equal(chain([double("a", "b"), BARRIER, double("b", "c")]), expected)
        np.testing.assert_array_equal(chain([double("a", "b"), {"barrier": "b"}, double("b", "c")]), expected)
        np.testing.assert_array_equal(chain([double("a", "b"), double("b", "c")], concurrent=False), expected)
        chain([double("a", "b"), double("a", "c")])  # two readers


def test_it_shows_in_the_fast_build_too(options: Any) -> None:
    options(order="reverse")
    assert not (chain([double("a", "b"), double("b", "c")]) == 4 * np.arange(N)).all()


def test_encoding_mistakes_fail_the_command_buffer(options: Any) -> None:
    def step(**changes: Any) -> list[dict[str, Any]]:
        return [double("a", "b") | changes]

    for steps, what in [
        (step(buffers={0: bytes(4097), 1: "b"}), "setBytes index 0: 4097 bytes, possible are 1 to 4096"),
        (step(buffers={0: ("a", 256), 1: "b"}), "offset 256 of a buffer of 256 bytes"),
        (step(buffers={0: ("a", 2), 1: "b"}), r"aligned to 4 bytes: wrong offset"),
        (step(buffers={0: "a", 31: "b"}), "setBuffer index 31, possible are 0 to 30"),
        (step(buffers={0: "a"}), "argument 'out' needs buffer index 1"),
    ]:
        with pytest.raises(BackendError, match=what):
            chain(steps)
    assert standin.counters()["unseen_errors"] == 0


def test_grids_with_cut_edges() -> None:
    out = np.zeros(50, np.uint32)
    steps = [{"kernel": "right_double", "threads": (50, 1, 1), "group_size": (32, 1, 1), "buffers": {0: "a", 1: "b"}}]
    standin.encode(steps, {"a": np.arange(50, dtype=np.uint32), "b": out})
    np.testing.assert_array_equal(out, 2 * np.arange(50))


def test_counting_without_running(options: Any) -> None:
    options(execute=False)
    standin.counters(reset=True)
    result = chain([double("a", "b"), double("a", "d"), BARRIER, double("b", "c")])
    counted = standin.counters()
    assert (result == 0).all()
    expected = {
        "command_buffers": 1,
        "encoders": 1,
        "dispatches": 3,
        "steps": 2,
        "barriers": 1,
        "host_waits": 1,
        "threads": 3 * N,
    }
    assert {name: counted[name] for name in expected} == expected
