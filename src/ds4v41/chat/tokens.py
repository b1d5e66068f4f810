"""The control tokens of the chat format and the fixed texts between them."""

from __future__ import annotations

from typing import Final

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
SYSTEM: Final = "<｜System｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
REMINDER: Final = "<｜latest_reminder｜>"
THINK_OPEN: Final = "<think>"
THINK_CLOSE: Final = "</think>"
DSML: Final = "｜DSML｜"
IMAGE: Final = "<｜deepseek_image｜>"

TASKS: Final[dict[str, str]] = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""Quick-instruction tasks: a user message with one of these asks for a short, special answer."""

TURN_MARKERS: Final = (SYSTEM, USER, ASSISTANT, REMINDER)
"""Tokens that open a turn. A model that writes one has run past the end of its answer."""

VISIBLE: Final = (
    "<dsml:", "</dsml:", "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>",
    "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>",
)  # fmt: skip
"""Added tokens that are part of an answer's text: the grounding marks, and two that are only spellings."""

CALLS_TAG: Final = " calls"
INVOKE_TAG: Final = " invoke"
PARAMETER_TAG: Final = " parameter"
"""Tag names begin with a blank (V4's did not)."""

EFFORT_LEVELS: Final[dict[str, int]] = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT: Final = 75
