"""The commands and their options. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

import argparse
import difflib
import math
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable
from typing import Any

from .. import __version__

ACTIVATIONS = ("auto", "bf16", "fp8", "fp32")
RECIPES = ("q4", "mxfp4", "f16")
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip

Commands = _SubParsersAction  # argparse has no public name for it


class UsageError(Exception):
    """The command line is wrong in a way that only the command itself can see."""


def build_parser() -> ArgumentParser:
    """The parser of the whole command line; `args.module` names the module of this package that runs the command."""
    parser = ArgumentParser(
        prog="ds4v41",
        description="DeepSeek V4.1 Flash on your own machine. Without -m, the nano model that comes along is used.",
        epilog='try:  ds4v41 generate "def add(a, b):" --max-tokens 40 --temperature 0',
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ds4v41 {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_inspect(commands)
    _add_convert(commands)
    _add_verify(commands)
    _add_pull(commands)
    _add_synth(commands)
    _add_bench(commands)
    _add_store(commands)
    return parser


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Session.generate` and `chat` that were given; what was not keeps the model's default."""
    options = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.max_tokens is not None:
        options["max_tokens"] = args.max_tokens
    stops = [*(args.stop or ()), *(args.stop_id or ())]
    if stops:
        options["stop"] = stops
    if args.logit_bias:
        options["logit_bias"] = dict(args.logit_bias)
    if args.logprobs or args.top_logprobs is not None:
        if not args.json:
            raise UsageError("--logprobs and --top-logprobs show up in JSON only: add --json")
        options["logprobs"] = True
        options["top_logprobs"] = args.top_logprobs or 0
    return options


# ---- the commands ---------------------------------------------------------------------------------------------------


def _command(commands: Any, name: str, module: str, summary: str, epilog: str = "") -> ArgumentParser:
    parser: ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog or None,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # The parser fills up after this; `known` is asked only when an argument turns out to be unknown.
    parser.set_defaults(module=module, known=lambda: (parser.prog, _long_options(parser)))
    return parser


def _long_options(parser: ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


def unknown_arguments(unknown: list[str], known: Callable[[], tuple[str, list[str]]]) -> str:
    """What to say about arguments that a command does not take."""
    prog, options = known()
    command, first = prog.removeprefix("ds4v41 "), unknown[0].partition("=")[0]
    if not first.startswith("-"):
        return f"{command}: one argument too many: {first!r} (a text with spaces needs quotes)"
    close = difflib.get_close_matches(first, options, n=1)
    return f"{command}: {first}: unknown option" + (f"; did you mean {close[0]}?" if close else "")


def _add_store(commands: Any) -> None:
    parser = _command(commands, "store", "store", "look at, check or shrink a KV store on disk")
    parser.add_argument("action", choices=("ls", "stats", "verify", "prune"), help="what to do")
    parser.add_argument("path", help="the store's folder")
    parser.add_argument(
        "--budget", metavar="SIZE", help='the budget to hold, such as "64 GiB"; default: what a program would get'
    )
    parser.add_argument("--dry-run", action="store_true", help="prune: only say what would go")
    parser.add_argument("--remote", metavar="URL", help="verify and stats: the shared folder behind it as well")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_generate(commands: Any) -> None:
    parser = _command(
        commands, "generate", "generate", "continue a text; what is generated goes to stdout as it comes",
        'examples:\n  ds4v41 generate "def fibonacci(n):" --max-tokens 100 --temperature 0\n'
        "  ds4v41 generate --file prompt.txt --json\n  cat prompt.txt | ds4v41 generate",
    )  # fmt: skip
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the prompt; without it and --file, stdin is read")
    parser.add_argument("--file", metavar="PATH", help="read the prompt from a UTF-8 file")
    _add_model_options(parser)
    _add_sampling_options(parser)
    _add_output_options(parser)


def _add_chat(commands: Any) -> None:
    parser = _command(
        commands, "chat", "chat", "talk to the model",
        "In a terminal: type a message; /help lists the commands, Ctrl-C stops the answer, Ctrl-D leaves.\n"
        "With stdin from a file or pipe each line is one message (or command), or all of it with --whole.\n\n"
        'examples:\n  ds4v41 chat\n  ds4v41 chat "Write a function that adds two numbers."\n'
        "  ds4v41 chat --whole --json < question.txt",
    )  # fmt: skip
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="answer this one message and leave")
    parser.add_argument("--whole", action="store_true", help="take the whole of stdin as one message")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--think", metavar="N", help="reasoning effort: 1 to 100, low, high, max, or off (default 75)")
    parser.add_argument(
        "--reasoning", choices=("auto", "show", "hide"), default="auto",
        help="print the reasoning too? auto: in a terminal only",
    )  # fmt: skip
    parser.add_argument("--load", metavar="PATH", help="go on with a conversation that /save wrote")
    parser.add_argument("--history", metavar="PATH", help="keep the lines you type in this file")
    _add_model_options(parser)
    _add_sampling_options(parser)
    _add_output_options(parser)


