"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from ds4v41.errors import OptionError


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    Text is given out as soon as it cannot be part of a stop string any more; the stop string itself never is. The
    result does not depend on how the text is cut: the stop that is complete first counts, of several that end at
    the same character the longest.

    >>> matcher = StopMatcher(["END"])
    >>> matcher.push("some E"), matcher.push("NDing")
    (('some ', None), ('', 'END'))
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        """Raises OptionError when `stops` is not text or a list of non-empty texts."""
        given = [stops] if isinstance(stops, str) else stops
        if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
            raise OptionError(f"stop: expected text or a list of texts, found {type(stops).__name__}")
        for i, stop in enumerate(given):
            if not isinstance(stop, str):
                raise OptionError(f"stop[{i}]: expected text, found {type(stop).__name__}")
            if not stop:
                raise OptionError(f"stop[{i}]: an empty stop string would end every answer before it begins")
        self._stops = tuple(dict.fromkeys(given))
        self._held = ""
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that was found, or None."""
        return self._hit

    @property
    def held(self) -> str:
        """Text that is held back because it may be the beginning of a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """More text -> (text that may be shown, the stop string if it is complete now). After a hit nothing more is
        given out."""
        if self._hit is not None:
            return "", self._hit
        seen = self._held + text
        found = self._first(seen)
        if found is not None:
            start, self._hit = found
            self._held = ""
            return seen[:start], self._hit
        keep = self._beginning(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string."""
        text, self._held = self._held, ""
        return text

    def _first(self, seen: str) -> tuple[int, str] | None:
        places = [(at + len(stop), at, stop) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if not places:
            return None
        _, start, stop = min(places)
        return start, stop

    def _beginning(self, seen: str) -> int:
        """Length of the longest end of `seen` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(seen)), longest, -1):
                if seen.endswith(stop[:n]):
                    longest = n
                    break
        return longest
