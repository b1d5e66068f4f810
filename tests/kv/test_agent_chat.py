"""Agent chats over one store: every turn reuses what was stored, and the bits are those of a fresh run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.agent_chat import conversations
from benchmarks.agent_chat_run import run

from ds4v41 import KVStore, Session
from ds4v41.reuse import common_prefix

from .support import CONE, Reference, session


def test_no_turn_pays_for_what_was_stored(tmp_path: Path) -> None:
    budget = 8 << 20
    reference = Reference(1 << 14)
    store = KVStore(tmp_path / "s", budget=budget)
    live: dict[int, Session] = {}
    states: list[np.ndarray] = []
    reused = reusable = 0
    for number, turn in enumerate(conversations(turns=60, system=150, scale=0.03)):
        s = live.setdefault(turn.chat, session(context=1 << 14, chunk=256, retain=64, store=store))
        row = s.advance_to(turn.prompt, shared=150)
        stats = replace(s.stats)
        common = max((common_prefix(state, turn.prompt) for state in states), default=0)
        whole = max((len(x) for x in states if common_prefix(x, turn.prompt) == len(x)), default=0)
        assert stats.reused + stats.prefilled == len(turn.prompt)
        assert stats.reused + CONE >= min(common, len(turn.prompt) - 1) and stats.replayed <= CONE, stats.why
        assert stats.replayed + stats.prefilled <= max(1, len(turn.prompt) - whole), stats.why
        if number % 6 == 0:
            np.testing.assert_array_equal(row, reference.after(turn.prompt)[0])
        states.append(turn.prompt)
        s.prefill(turn.reply, None)
        states.append(np.array(s.tokens, np.int32))
        reused += min(stats.reused, common)
        reusable += common
        assert store.stats().disk_bytes <= budget
        if turn.restart:
            for old in live.values():
                old.close()
            live.clear()
            store.close()
            store = KVStore(tmp_path / "s", budget=budget)
    assert reused >= 0.99 * reusable
    assert store.verify().clean
    store.close()


@pytest.mark.parametrize("budget", [450_000, 603_477, 1 << 20])
def test_a_small_budget_is_kept_too(budget: int, tmp_path: Path) -> None:
    """Where the index and its log are a good part of it."""
    table, final = run(tmp_path, 0.02, budget)
    assert final.pages > 0 and final.budget == budget
    assert max(row["disk_bytes"] for row in table) <= budget
