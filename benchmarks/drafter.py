"""Measures the drafter on the nano model: acceptance, costs, and speed against serial decoding.

    python benchmarks/drafter.py [--prompts 16] [--part fresh|tuning] [--temperature 0] [--clock cpu|wall] [--json FILE]

Four sets of prompts (benchmarks/draft_prompts.py): library code that the model was not trained on (sortedcontainers, if
it is installed), requests made of that code's docstrings, requests of the kind the model was trained on, and random
tokens. Every prompt is generated serially and drafted, a token each in turns, and the texts are compared. Answers to
requests end with the turn, the other texts after --tokens. With --clock cpu (default) one thread runs and its CPU time
counts, so that other work on the machine does not.

What each kind of step costs is measured before, on prompts of the other part. With these prices, brought to the
present by the texts that always verify five drafts, and the counts of what the controller did (steps, cycles by length,
declined drafts, rows of entries) a speed is predicted for every text.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from draft_prompts import REQUESTS, prompt_sets

import ds4v41
from ds4v41 import drafting as drafting_module
from ds4v41.admission import AdmissionConfig, Costs, DrafterStats, TraceStep, replay
from ds4v41.chat import render
from ds4v41.generation import GenerationOptions, TokenStream


def generate(
    session: ds4v41.Session, prompt: list[int], clock: Callable[[], float], **options: Any
) -> tuple[list[int], float]:
    """Tokens and seconds of decoding."""
    settings = GenerationOptions.from_options(options, session.model)
    stream = iter(TokenStream(session, np.array(prompt, np.int32), settings))
    tokens = [next(stream)[0].token]  # the prefill
    before = clock()
    tokens += [draw.token for draw, _ in stream]
    return tokens, clock() - before


def in_turns(
    sessions: dict[Any, ds4v41.Session],
    prompt: list[int],
    clock: Callable[[], float],
    options: dict[str, Any],
    auto: str | int = "auto",
) -> tuple[dict[Any, list[int]], dict[Any, float]]:
    """The same text by every session, a token each in turns, so that what else runs on the machine meets all alike.
    Tokens and seconds of decoding, by drafting mode; auto: what the session "auto" does."""
    streams, tokens, seconds = {}, {}, {}
    for mode, session in sessions.items():
        drafting = auto if mode == "auto" else mode
        settings = GenerationOptions.from_options(options | {"drafting": drafting}, session.model)
        streams[mode] = iter(TokenStream(session, np.array(prompt, np.int32), settings))
        tokens[mode], seconds[mode] = [next(streams[mode])[0].token], 0.0  # the prefill
    dice = random.Random(0)
    while streams:
        for mode in dice.sample(list(streams), len(streams)):
            before = clock()
            drawn = next(streams[mode], None)
            seconds[mode] += clock() - before
            if drawn is None:
                del streams[mode]
            else:
                tokens[mode].append(drawn[0].token)
    return tokens, seconds


def costs(
    model: ds4v41.Model, drafter: ds4v41.Drafter, prompt: list[int], clock: Callable[[], float]
) -> tuple[Costs, list[float]]:
    """Medians of a serial step, a draft and verify steps, in milliseconds, taken in turns."""
    session = model.session(1024, drafter=drafter)
    session.prefill(prompt)
    samples: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        before = clock()
        call()
        samples.setdefault(name, []).append(1e3 * (clock() - before))

    proposer = session.proposer(
        ds4v41.sampling.Sampler(ds4v41.SamplingParams(temperature=0.0), model.config.vocab_size), None, None
    )
    for _ in range(25):
        timed("serial", lambda: session.feed(300))
        for drafts in range(1, 6):
            timed(f"draft{drafts}", lambda drafts=drafts: proposer.propose(300, drafts, []))
        for rows in range(2, 7):
            timed(f"verify{rows}", lambda rows=rows: session.verify([300 + i for i in range(rows)]))
            session._hold = session.position - 1
            session.drop_ahead()
    middle = {name: statistics.median(values) for name, values in samples.items()}
    verify = tuple(middle[f"verify{r}"] for r in range(2, 7))
    return Costs(middle["serial"], middle["draft5"], verify), [middle[f"draft{n}"] for n in range(1, 6)]


@dataclass(frozen=True)
class Prices:
    """What a text is made of, in tokens of a session without a drafter; the decode loop's own time included."""

    idle: float  # a token with a drafter that is not asked
    cycles: list[float]  # of 1, 2, ... drafts
    draft: float
    row: float  # of filling the windows


def by_length(stats: DrafterStats) -> list[int]:
    """Cycles of 1, 2, ... drafts."""
    at = [*stats.verified_at, 0]
    return [at[i] - at[i + 1] for i in range(len(at) - 1)]


