"""The command line: in this process for what it prints, in processes of their own for signals, pipes and terminals."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ds4v41
from ds4v41.cli.parser import SPEED
from ds4v41.model import NANO

from .cli_support import COMMAND, GREEDY, PROMPT, QUESTION, RELEASED, environment, run


@pytest.fixture(scope="module")
def expected() -> ds4v41.Completion:
    """The same through the API."""
    with ds4v41.Model.open() as model, model.session() as session:
        return session.generate(PROMPT, max_tokens=24, temperature=0).finish()


# ---- the program ---------------------------------------------------------------------------------------------------


def test_version_and_help(call: Any) -> None:
    assert call("--version").out == f"ds4v41 {ds4v41.__version__}\n"
    text = call("--help").out
    for command in ("generate", "chat", "inspect", "convert", "verify", "pull"):
        assert re.search(rf"^ +{command} ", text, re.MULTILINE)
        assert call(command, "--help").code == 0


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "ds4v41", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=True)
    assert done.stdout == f"ds4v41 {ds4v41.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from ds4v41.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass\n" + (
        "heavy = ('numpy', 'rich', 'tokenizers', 'ds4v41._ext', 'huggingface_hub')\n"
        "sys.exit(str([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60)
    assert done.stderr.decode().strip() == "[]"


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nonsense",),
        ("generate", PROMPT, "--temp", "0"),  # no abbreviations
        ("generate", PROMPT, "--unknown"),
        ("generate", PROMPT, "--temperature", "warm"),
        ("generate", PROMPT, "--temperature", "-1"),
        ("generate", PROMPT, "--max-tokens", "0"),
        ("generate", PROMPT, "--threads", "0"),
        ("generate", PROMPT, "--backend", "cpu/abacus"),
        ("generate", PROMPT, "--logprobs"),  # would show nowhere
        ("generate", PROMPT, "--top-logprobs", "3"),
        ("generate", PROMPT, "--logit-bias", "x=1"),
        ("generate", PROMPT, "--logit-bias", "5=nan"),
        ("generate", PROMPT, "--file", "x"),
        ("generate", "a\udcffb"),
        ("chat", "hello", "--whole"),
        ("chat", "hello", "--think", "101"),
        ("chat", "hello", "--think", "medium"),
        ("inspect", str(NANO), "--activations", "bf16"),
        ("inspect", str(NANO), "--context", "0"),
        ("convert", "a"),
        ("convert", "a", "b", "c"),
        ("convert", "drafter", "a"),
        ("convert", "drafter", str(NANO), "b", "--tokenizer", "t"),
        ("convert", str(NANO), "b", "--recipe", "q5"),
        ("verify", "--update", "--trace"),
        ("pull", "q5"),
        ("generate", PROMPT, "--store-budget", "1 GiB"),
        ("generate", PROMPT, "--store-remote", "memory://x"),
    ],
)  # fmt: skip
def test_wrong_usage_is_2(call: Any, args: tuple[str, ...]) -> None:
    result = call(*args)
    assert result.code == 2 and result.out == ""
    assert "ds4v41" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", PROMPT, "--temprature", "0"), "--temprature: unknown option; did you mean --temperature?"),
        (("generate", PROMPT, "--max-tok=3"), "generate: --max-tok: unknown option; did you mean --max-tokens?"),
        (("chat", "--quux"), "chat: --quux: unknown option\n"),
        (("bench", "decode", "--step", "3"), "bench decode: --step: unknown option; did you mean --steps?"),
        (("generate", "def", "add"), "generate: one argument too many: 'add'"),
    ],
)
def test_unknown_arguments_are_named(call: Any, args: tuple[str, ...], message: str) -> None:
    result = call(*args)
    assert result.code == 2 and result.out == "" and message in result.err


def test_bench_alone_says_what_there_is(call: Any) -> None:
    result = call("bench")
    assert result.code == 2 and all(f"  {name} " in result.err for name in (*SPEED, "engram"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", PROMPT, "-m", "/nowhere/at/all"), "/nowhere/at/all: no such file or folder"),
        (("generate", "--file", "/nowhere/prompt.txt"), "/nowhere/prompt.txt: No such file or directory"),
        (("generate", PROMPT, "--context", "4", "--max-tokens", "2"), "leaves no room in the context of 4"),
        (("generate", PROMPT, "--backend", "cuda"), "this build has no cuda back end"),
        (("inspect", "/nowhere"), "/nowhere: no such file or folder"),
        (("verify", "/nowhere.json"), "/nowhere.json: no such manifest"),
        (("convert", str(RELEASED), "out.gguf"), "only dry_run=True is possible"),
        (("chat", QUESTION, "--load", "/nowhere.json"), "/nowhere.json: No such file or directory"),
    ],
)
def test_failures_are_1_with_a_message(call: Any, args: tuple[str, ...], message: str) -> None:
    result = call(*args)
    assert result.code == 1 and result.out == ""
    assert message in result.err and "Traceback" not in result.err


# ---- generate ------------------------------------------------------------------------------------------------------


def test_generate_prints_the_text(call: Any, expected: ds4v41.Completion) -> None:
    result = call("generate", PROMPT, "--max-tokens", "24", *GREEDY)
    assert (result.code, result.out, result.err) == (0, expected.text + "\n", "")


def test_the_prompt_may_come_from_a_file_or_stdin(call: Any, tmp_path: Path, expected: ds4v41.Completion) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    options = ["--max-tokens", "24", *GREEDY]
    assert call("generate", "--file", str(path), *options).out == expected.text + "\n"
    assert call("generate", *options, stdin=PROMPT).out == expected.text + "\n"
    path.write_bytes(b"abc\xff")
    result = call("generate", "--file", str(path))
    assert result.code == 2 and "found byte 0xff at offset 3" in result.err


def test_generate_json(call: Any, expected: ds4v41.Completion) -> None:
    result = call("generate", PROMPT, "--max-tokens", "24", *GREEDY, "--json", "--top-logprobs", "2", "--seed", "5")
    data = json.loads(result.out)
    assert data["text"] == expected.text and data["tokens"] == expected.tokens
    assert data["finish_reason"] == "length" and data["seed"] == 5
    assert data["usage"] == {
        "prompt_tokens": 7, "reused_tokens": 0, "completion_tokens": 24, "total_tokens": 31
    }  # fmt: skip
    assert data["timings"]["decoded"] == 23 and data["numerics_id"] == "canonical-1/fp8"
    assert [entry["token"] for entry in data["logprobs"]] == expected.tokens
    assert all(len(entry["top"]) == 2 and entry["top"][0][1] >= entry["top"][1][1] for entry in data["logprobs"])


def test_every_sampling_option_reaches_the_sampler(call: Any) -> None:
    given = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 11, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "repetition_penalty": 1.2,
    }  # fmt: skip
    args = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
    result = call(
        "generate", PROMPT, *args, "--max-tokens", "20", "--stop", "zzz", "--stop-id", "9", "--logit-bias", "223=-inf",
        "--logit-bias", "261=2.5", "--json",
    )  # fmt: skip
    bias = {223: float("-inf"), 261: 2.5}
    with ds4v41.Model.open() as model, model.session() as session:
        want = session.generate(PROMPT, **given, max_tokens=20, stop=["zzz", 9], logit_bias=bias).finish()
        free = session.generate(PROMPT, max_tokens=20, seed=11).finish()
    data = json.loads(result.out)
    assert data["tokens"] == want.tokens != free.tokens
    assert 223 not in data["tokens"]


def test_a_store_makes_the_next_process_reuse_what_this_one_computed(call: Any, tmp_path: Path) -> None:
    options = ["--max-tokens", "5", *GREEDY, "--stats", "--store", str(tmp_path / "s"), "--store-budget", "64 MiB"]
    first, second = (call("generate", PROMPT, *options) for _ in range(2))
    assert first.code == second.code == 0 and first.out == second.out
    assert "restored from the store" in second.err and "restored" not in first.err
    chat = ["chat", QUESTION, "--think", "off", *options]
    first, second = (call(*chat) for _ in range(2))
    assert first.code == second.code == 0 and first.out == second.out and "restored from the store" in second.err


@pytest.mark.parametrize(("stream", "code"), [("<&-", 0), (">&-", 1), ("2>&-", 0), ("<&- >&- 2>&-", 1)])
def test_closed_standard_streams(stream: str, code: int, tmp_path: Path) -> None:
    line = f"exec {shlex.join([*COMMAND, 'chat', 'hi', '--max-tokens', '2'])} {stream}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, timeout=120, env=environment())
    assert done.returncode == code and b"Traceback" not in done.stderr
    assert ("standard output is closed" in done.stderr.decode()) == (stream == ">&-")


@pytest.mark.parametrize(
    ("line", "says"),
    [("generate 0>{file}", "standard input is open to be written only"),
     ("chat 0>{file}", "standard input is open to be written only"),
     ("generate hi --max-tokens 2 1</dev/null", "standard output is open to be read only")],
)  # fmt: skip
def test_a_stream_that_is_open_the_wrong_way_round(line: str, says: str, tmp_path: Path) -> None:
    command = f"exec {shlex.join(COMMAND)} {line.format(file=tmp_path / 'f')}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, timeout=120, env=environment())
    assert done.returncode == 1 and says in done.stderr.decode() and b"Traceback" not in done.stderr


def test_a_store_in_the_place_of_something_else(call: Any, tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(tmp_path / "nowhere" / "at all")
    for path, says in ((file, "expected a folder, found a file"), (file / "x", "expected a folder, found a file"),
                       (link, "expected a folder, found a link to nowhere")):  # fmt: skip
        result = call("generate", PROMPT, "--max-tokens", "2", "--store", str(path))
        assert result.code == 1 and says in result.err and "Errno" not in result.err
    assert file.read_text() == "x"


def test_stop_text_ends_it(call: Any, expected: ds4v41.Completion) -> None:
    assert "return" in expected.text
    result = call("generate", PROMPT, *GREEDY, "--stop", "return", "--json")
    data = json.loads(result.out)
    assert data["text"] == expected.text.partition("return")[0]
    assert (data["finish_reason"], data["stop"]) == ("stop", "return")


def test_stats_go_to_stderr(call: Any) -> None:
    result = call("generate", PROMPT, "--max-tokens", "3", *GREEDY, "--stats", "--seed", "8")
    assert "7 prompt tokens, 0 reused (the session was empty); 3 generated, length; seed 8" in result.err
    assert "decode 2 steps" in result.err and "seed" not in result.out


def test_same_bits_with_other_options_of_the_machine(call: Any, expected: ds4v41.Completion) -> None:
    for more in (["--threads", "1"], ["--backend", "cpu/plain"], ["--chunk", "2"], ["--context", "40", "--check"]):
        assert call("generate", PROMPT, "--max-tokens", "24", *GREEDY, *more).out == expected.text + "\n"


# ---- processes -----------------------------------------------------------------------------------------------------


def test_a_process_prints_as_text_comes_and_stderr_stays_empty(expected: ds4v41.Completion) -> None:
    done = run("generate", PROMPT, "--max-tokens", "24", *GREEDY)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, expected.text + "\n", b"")


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_generate_with_130_and_what_there_is(as_json: bool) -> None:
    command = [
        *COMMAND,
        "generate",
        PROMPT,
        *GREEDY,
        "--logit-bias",
        "1=-inf",
        *(["--json"] if as_json else ["--stats"]),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert child.stdout is not None
    if as_json:
        time.sleep(2.0)
        first = b""
    else:
        first = child.stdout.read(4)  # it is generating now
    child.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = child.communicate(timeout=60)
    assert time.monotonic() - sent < 5
    assert child.returncode == 130 and b"Traceback" not in err
    if as_json and out:  # empty when the signal came before the first computation
        assert json.loads(out)["finish_reason"] == "cancelled"
    if not as_json:
        assert (first + out).decode().startswith('  ""') and b"cancelled" in err


def test_a_reader_that_goes_away_is_no_crash() -> None:
    child = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, *GREEDY, "--logit-bias", "1=-inf"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(2)
    child.stdout.close()
    assert child.wait(timeout=60) == 1
    assert child.stderr.read() == b""
    child.stderr.close()


def test_a_narrow_output_encoding_is_no_crash() -> None:
    env = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    command = [*COMMAND, "generate", "x = 'ü", "--max-tokens", "6", "--json", "--stop", "日本"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=60)
    assert done.returncode == 0 and b"Traceback" not in done.stderr


# ---- inspect, convert ----------------------------------------------------------------------------------------------


def test_inspect_with_the_memory_plan(call: Any) -> None:
    result = call("inspect", str(NANO), "--context", "1000", "--json")
    data = json.loads(result.out)
    plan = data["memory_plan"]
    assert result.code == 0 and data["problems"] == [] and data["kind"] == "model"
    with ds4v41.Model.open() as model:
        want, chunk = model.plan(1000)
    assert (plan["weights"], plan["caches"], plan["working memory"]) == (want.weights, want.caches, want.scratch)
    assert plan["chunk"] == f"{chunk:,} rows" and plan["total"] == want.total and plan["fits"] == "yes"
    text = call("inspect", str(NANO), "--context", "1000")
    assert "memory: caches:" in text.out and "\x1b" not in text.out and "no problems found" in text.out


def test_inspect_of_a_faulty_checkpoint_is_1(call: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((NANO / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((NANO / "model.safetensors").read_bytes()[:-100])
    result = call("inspect", str(tmp_path), "--json")
    assert result.code == 1 and json.loads(result.out)["problems"]


def test_convert_and_use(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "nano.gguf"
    result = call("convert", str(NANO), str(out), "--recipe", "f16")
    assert result.code == 0 and f"written: {out}" in result.out
    again = call("convert", str(NANO), str(out), "--recipe", "f16")
    assert again.code == 1 and "exists" in again.err
    options = ["--max-tokens", "16", *GREEDY, "--activations", "fp32"]
    same = [call("generate", PROMPT, *options, "-m", path).out for path in (str(out), str(NANO))]
    assert same[0] == same[1]
    drafter = tmp_path / "drafter.gguf"
    assert call("convert", "drafter", str(NANO), str(drafter)).code == 0
    assert json.loads(call("inspect", str(drafter), "--json").out)["kind"] == "drafter"
    assert call("inspect", str(drafter), "--context", "100").code == 2  # no session, so no plan: said, not ignored
    wrong = call("generate", PROMPT, "-m", str(drafter))
    assert wrong.code == 1 and "drafter" in wrong.err


def test_dry_run_of_the_released_configuration(call: Any) -> None:
    plan = json.loads(call("convert", str(RELEASED), "--dry-run", "--json").out)
    assert (plan["n_tensors"], plan["file_bytes"]) == (1046, 518_596_067_328)
    assert (plan["main_bytes"], plan["engram_bytes"]) == (315_832_188_928, 202_758_045_696)
    drafter = json.loads(call("convert", "drafter", str(RELEASED), "--dry-run", "--json").out)
    assert (drafter["n_tensors"], drafter["file_bytes"]) == (81, 8_328_937_472)
    text = call("convert", str(RELEASED), "--dry-run")
    assert "518,596,067,328 bytes" in text.out and "nothing written" in text.out


# ---- pull ----------------------------------------------------------------------------------------------------------


def test_pull(tmp_path: Path) -> None:
    from tests.null.hub_standin import standin

    with standin() as hub:
        hub.files["some/repo/resolve/main/x.gguf"] = b"x" * 1000

        def pull(*args: str) -> tuple[int, str, str]:
            done = subprocess.run(
                [*COMMAND, "pull", *args, "--to", str(tmp_path)],
                capture_output=True, env=environment(HF_ENDPOINT=hub.endpoint), timeout=60,
            )  # fmt: skip
            return done.returncode, done.stdout.decode(), done.stderr.decode()

        code, out, _ = pull("some/repo:x.gguf", "--dry-run", "--json")
        assert code == 0
        assert json.loads(out) == [{"path": str(tmp_path / "x.gguf"), "bytes": 1000, "downloaded": 1000}]
        assert not (tmp_path / "x.gguf").exists()
        code, out, err = pull("some/repo:x.gguf")
        assert (code, err) == (0, "") and "1,000 of them downloaded now, digest checked" in out
        assert "complete already (digest checked)" in pull("some/repo:x.gguf", "--check")[1]
        code, out, err = pull("some/repo:y.gguf")
        assert (code, out) == (1, "") and "some/repo:y.gguf" in err and "Traceback" not in err