def _add_inspect(commands: Any) -> None:
    parser = _command(
        commands,
        "inspect",
        "inspect",
        "report what a checkpoint holds without loading it; exit code 1 if it has faults",
    )
    parser.add_argument("path", metavar="PATH", help="a GGUF file or an official folder")
    parser.add_argument("--context", type=int, metavar="N", help="also plan the memory of a session of N tokens")
    parser.add_argument("--activations", choices=ACTIVATIONS, default=None, help="for the memory plan (default auto)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_convert(commands: Any) -> None:
    parser = _command(
        commands, "convert", "convert", "convert an official safetensors folder to a GGUF file",
        "examples:\n  ds4v41 convert DeepSeek-V4.1-Flash out.gguf --recipe q4\n"
        "  ds4v41 convert drafter DeepSeek-V4.1-Flash drafter.gguf\n"
        "  ds4v41 convert FOLDER_WITH_CONFIG_JSON --dry-run --json\n\n"
        "The output appears under its name only when it is complete. A folder called `drafter` is written ./drafter.",
    )  # fmt: skip
    parser.add_argument("paths", nargs="+", metavar="[drafter] OFFICIAL OUT", help="OUT may be left out with --dry-run")
    parser.add_argument("--recipe", choices=RECIPES, default="q4", help="types of the large matrices (default q4)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    parser.add_argument("--threads", type=int, metavar="N", help="threads that encode (default: all cores)")
    parser.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json to use instead of the folder's")
    parser.add_argument("--revision", metavar="COMMIT", help="the commit of the source, to be recorded in the file")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _add_verify(commands: Any) -> None:
    parser = _command(
        commands, "verify", "verify", "run the fixtures of manifests again and compare tokens and logits bit by bit",
        "Without MANIFEST the ones that come along run, on the nano model.",
    )  # fmt: skip
    parser.add_argument("manifests", nargs="*", metavar="MANIFEST", help="a manifest file, or a folder of them")
    parser.add_argument("--update", action="store_true", help="write what was computed into the manifests")
    parser.add_argument("--trace", action="store_true", help="name the first operation and layer that differ")
    parser.add_argument("--threads", type=int, metavar="N", help="worker threads (default: all cores)")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="auto, cpu, cpu/avx2, cpu/plain, ...")
    parser.add_argument(
        "--mac-day", metavar="REPORT",
        help="check a device (--backend, default metal) against the CPU, measure it, write everything to this file",
    )  # fmt: skip
    parser.add_argument("--model", metavar="PATH", help="with --mac-day: a model to measure, e.g. of ds4v41 synth")
    parser.add_argument("--contexts", metavar="N,...", help="with --mac-day: depths to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_bench(commands: Any) -> None:
    group = commands.add_parser("bench", help="measure this machine", allow_abbrev=False)
    group.set_defaults(module="bench", path=None, known=lambda: (group.prog, []))  # alone it says what there is
    what = group.add_subparsers(title="what", metavar="WHAT")
    _add_bench_speed(what)
    parser = _command(
        what, "engram", "bench",
        "is the disk fast enough for the Engram tables, and what does it cost? No weights are loaded",
        "examples:\n  ds4v41 bench engram DeepSeek-V4.1-Flash-Q4.gguf --direct\n"
        "  ds4v41 bench engram MODEL.gguf --text prompt.txt --step-ms 35",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH", help="a GGUF file or an official folder")
    parser.add_argument("--engram-path", metavar="PATH", help="the tables are elsewhere")
    parser.add_argument("--text", metavar="PATH", help="a text whose tokens are replayed (default: random tokens)")
    parser.add_argument("--direct", action="store_true", help="read around the page cache: the disk itself")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="for each queue depth (default 1)")
    parser.add_argument("--step-ms", type=float, default=40.0, metavar="MS", help="time of a decode step (default 40)")
    parser.add_argument("--chunk", type=int, default=8192, metavar="N", help="tokens of a prefill chunk (default 8192)")
    parser.add_argument("--json", action="store_true", help="print JSON")


SPEED = {
    "roof": "memory read rate and multiply-add peak",
    "ops": "row products at released shapes against the read rate",
    "select": "top-k of long score lists against one pass of max",
    "decode": "single-token steps on a model",
    "depth": "single-token steps at several contexts",
    "prefill": "prompts of several lengths",
    "ab": "two configurations in turn, with paired ratios; refuses to compare when outputs differ",
}


def _add_bench_speed(commands: Any) -> None:
    for name, summary in SPEED.items():
        parser = _command(commands, name, "bench_speed", summary)
        parser.set_defaults(what=name)
        if name not in ("select", "ab"):  # one thread; a side's own option
            parser.add_argument("--threads", type=int, metavar="N", help="worker threads (default: all cores)")
        if name in ("roof", "ops", "decode", "depth", "prefill"):
            parser.add_argument("--backend", default="auto", metavar="NAME", help="auto, cpu, ..., or metal, cuda")
        if name in ("roof", "ops"):
            parser.add_argument("--gib", type=float, metavar="G", help="memory to touch (default 4; a device: 2)")
            parser.add_argument("--small-pages", action="store_true", help="without huge pages")
        if name == "ops":
            parser.add_argument("--types", metavar="T,T", help="row types (default all)")
            parser.add_argument("--rows", metavar="N,N", help="activation rows (default 1,2,4,6,8)")
        if name in ("ops", "prefill"):
            parser.add_argument("--matrix", action="store_true", help="the matrix class beside the canonical one")
        if name in ("decode", "depth", "prefill", "ab"):
            parser.add_argument("-m", "--model", metavar="PATH", help="a GGUF file or official folder (default nano)")
        if name in ("decode", "depth", "prefill"):
            parser.add_argument(
                "--synthetic", metavar="RECIPE", help="no file: a model made in memory (q4, mxfp4, fp8fp4, bf16)"
            )
            parser.add_argument("--layers", type=int, metavar="N", help="with --synthetic: 6 to 40 (default 40)")
            parser.add_argument("--experts", type=int, metavar="E", help="with --synthetic: of a layer (default 128)")
            parser.add_argument("--context", metavar="N,N", help="position, positions, or prompt lengths")
        if name == "prefill":
            parser.add_argument("--behind", metavar="N,N", help="random tokens in front of the prompt (default 0)")
        if name in ("decode", "depth"):
            parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps (default 20)")
        if name == "decode":
            parser.add_argument("--ledger", action="store_true", help="show where bytes and time went")
        if name == "ab":
            parser.add_argument("--a", nargs="+", required=True, metavar="KEY=VALUE", help="one side")
            parser.add_argument("--b", nargs="+", required=True, metavar="KEY=VALUE", help="the other side")
            parser.add_argument("--pairs", type=int, default=15, metavar="N", help="pairs of steps (default 15)")
        parser.add_argument("--json", action="store_true", help="print JSON")


def _add_pull(commands: Any) -> None:
    parser = _command(
        commands, "pull", "pull", "download a published file, checked by size and SHA-256; goes on where it stopped",
        "examples:\n  ds4v41 pull q4 --to /models\n  ds4v41 pull drafter-source\n"
        "  ds4v41 pull owner/repository:file.gguf\n\nNeeds the extra: pip install 'ds4v41[hub]'.",
    )  # fmt: skip
    parser.add_argument("what", metavar="WHAT", help="q4, q2, vision, drafter-source, or REPO:FILE")
    parser.add_argument("--to", metavar="FOLDER", help="where to put it (default: here; drafter-source: a new folder)")
    parser.add_argument("--revision", default="main", metavar="NAME", help="branch, tag or commit (default main)")
    parser.add_argument("--check", action="store_true", help="read files that are already there and check their digest")
    parser.add_argument("--dry-run", action="store_true", help="print what would be downloaded and the space it takes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_synth(commands: Any) -> None:
    parser = _command(
        commands, "synth", "synth", "write a GGUF file with random weights of the released shape, for benchmarks",
        "example:\n  ds4v41 synth slice.gguf --shape released --layers 6 --experts 48 --recipe q4",
    )  # fmt: skip
    parser.add_argument("out", metavar="OUT.gguf", help="the file to write")
    parser.add_argument("--shape", choices=("released", "tiny"), default="released", help="sizes (default released)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="6 to 40; every kind of layer occurs")
    parser.add_argument("--experts", type=int, default=48, metavar="E", help="routed experts of a layer (default 48)")
    parser.add_argument("--recipe", choices=("q4", "mxfp4"), default="q4", help="types of the experts (default q4)")
    parser.add_argument("--drafter", metavar="D.gguf", help="write a drafter for it as well, to this file")
    parser.add_argument("--drafter-experts", type=int, metavar="E", help="routed experts of a draft stage (default 16)")
    parser.add_argument("--engram-rows", type=int, default=100_000, metavar="R", help="about so many rows a table")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the random blocks (default 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON")


# ---- options that several commands share -----------------------------------------------------------------------------


def _add_model_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", metavar="PATH", help="a GGUF file or an official folder (default: nano)")
    group.add_argument("--backend", default="auto", metavar="NAME", help="auto, cpu, cpu/avx2, cpu/plain, ...")
    group.add_argument("--activations", choices=ACTIVATIONS, default="auto", help="what activations are rounded to")
    group.add_argument(
        "--prefill", choices=("exact", "matrix"), default="exact",
        help="matrix: prompts on AVX-512-BF16, faster, in a numeric class of their own",
    )  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="worker threads (default: all cores)")
    group.add_argument(
        "--drafter", metavar="own|PATH", help="draft: own, or a DSpark GGUF file or folder; the text stays the same"
    )
    group.add_argument("--context", type=int, metavar="N", help="tokens that fit (default: the model's longest)")
    group.add_argument("--chunk", type=int, metavar="N", help="most prompt tokens computed together")
    group.add_argument(
        "--store", metavar="FOLDER", help="keep what was computed of prompts and answers here, and reuse what is there"
    )
    group.add_argument("--store-budget", metavar="SIZE", help='most that the store may take, such as "32 GiB"')
    group.add_argument("--store-remote", metavar="URL", help="a folder behind it that machines share (s3://...)")
    group.add_argument("--check", action="store_true", help="first read all weights and refuse NaN and infinity")


def _add_sampling_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults are the model's)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="stop after N tokens (default: none)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that reach this share")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 is off")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens less than P times as likely as the likeliest"
    )
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: a fresh one)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop in front of this text; may be repeated")
    group.add_argument("--stop-id", action="append", type=int, metavar="ID", help="stop at this token id; repeatable")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="-2 to 2")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="-2 to 2")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="0.01 to 100; 1 is off")
    group.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="add X to a token's logit; -inf bans it"
    )
    group.add_argument("--logprobs", action="store_true", help="log probability of each token (with --json)")
    group.add_argument("--top-logprobs", type=int, metavar="N", help="and the N likeliest tokens (with --json)")


def _add_output_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--stats", action="store_true", help="tokens, reuse, rates and seed on stderr afterwards")
    group.add_argument("--json", action="store_true", help="print JSON when done instead of text as it comes")


def _bias(text: str) -> tuple[int, float]:
    token, equals, amount = text.partition("=")
    try:
        pair = int(token), float(amount)
    except ValueError:
        pair = 0, math.nan
    if not equals or math.isnan(pair[1]):
        raise argparse.ArgumentTypeError(f"expected TOKEN_ID=NUMBER, found {text!r}")
    return pair