def price_list(
    model: ds4v41.Model,
    drafter: ds4v41.Drafter,
    sets: dict[str, list[list[int]]],
    args: Any,
    draft: float,
    clock: Callable[[], float],
) -> Prices:
    """Texts in which every step verifies so many drafts, in the place that measure() has for the controller: beside a
    serial text and one with five drafts, a token each in turns. (Sessions drive each other out of the caches, so what
    a step costs depends on how many there are; and the machine's speed moves, so each is paid in serial tokens of its
    own turns.) draft: its price."""
    cost: list[float] = []
    entry_price, entry_rows = 0.0, 0
    for mode in range(6):
        paid, counts, plain = 0.0, [0] * 5, 0
        for name, prompts in sets.items():
            stop = model.config.eos_token_id if "chats" in name else None
            options = {"temperature": args.temperature, "seed": 5, "max_tokens": min(args.tokens, 100), "stop": stop}
            for prompt in prompts:
                sessions = {"off": model.session(1024), "auto": model.session(1024, drafter=drafter)}
                sessions[5] = model.session(1024, drafter=drafter)
                texts, took = in_turns(sessions, prompt, clock, options, auto=mode)
                serial = took["off"] / (len(texts["off"]) - 1)
                stats = sessions["auto"].stats.drafter
                assert stats is not None
                paid += (took["auto"] - stats.entry_ms / 1e3) / serial
                entry_price += stats.entry_ms / 1e3 / serial
                entry_rows += stats.entry_rows
                counts = [a + b for a, b in zip(counts, by_length(stats), strict=True)]
                plain += stats.serial_tokens
        if mode > 0:  # what is not of this kind: at the end of a text
            paid -= plain * cost[0] + sum(n * price for n, price in zip(counts, cost[1:], strict=False))
        cost.append(paid / (counts[mode - 1] if mode > 0 else plain))
    return Prices(cost[0], cost[1:], draft, entry_price / entry_rows)


def priced(stats: DrafterStats, prices: Prices, scale: float = 1.0) -> float:
    """What a text should have cost, in serial tokens. scale: of the prices of cycles."""
    plain = stats.serial_tokens + stats.declines
    cycles = sum(n * price for n, price in zip(by_length(stats), prices.cycles, strict=True))
    return plain * prices.idle + stats.declines * prices.draft + scale * cycles + stats.entry_rows * prices.row


def cycles_now(paid: list[float], stats: list[DrafterStats], prices: Prices) -> float:
    """What cycles cost in the turns of these texts, beside the price list: by the texts with five drafts at every step,
    `paid` in serial tokens of the same turns. (Beside other work on the machine a block of rows gets dearer or cheaper
    than a row.)"""
    list_price = sum(priced(s, prices) for s in stats)
    rest = sum(priced(s, prices, 0.0) for s in stats)
    return (sum(paid) - rest) / (list_price - rest)


def trace(
    model: ds4v41.Model, drafter: ds4v41.Drafter, prompt: list[int], tokens: list[int], **options: Any
) -> list[tuple[TraceStep, TraceStep]]:
    """A draft at every position of a text: with the confidence head's chances, and with the drawn tokens' own."""
    session = model.session(1024, drafter=drafter)
    sampler = ds4v41.sampling.Sampler(GenerationOptions.from_options(options, model).sampling, model.config.vocab_size)
    row = session.advance_to(np.array(prompt, np.int32))
    steps = []
    for i in range(len(tokens) - 6):
        certainty = float(1 / np.exp(row.astype(np.float64) - row.max()).sum())
        ext, previous, accepted, alive, head, top = session._ext, tokens[i], 0, True, [], []
        ext.draft_start(previous, 5)
        for k in range(5):
            logits, confidence, likeliest = ext.draft_row(k, previous)
            previous = sampler.draw(logits, session.position + 1 + k).token
            head.append(1 / (1 + math.exp(-confidence)))
            top.append(likeliest)
            alive = alive and previous == tokens[i + 1 + k]
            accepted += alive
        steps.append(tuple(TraceStep(tuple(s), accepted, certainty=certainty) for s in (head, top)))
        row = session.feed(tokens[i])
    return steps


