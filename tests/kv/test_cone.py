"""Which rows a run computes: the pure function, against a dependency graph that is walked edge by edge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from ds4v41 import _ext
from ds4v41.checkpoint import ModelConfig
from ds4v41.weights import shape_of

CONFIG = Path(__file__).parents[1] / "golden" / "released" / "config.json"
RELEASED = shape_of(ModelConfig.from_hf(json.loads(CONFIG.read_text()), str(CONFIG)))

# ---- the pure function -----------------------------------------------------------------------------------------------

Node = tuple[str, int, int]
"""("stream" | "window" | "entry", layer, position); stream of layer n_layers enters the head."""


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Window, and ratios and sources of 1 to 6 layers, as in any valid configuration."""
    ratios = draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6))
    sources = [i for i, r in enumerate(ratios) if r and (i == 0 or ratios[i - 1] != r or draw(st.booleans()))]
    of = [max((s for s in sources if s <= i), default=-1) if r else -1 for i, r in enumerate(ratios)]
    return RELEASED | {
        "n_layers": len(ratios),
        "window": draw(st.integers(1, 6)),
        "ratio": ratios,
        "kv_source": [-1 if s < 0 else sources.index(s) for s in of],
        "index_source": of,
        "engram_index": [-1] * len(ratios),
        "source_layer": sources,
    }


@st.composite
def aims(draw: st.DrawFn, shape: dict[str, Any]) -> dict[str, Any]:
    position = draw(st.integers(0, 25))
    end = position + draw(st.integers(0 if position else 1, 25))
    low = [draw(st.one_of(st.just(0), st.just(position), st.integers(0, position))) for _ in range(shape["n_layers"])]
    return {
        "position": position,
        "end": end,
        "logits_from": draw(st.integers(max(0, min(position, end - 1)), end)),
        "window_from": max(0, end - shape["window"] + 1 - draw(st.integers(0, 5))),
        "entries_from": max(0, position - draw(st.integers(0, 1))),
        "low": low,
    }


def needed(shape: dict[str, Any], aim: dict[str, Any]) -> set[Node]:
    """Everything that has to be computed: from what is wanted along every edge, up to what the caches hold."""
    layers, window, position, end = shape["n_layers"], shape["window"], aim["position"], aim["end"]

    def before(node: Node) -> list[Node]:
        kind, i, p = node
        if kind != "stream":
            return [("stream", i, p)]
        if i == 0:
            return []
        edges: list[Node] = [("stream", i - 1, p)]
        edges += [("window", i - 1, q) for q in range(max(0, p - window + 1), p + 1)]
        if shape["kv_source"][i - 1] >= 0:
            edges += [("entry", shape["source_layer"][shape["kv_source"][i - 1]], q) for q in range(p + 1)]
        return edges

    def there(node: Node) -> bool:
        kind, i, p = node
        if kind == "entry":
            return p < aim["entries_from"]
        return kind == "window" and aim["low"][i] <= p < position

    todo: list[Node] = [("stream", layers, p) for p in range(aim["logits_from"], end)]
    todo += [("window", i, p) for i in range(layers) for p in range(aim["window_from"], end)]
    todo += [("entry", i, p) for i in shape["source_layer"] for p in range(aim["entries_from"], end)]
    out: set[Node] = set()
    while todo:
        node = todo.pop()
        if node not in out and not there(node):
            out.add(node)
            todo += before(node)
    return out


@settings(max_examples=300)
@given(st.data())
def test_the_cone_is_the_closure_of_the_dependencies(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    aim = data.draw(aims(shape))
    stream, window = _ext.cone(shape, **aim)
    want = needed(shape, aim)
    for i in range(shape["n_layers"] + 1):
        assert stream[i] == min((p for kind, j, p in want if (kind, j) == ("stream", i)), default=aim["end"]), i
    for i in range(shape["n_layers"]):
        first = min((p for kind, j, p in want if (kind, j) == ("window", i)), default=aim["end"])
        assert window[i] == min(first, stream[i + 1]), i  # rows that go through the layer write theirs in any case


@settings(max_examples=300)
@given(st.data())
def test_slack_never_costs_a_replay_and_takes_nothing_away(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    aim = data.draw(aims(shape)) | {"window_from": 0}
    aim["window_from"] = max(0, aim["end"] - shape["window"] + 1)
    aim["entries_from"] = aim["position"]
    needs = _ext.cone(shape, **aim)[0]
    assume(needs[0] >= aim["position"] < aim["end"])
    aim["window_from"] = max(0, aim["window_from"] - data.draw(st.integers(0, 20)))
    stream, window = _ext.cone(shape, **aim, cut=True)
    event("slack cut" if _ext.cone(shape, **aim)[0] != stream else "slack whole")
    assert stream[0] >= aim["position"] and all(a <= b for a, b in zip(stream, needs, strict=True))
    for i in range(shape["n_layers"]):
        assert stream[i] <= window[i] <= max(stream[i + 1], aim["end"]) and stream[i] <= stream[i + 1]
        for p in range(stream[i + 1], aim["end"]):
            for q in range(max(0, p - shape["window"] + 1), p + 1):
                assert q >= min(window[i], stream[i + 1]) or aim["low"][i] <= q < aim["position"], (i, p, q)


def test_the_numbers_of_the_release() -> None:
    """One logits row needs 2,541 rows of layer 20; window rows and a slack of 256 in all layers need 2,797."""
    shape = RELEASED
    nothing, n = [0] * shape["n_layers"], 100_000
    stream, window = _ext.cone(shape, 0, n, n - 1, n, 0, nothing)
    assert stream[20] == 0 and n - window[20] == 2541 and n - stream[21] == 2414 and stream[40] == n - 1
    stream, window = _ext.cone(shape, 0, n, n - 1, n - 128 - 256, 0, nothing)
    assert n - window[20] == 2797
    gone = [n] * shape["n_layers"]
    assert n - _ext.cone(shape, n, n, n - 1, n - 127, n, gone)[0][0] == 5081
    assert n - _ext.cone(shape, n, n, n - 1, n - 127, n, [0] * 20 + gone[20:])[0][0] == 2541
