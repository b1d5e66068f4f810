"""Manifests: the recorded bits come out again everywhere, and a difference is found and named."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds4v41
from ds4v41 import _ext
from ds4v41.checkpoint import open_checkpoint
from ds4v41.cli import main
from ds4v41.errors import CheckpointError, ManifestError
from ds4v41.manifest import PACKAGED, Fixture, Manifest, _dump, checkpoint_digest, find_manifests, read_manifest
from ds4v41.model import NANO
from ds4v41.verify import FixtureResult, Verifier, trace_digests

REPOSITORY = Path(__file__).parents[2] / "manifests"
NANO_MANIFEST = PACKAGED / "nano.json"
MACHINES = [("auto", 1), ("auto", 2), *((f"cpu/{isa}", 2) for isa in _ext.cpu_isas()[1:])]


@pytest.mark.parametrize("path", [NANO_MANIFEST, *sorted(REPOSITORY.glob("*.json"))], ids=lambda path: path.stem)
@pytest.mark.parametrize(("backend", "threads"), MACHINES)
def test_the_recorded_bits_come_out_again(path: Path, backend: str, threads: int) -> None:
    manifest = read_manifest(path)
    slow = backend == "cpu/plain"
    with Verifier(backend=backend, threads=threads) as verifier:
        for fixture in manifest.fixtures[4::4] if slow else manifest.fixtures:
            result = verifier.verify(manifest, fixture, trace=True)
            assert result.problems == [], fixture.name
            assert result.n_tokens == fixture.n_tokens and result.n_rows >= fixture.n_tokens


def test_the_repository_has_manifests_of_the_golden_checkpoints() -> None:
    (path,) = REPOSITORY.glob("*.json")
    used = {(fixture.checkpoint, fixture.activations) for fixture in read_manifest(path).fixtures}
    tiny = "../tests/golden/tiny/"
    assert used == {(f"{tiny}bf16", "fp32"), (f"{tiny}bf16", "bf16"), (f"{tiny}fp8fp4", "fp8")}


def test_a_recorded_run_is_what_the_api_gives() -> None:
    fixture = read_manifest(NANO_MANIFEST).fixtures[0]
    assert fixture.expected is not None
    with ds4v41.Model.open(activations="fp8") as model, model.session() as session:
        done = session.generate(fixture.prompt["text"], max_tokens=fixture.n_tokens, temperature=0).finish()
        session.rewind(0)
        prompt = model.tokenizer.encode(fixture.prompt["text"], add_bos=True)
        rows = session.prefill([*prompt, *done.tokens[:-1]], logits="all")
    assert rows is not None
    assert done.tokens == fixture.expected["tokens"]
    assert hashlib.sha256(rows.astype("<f4").tobytes()).hexdigest() == fixture.expected["logits_sha256"]
    ids = np.asarray(done.tokens, "<i4").tobytes()
    assert hashlib.sha256(ids).hexdigest() == fixture.expected["tokens_sha256"]


# ---- differences ----------------------------------------------------------------------------------------------------


def one_fixture(name: str = "code") -> tuple[Manifest, Fixture, dict[str, Any]]:
    """A manifest object with one fixture, whose expectations may be changed."""
    whole = read_manifest(NANO_MANIFEST)
    fixture = copy.deepcopy(next(f for f in whole.fixtures if f.name == name))
    assert fixture.expected is not None
    return Manifest(whole.path, [fixture]), fixture, fixture.expected


def verify(manifest: Manifest, fixture: Fixture, trace: bool = False) -> FixtureResult:
    with Verifier() as verifier:
        return verifier.verify(manifest, fixture, trace)


def test_the_first_token_that_differs_is_named() -> None:
    manifest, fixture, expected = one_fixture()
    found = expected["tokens"][5]
    expected["tokens"][5:7] = [1, 2]
    result = verify(manifest, fixture)
    n_prompt = result.n_rows - result.n_tokens + 1
    assert f"number 5 (position {n_prompt + 5}): recorded 1, found {found}" in result.problems[0]
    assert result.difference == {"token": 5, "position": n_prompt + 5, "expected": 1, "found": found}
    assert "--trace" in result.problems[-1] and not result.ok


def test_a_row_that_differs_is_named_though_the_tokens_agree() -> None:
    manifest, fixture, expected = one_fixture()
    expected["logits_sha256"] = "0" * 64
    expected["rows"][2] = expected["rows"][20] = "00000000"
    result = verify(manifest, fixture)
    assert result.problems[0] == "logits: they differ, first in row 2 (prompt position 2)"
    assert len(result.problems) == 2 and result.difference["row"] == 2


def test_shorter_recordings_differ_at_their_end() -> None:
    manifest, fixture, expected = one_fixture()
    del expected["tokens"][-1]
    assert "number 47" in verify(manifest, fixture).problems[0]


def test_trace_names_the_first_operation_in_the_order_of_computation() -> None:
    manifest, fixture, expected = one_fixture()
    expected["trace"]["attn_q"][3] = expected["trace"]["ffn_out"][2] = expected["trace"]["final_norm_out"][0] = "0" * 12
    result = verify(manifest, fixture, trace=True)
    assert result.problems == ["trace: the first operation that differs is ffn_out, layer 2"]
    assert result.difference == {"operation": "ffn_out", "layer": 2}


def test_an_operation_that_is_gone_is_named() -> None:
    manifest, fixture, expected = one_fixture()
    expected["trace"]["old_op"] = [None] * 10
    assert "old_op was recorded but does not run any more" in verify(manifest, fixture, trace=True).problems[0]


@pytest.mark.parametrize(
    ("tensor", "operation", "layer"),
    [
        ("layers.4.ffn.shared_experts.w2.weight", "ffn_out", 4),
        ("layers.6.attn.wo_b.weight", "attn_out", 6),
        ("layers.1.engram.wkv.weight", "engram_out", 1),
        ("layers.7.attn.indexer.weights_proj.weight", "index_scores", 7),
        ("norm.weight", "final_norm_out", -1),
    ],
)
def test_a_changed_weight_is_traced_to_its_operation(tmp_path: Path, tensor: str, operation: str, layer: int) -> None:
    """A real difference: the same run on a checkpoint with a changed tensor, passed off as the recorded one."""
    folder = tmp_path / "changed"
    shutil.copytree(NANO, folder)
    found = open_checkpoint(folder).tensors[tensor]
    with open(found.file, "r+b") as file:
        file.seek(found.offset)
        data = bytearray(file.read(found.nbytes))
        data[1::2] = bytes(byte ^ 0x10 for byte in data[1::2])  # other exponents; no NaN in bf16 or e4m3 here
        file.seek(found.offset)
        file.write(data)
    manifest, fixture, expected = one_fixture("long")
    fixture.checkpoint = str(folder)
    refused = verify(manifest, fixture, trace=True)
    assert len(refused.problems) == 1 and "its bytes are not those of the recorded run" in refused.problems[0]
    expected["checkpoint_sha256"] = checkpoint_digest(folder)
    result = verify(manifest, fixture, trace=True)
    assert (result.difference["operation"], result.difference["layer"]) == (operation, layer)


def test_another_numerics_id_is_named() -> None:
    manifest, fixture, _ = one_fixture()
    fixture.activations = "bf16"
    result = verify(manifest, fixture, trace=True)
    assert result.problems[0] == "numerics id: recorded canonical-1/fp8, this is canonical-1/bf16"
    assert len(result.problems) > 1


def test_a_trace_does_not_depend_on_what_the_scratch_held() -> None:
    with ds4v41.Model.open() as model:
        tokens = list(range(100, 230))
        first = trace_digests(model, tokens)
        assert trace_digests(model, tokens) == first
        assert {name.partition(".")[0] for name in first} >= {f"L{layer}" for layer in range(10)}


# ---- updating -------------------------------------------------------------------------------------------------------


def fresh(path: Path) -> Manifest:
    fixtures = [
        Fixture("a", "nano", "fp8", {"text": "def f("}, 4, {"temperature": 0}),
        Fixture("b", "nano", "fp8", {"tokens": [0, 5, 6]}, 3, {"temperature": 1.0, "seed": 3, "presence_penalty": 1.5}),
    ]
    manifest = Manifest(path, fixtures)
    manifest.write()
    return manifest


def test_update_records_and_then_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    fresh(path)
    assert main(["verify", str(path)]) == 1
    assert "nothing is recorded for this fixture yet: run verify with --update" in capsys.readouterr().out
    assert main(["verify", str(path), "--update"]) == 0
    assert capsys.readouterr().out.count("recorded") == 2
    first = path.read_bytes()
    assert main(["verify", str(path), "--trace", "--threads", "1"]) == 0
    assert main(["verify", str(path), "--update"]) == 0
    assert capsys.readouterr().out.count("unchanged") == 2 and path.read_bytes() == first
    assert [item.name for item in tmp_path.iterdir()] == ["m.json"]


def test_update_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    manifest = fresh(path)
    manifest.fixtures[1].checkpoint = "nowhere"
    manifest.write()
    before = path.read_bytes()
    assert main(["verify", str(path), "--update"]) == 1
    assert path.read_bytes() == before


def test_verify_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    manifest = fresh(path)
    with Verifier() as verifier:
        for fixture in manifest.fixtures:
            verifier.update(manifest, fixture)
    assert manifest.fixtures[0].expected is not None
    manifest.fixtures[0].expected["tokens"][2] = 0
    manifest.write()
    assert main(["verify", str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False
    a, b = data["manifests"][0]["fixtures"]
    assert (a["name"], a["ok"], a["difference"]["token"]) == ("a", False, 2)
    assert (b["name"], b["ok"], b["problems"]) == ("b", True, [])


# ---- the file -------------------------------------------------------------------------------------------------------


def test_every_fault_of_a_manifest_is_reported_at_once(tmp_path: Path) -> None:
    good = json.loads(NANO_MANIFEST.read_bytes())["fixtures"][0]
    changes: list[dict[str, Any]] = [
        {"activations": "fp7"},
        {"n_tokens": 0},
        {"n_tokens": True},
        {"prompt": {}},
        {"prompt": {"text": "x", "tokens": [1]}},
        {"prompt": {"text": "x", "thinking": True}},
        {"prompt": {"tokens": [1, -2]}},
        {"prompt": {"text": ""}},
        {"sampling": {"temperature": 1.0}},
        {"sampling": {}},
        {"checkpoint": ""},
        {"expected": {"tokens": []}},
        {"expected": {**good["expected"], "extra": 1}},
        {"surprise": 1},
    ]
    items = [{**good, "name": f"f{i}", **change} for i, change in enumerate(changes)]
    missing = {key: value for key, value in good.items() if key != "prompt"}
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"ds4v41_manifest": 1, "fixtures": [*items, good, good, missing, 7], "note": "x"}))
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    text = "\n".join(caught.value.problems)
    for i in range(len(changes)):
        assert f"fixtures[{i}]" in text, changes[i]
    assert "note: unknown key" in text and "name 'code' is used twice" in text
    assert f"fixtures[{len(items) + 2}]: missing: prompt" in text and f"fixtures[{len(items) + 3}]: expected an" in text
    assert f"fixtures[{len(items)}]" not in text  # the good one


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ds4v41_manifest": 2, "fixtures": []}', "\xff",
                                  '{"ds4v41_manifest": 1, "fixtures": []}', '{"ds4v41_manifest": 1}'])  # fmt: skip
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError, match=r"m\.json"):
        read_manifest(path)


def test_finding_manifests(tmp_path: Path) -> None:
    assert find_manifests([]) == sorted(PACKAGED.glob("*.json")) != []
    with pytest.raises(ManifestError, match="found none"):
        find_manifests([tmp_path])
    with pytest.raises(ManifestError, match="no such manifest"):
        find_manifests([tmp_path / "x.json"])


def test_checkpoint_digest(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"abc")
    assert checkpoint_digest(file) == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        checkpoint_digest(tmp_path / "nowhere")
    folder = tmp_path / "nano"
    shutil.copytree(NANO, folder)
    calls: list[tuple[int, int]] = []
    first = checkpoint_digest(folder, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 20_000_000
    (folder / "README.md").write_text("not part of the model")
    assert checkpoint_digest(folder) == first
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert checkpoint_digest(folder) != first


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)


@given(values)
def test_the_written_form_is_the_same_data(value: Any) -> None:
    assert json.loads(_dump(value)) == value