def optimum(model: ds4v41.Model, drafter: ds4v41.Drafter, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """First drafts at temperature 1: how often keyed drafts hold, against the best possible (the sum of min(p, q)) and
    against always drafting the likeliest token. Means over the positions of sampled texts."""
    n, vocab = 400, model.config.vocab_size
    sampler = ds4v41.sampling.Sampler(ds4v41.SamplingParams(temperature=1.0, seed=1), vocab)._sampler
    seeds = np.arange(1, n + 1, dtype=np.uint64)
    best, keyed, likeliest = [], [], []
    for prompt in prompts:
        session = model.session(1024, drafter=drafter)
        text, _ = generate(model.session(1024), prompt, time.perf_counter, temperature=1.0, seed=5, max_tokens=tokens)
        session.prefill(prompt)
        for token in text[:-1]:
            session._ext.draft_start(token, 1)
            guess = session._ext.draft_row(0, token)[0]
            row = np.ascontiguousarray(session.feed(token))
            p, q = (np.exp(x.astype(np.float64) - x.max()) for x in (row, guess))
            p, q = p / p.sum(), q / q.sum()
            positions = np.full(n, session.position, np.int64)
            same = sampler.draw_many(row, seeds, positions) == sampler.draw_many(guess, seeds, positions)
            best.append(np.minimum(p, q).sum())
            keyed.append(same.mean())
            likeliest.append(p[q.argmax()])
    return {
        "optimum": statistics.fmean(best),
        "keyed": statistics.fmean(keyed),
        "likeliest": statistics.fmean(likeliest),
    }


M3_ULTRA = Costs(27.8, 11.0, (44.0, 55.0, 66.0, 77.0, 87.0))
"""Published: a serial step, a draft, six rows; row counts between are guesses."""


def reasoning(
    model: ds4v41.Model, drafter: ds4v41.Drafter, prompts: list[str], cost: Costs, tokens: int
) -> dict[str, Any]:
    """Answers with reasoning in front, a draft at every position: how many of five hold inside and after it, and what
    the controller makes of the whole with drafts everywhere and with drafts in answers only."""
    result: dict[str, Any] = {}
    end = model.tokenizer.find_control("</think>")
    for temperature in (0.0, 1.0):
        traces: list[list[TraceStep]] = []
        for text in prompts:
            options = {"temperature": temperature, "seed": 5, "max_tokens": tokens}
            message = render([{"role": "user", "content": text}], thinking=True)
            prompt = [int(t) for t in message.encode(model.tokenizer)]
            line, _ = generate(
                model.session(1024), prompt, time.perf_counter, **options, stop=model.config.eos_token_id
            )
            inside = line.index(end) if end in line else len(line)
            steps = trace(model, drafter, prompt, line, temperature=temperature, seed=5)
            traces.append([replace(s, in_reasoning=i < inside) for i, (_, s) in enumerate(steps)])
        found: dict[str, Any] = {}
        for name, where in (("reasoning", True), ("answers", False)):
            held = [s.accepted for t in traces for s in t if s.in_reasoning == where]
            found[name] = {"tokens": len(held), "held of 5": statistics.fmean(held) if held else None}
        for machine, costs_of in (("own costs", cost), ("M3 Ultra's costs", M3_ULTRA)):
            for policy, everywhere in (("everywhere", True), ("answers only", False)):
                got = [replay(t, costs_of, AdmissionConfig(reasoning=everywhere)) for t in traces]
                found[f"{machine}, {policy}"] = sum(r.serial_ms for r in got) / sum(r.ms for r in got)
        result[f"temperature {temperature:g}"] = found
    return result


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean and a 95 % bootstrap interval."""
    rng, logs = random.Random(0), [math.log(r) for r in ratios]
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(2000))
    return math.exp(statistics.fmean(logs)), math.exp(means[50]), math.exp(means[-51])


def measure(
    model: ds4v41.Model,
    drafter: ds4v41.Drafter,
    prompts: list[list[int]],
    args: Any,
    clock: Callable[[], float],
    prices: Prices,
    stop: int | None,
) -> dict[str, Any]:
    options = {"temperature": args.temperature, "seed": 5, "max_tokens": args.tokens, "stop": stop}
    ratios, forced_ratios, own = [], [], []
    forced: list[Any] = []
    cycles: list[Any] = []
    forced_paid: list[float] = []
    lengths: list[int] = []
    n_tokens = 0
    for prompt in prompts:
        seconds: dict[Any, float] = {"off": 0.0, "auto": 0.0, 5: 0.0}
        for _ in range(args.rounds):
            sessions = {mode: model.session(1024, drafter=None if mode == "off" else drafter) for mode in seconds}
            tokens, took = in_turns(sessions, prompt, clock, options)
            assert tokens["auto"] == tokens["off"] == tokens[5], "drafting changed the text"
            n_tokens += len(tokens["off"])
            for mode, value in took.items():
                seconds[mode] += value
            forced.append(sessions[5].stats.drafter)
            stats = sessions["auto"].stats.drafter
            cycles.append(stats)
            own.append(1 - stats.net_ms / (took["auto"] * 1e3))
            lengths.append(len(tokens["off"]) - 1)
            forced_paid.append(took[5] / took["off"] * lengths[-1])
        ratios.append(seconds["off"] / seconds["auto"])
        forced_ratios.append(seconds["off"] / seconds[5])
    scale = cycles_now(forced_paid, forced, prices)
    by_prices = [n / priced(s, prices, scale) for n, s in zip(lengths, cycles, strict=True)]
    at = [sum(s.accepted_at[i] for s in forced) / max(1, sum(s.verified_at[i] for s in forced)) for i in range(5)]
    return {
        "prompts": len(prompts),
        "tokens_of_a_text": n_tokens / args.rounds / len(prompts),
        "tokens_per_cycle_of_six_rows": sum(s.committed for s in forced) / sum(s.cycles for s in forced),
        "accepted_by_place": at,
        "speed_always": interval(forced_ratios),
        "speed_auto": interval(ratios),
        "tokens_per_cycle_auto": sum(s.committed for s in cycles) / max(1, sum(s.cycles for s in cycles)),
        "cycles_auto": sum(s.cycles for s in cycles) / args.rounds / len(prompts),
        "declines_auto": sum(s.declines for s in cycles) / args.rounds / len(prompts),
        "back_offs_auto": sum(s.back_offs for s in cycles) / args.rounds / len(prompts),
        "entry_rows_auto": sum(s.entry_rows for s in cycles) / args.rounds / len(prompts),
        "by_its_own_ledger": math.exp(statistics.fmean(math.log(p) for p in own)),
        "cycles_beside_price_list": scale,
        "by_prices_and_counts": math.exp(statistics.fmean(math.log(p) for p in by_prices)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--part", choices=("fresh", "tuning"), default="fresh")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--policies", action="store_true", help="replay several gates on recorded traces instead")
    parser.add_argument("--reasoning", action="store_true", help="drafts everywhere against answers only")
    parser.add_argument("--optimum", action="store_true", help="compare acceptance with the best possible instead")
    parser.add_argument("--sets", nargs="*", help="only the sets whose names contain one of these")
    parser.add_argument("--json")
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    drafting_module.time = argparse.Namespace(perf_counter=clock)  # type: ignore[attr-defined]
    result: dict[str, Any] = {"arguments": vars(args)}
    with ds4v41.Model.open(threads=1) as model:
        drafter = ds4v41.Drafter.open(None, model)
        sets = prompt_sets(model, args.prompts, args.part)
        cost, draft_ms = costs(model, drafter, sets["random tokens"][0], clock)
        result["costs_ms"] = {"serial": cost.serial_ms, "draft_1_to_5": draft_ms, "verify_2_to_6": cost.verify_ms}
        print(json.dumps(result["costs_ms"]))
        if args.reasoning:
            requests = list(REQUESTS[args.part][: args.prompts])
            result["reasoning"] = reasoning(model, drafter, requests, cost, args.tokens)
            print(json.dumps(result["reasoning"], indent=1))
            sets = {}
        if sets and not args.optimum and not args.policies:
            others = prompt_sets(model, 3, "tuning" if args.part == "fresh" else "fresh")
            prices = price_list(model, drafter, others, args, cost.draft_ms / cost.serial_ms, clock)
            result["prices_in_serial_tokens"] = asdict(prices)
            print(json.dumps(result["prices_in_serial_tokens"]))
        for name, prompts in sets.items():
            if args.sets and not any(part in name for part in args.sets):
                continue
            if args.optimum:
                print(name, json.dumps(optimum(model, drafter, prompts, args.tokens)))
                continue
            if args.policies:
                policies(model, drafter, name, prompts, args, cost, clock)
                continue
            drafter = ds4v41.Drafter.open(None, model)  # which knows nothing of the calls before
            stop = model.config.eos_token_id if "chats" in name else None
            result[name] = measure(model, drafter, prompts, args, clock, prices, stop)
            print(name, json.dumps(result[name]))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


def policies(model: Any, drafter: Any, name: str, prompts: list[list[int]], args: Any, cost: Costs, clock: Any) -> None:
    options = {"temperature": args.temperature, "seed": 5, "max_tokens": args.tokens}
    traces = []
    for prompt in prompts:
        tokens, _ = generate(model.session(1024), prompt, clock, **options)
        traces.append(trace(model, drafter, prompt, tokens, temperature=args.temperature, seed=5))
    if args.json:
        import pickle

        with open(f"{args.json}.{name.split()[0]}.pickle", "wb") as file:
            pickle.dump((traces, cost), file)
    accepted = statistics.fmean(step.accepted for t in traces for step, _ in t)
    print(f"{name}: {accepted:.2f} of 5 accepted at a mean position")
    for signal in (0, 1):
        for gate in ("none", "top", "value"):
            config = AdmissionConfig(gate=gate)  # type: ignore[arg-type]
            got = [replay([pair[signal] for pair in t], cost, config) for t in traces]
            speed = sum(r.serial_ms for r in got) / sum(r.ms for r in got)
            print(f"  {('head', 'top')[signal]:5} {gate:6} {speed:.3f}")


if __name__ == "__main__":
    main()
