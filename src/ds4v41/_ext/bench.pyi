"""Measurements below the level of a session."""



class DeviceProbe:
    """
    Memory of the device, and dispatches that wait for each other. Times are (wall, device) seconds of all.
    """

    def __init__(self, bytes: int) -> None: ...

    def copy(self, bytes: int, times: int) -> tuple[float, float]:
        """Copies so many bytes to the other half of the memory."""

    def empty(self, times: int) -> tuple[float, float]:
        """Dispatches that do next to nothing."""

    def product(self, type: str, rows: int, cols: int, n: int, times: int) -> tuple[float, float]:
        """
        n activation rows times random matrices, one after the other through the memory.
        """

class Probe:
    """
    Memory to touch and threads to touch it with. Times are (wall, CPU per thread) seconds.
    """

    def __init__(self, isa: str, threads: int, bytes: int, huge_pages: bool) -> None: ...

    def read(self, offset: int, bytes: int) -> tuple[float, float]:
        """Reads a range with all threads."""

    def fma(self, rounds: int) -> tuple[float, float, float]:
        """Fused multiply-adds in registers: (wall, CPU, GFLOP)."""

    def matrix_peak(self, rounds: int) -> tuple[float, float, float]:
        """The same by the instruction of the matrix class."""

    def product(self, type: str, rows: int, cols: int, offset: int, n: int, matrix: bool = False) -> tuple[float, float]:
        """n activation rows times the matrix at an offset."""
