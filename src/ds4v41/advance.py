"""Bringing a session to a prompt at the least cost, and keeping what it has in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import StoreError
from .history import history_of
from .kvstore.find import Found
from .kvstore.format import Prefixes
from .kvstore.results import PutResult
from .kvstore.store import FRESH
from .reuse import Choice, Costs, choose, common_prefix, why_not_more

if TYPE_CHECKING:
    from .session import Session

MAX_TRIES = 32
WORTH_A_LOOK = 2
"""The store is asked when more tokens than this would have to be run."""
BRANCH_WEIGHT = 4.0


def reuse(session: Session, ids: NDArray[np.int32]) -> tuple[int, NDArray[np.int32]]:
    """Bring the session to a prefix of `ids` [n]. Returns its length (n itself only when the last logits are known) and
    the history [n] that the whole is to have. Sets the session's stats."""
    ext, store, stats = session._ext, session._store, session._stats
    have = np.asarray(ext.tokens, np.int32)
    common = common_prefix(have, ids)
    history = history_of(ids, np.asarray(ext.history, np.int32), common, session.model.prefill == "matrix")
    if common == len(ids) == len(have) and ext.last_logits() is not None:
        stats.begin(common, "the session holds exactly this prompt")
        return common, history
    why = why_not_more(len(have), len(ids), common)
    prefixes = Prefixes(session._root(), history) if store is not None else None

    total = len(ids)
    cost = Costs(
        lambda p: p - ext.rewind_start(p, total),
        lambda p: p - ext.restore_start(p, total, False),
        lambda p: p - ext.restore_start(p, total, True),
    )
    for _ in range(MAX_TRIES):
        at = choose(total, common, cost, None)
        found = None
        if store is not None and prefixes is not None and at.cost > WORTH_A_LOOK:
            found = store.find(prefixes)
            if found.pages and found.pages[-1].end > session.context:  # it goes on elsewhere, beyond what fits here
                found = store.find(prefixes, False)
            at = choose(total, common, cost, found)
        if not at.stored or found is None or prefixes is None:
            return _stay(session, at, total, why), history
        try:
            return _restore(session, ids, prefixes, found, at, common, why), history
        except StoreError as error:
            # The damaged object is gone from the store by now; what the session still has counts on.
            have = np.asarray(ext.tokens, np.int32)
            common = common_prefix(have, ids)
            why = f"{why}; a stored page could not be used ({error})"
    return _stay(session, choose(total, common, cost, None), total, why), history


def _stay(session: Session, at: Choice, total: int, why: str) -> int:
    encoder = session._ext.encoder_kept(at.position)
    again = session._ext.rewind(at.position, total)
    why += replayed_note(encoder, again)
    session._stats.begin(at.position, why, replayed=again)
    return at.position


def replayed_note(encoder_kept: bool, again: int) -> str:
    """What to say of tokens that were run again; nothing of a single one, which an open pair may cost anywhere."""
    if again < 2:
        return ""
    return f"; {'decoder window' if encoder_kept else 'window rows'} not kept: {again:,} replayed"


def _restore(
    session: Session, ids: NDArray[np.int32], prefixes: Prefixes, found: Found, at: Choice, common: int, why: str
) -> int:
    ext, store = session._ext, session._store
    assert store is not None
    keep = min(common, at.position)
    pages = [page for page in found.path_to(at.position) if page.end > keep]
    ext.begin_restore(keep)
    store.restore(ext, prefixes.tokens[: at.position], pages, at.frontier)
    position, again = at.position, 0
    note = f"{at.position - keep:,} tokens restored from the store"
    if at.frontier is not None:
        if position == len(ids) and ext.last_logits() is None:
            position -= 1
            again = ext.rewind(position)
        again += ext.complete(len(ids)) if position < len(ids) else 0
        note += replayed_note(True, again)
    else:
        # What a short continuation needs makes a full frontier, what a long one needs the encoder's.
        again = ext.complete(0 if len(ids) - position <= ext.decoder_cone else len(ids))
        if again:
            note += f", {again:,} replayed since no frontier is kept at {position:,}"
    if found.reach < len(ids):
        note += f", which has {found.reach:,} of these {len(ids):,}"
    session._stats.begin(position, f"{note}; {why}", replayed=again, restored=at.position - keep)
    store.touch([*found.path_to(at.position), *([at.frontier] if at.frontier else [])])
    if at.frontier is None:
        # Another chain branches off here: the next one that comes this way finds a frontier.
        branch = Prefixes(prefixes.root, prefixes.tokens[:position])
        store.put(ext, branch, session.model.numerics_id, weight=BRANCH_WEIGHT)
    return position


def checkpoint(session: Session, branch: bool = False) -> PutResult | None:
    """Store what is new of the session's state, if it has a store. branch: others will go on from here as well."""
    store = session._store
    if store is None or session.closed or session._unsafe is not None:
        return None
    session.drop_ahead()
    if session.position == 0 or not session._ext.encoder_kept(session.position):
        return None
    tokens = np.asarray(session._ext.history, np.int32)
    weight = BRANCH_WEIGHT if branch else FRESH
    result = store.put(session._ext, Prefixes(session._root(), tokens), session.model.numerics_id, weight=weight)
    session._stats.stored = result
    return result
