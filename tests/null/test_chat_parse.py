"""Parsing answers: the golden outputs fed in every way, markers by id only, nothing lost, calls typed and whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from chat_support import NASTY, case, cases, nano, released
from hypothesis import example, given
from hypothesis import strategies as st

from ds4v41.chat import (
    ChatParser,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    render,
)
from ds4v41.errors import ChatError, OptionError, StateError, TokenError
from ds4v41.tokenizer import Tokenizer

EOS = "<｜end▁of▁sentence｜>"
CALL = """<｜DSML｜ invoke name="f">
<｜DSML｜ parameter name="x" string="true">v</｜DSML｜ parameter>
</｜DSML｜ invoke>"""


def calls(*invokes: str) -> str:
    return "\n\n<｜DSML｜ calls>\n" + "\n".join(invokes) + "\n</｜DSML｜ calls>"


def invoke(*parameters: str, name: str = "f") -> str:
    return f'<｜DSML｜ invoke name="{name}">\n' + "\n".join(parameters) + "\n</｜DSML｜ invoke>"


def parameter(name: str, value: str, string: str | None = "true") -> str:
    mark = "" if string is None else f' string="{string}"'
    return f'<｜DSML｜ parameter name="{name}"{mark}>{value}</｜DSML｜ parameter>'


def feed(parser: ChatParser, pieces: Iterable[str | int], reason: str | None = None) -> tuple[Message, list[Event]]:
    """Push everything; check what holds for every answer."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push_text(piece) if isinstance(piece, str) else parser.push(piece)
    message = parser.finish(reason)
    events += parser.tail_events
    check_events(message, events)
    return message, events


def check_events(message: Message, events: Sequence[Event]) -> None:
    assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == message.content
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == (message.reasoning or "")
    starts = [e for e in events if isinstance(e, ToolCallStart)]
    ends = [e for e in events if isinstance(e, ToolCallEnd)]
    assert [e.index for e in starts] == [e.index for e in ends] == list(range(len(starts)))
    assert tuple(e.call for e in ends if e.call is not None) == message.tool_calls
    assert all((e.call is None) != (e.error is None) for e in ends)
    for end in ends:
        deltas = "".join(e.text for e in events if isinstance(e, ToolCallDelta) and e.index == end.index)
        if end.call is not None:
            assert deltas == end.call.arguments_json
            assert json.loads(deltas) == end.call.arguments


def parse(text: str, *, thinking: bool = False, ids: bool = False, **options: Any) -> Message:
    parser = ChatParser(nano(), thinking=thinking, **options)
    return feed(parser, nano().encode(text, control=True) if ids else [text])[0]


def plain(message: Message) -> dict[str, Any]:
    """In the form of the golden cases."""
    made = []
    for call in message.tool_calls:
        space = {} if call.namespace is None else {"namespace": call.namespace}
        made.append({"name": call.name, **space, "arguments": call.arguments})
    return {"reasoning_content": message.reasoning or "", "content": message.content, "tool_calls": made}


def tokenizer_of(way: str) -> Tokenizer:
    return released() if way == "released tokens" else nano()


def pieces(text: str, way: str) -> list[str] | list[int]:
    if way == "whole":
        return [text]
    return list(text) if way == "characters" else tokenizer_of(way).encode(text, control=True)


# golden cases ---------------------------------------------------------------------------------------------------

WAYS = ["whole", "characters", "tokens", "released tokens"]
DECIDED = [p for p in cases("parse") if p.values[0]["expected"] and "note" not in p.values[0]["expected"]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", DECIDED)
def test_golden_answer(given: dict[str, Any], way: str) -> None:
    parser = ChatParser(tokenizer_of(way), thinking=given["thinking_mode"] == "thinking")
    message, _ = feed(parser, pieces(given["text"], way))
    assert plain(message) == given["expected"]
    assert message.finish_reason == given["stream_recipe_0_2_0"]["finish_reason"]
    assert message.parse_error is None


def run_open_case(prefix: str, way: str) -> Message:
    given = case(prefix)
    parser = ChatParser(tokenizer_of(way), thinking=given["thinking_mode"] == "thinking")
    return feed(parser, pieces(given["text"], way))[0]


@pytest.mark.parametrize("way", WAYS)
class TestCasesLeftOpen:
    """Decided in docs/decisions/0003-chat-rendering.md."""

    def test_truncated_call_is_text(self, way: str) -> None:
        message = run_open_case("p22", way)
        assert (message.tool_calls, message.finish_reason) == ((), "length")
        assert message.content is not None and str(message.content).endswith(">Bre")
        assert "cut off inside parameter 'harbour'" in str(message.parse_error)

    def test_contradicting_duplicate_is_text(self, way: str) -> None:
        message = run_open_case("p25", way)
        assert message.tool_calls == () and "given twice" in str(message.parse_error)
        assert str(message.content).startswith("<｜DSML｜ invoke") and message.finish_reason == "stop"

    def test_doubled_bars_are_text(self, way: str) -> None:
        message = run_open_case("p31", way)
        assert plain(message) == {
            "reasoning_content": "r", "tool_calls": [], "content": case("p31")["stream_recipe_0_2_0"]["content"],
        }  # fmt: skip
        assert "marker outside of a tag" in str(message.parse_error)

    def test_quoted_closing_tag_belongs_to_the_value(self, way: str) -> None:
        message = run_open_case("p36", way)
        assert message.tool_calls[0].arguments == {"body": "see </｜DSML｜ parameter> x"}
        assert message.content == ""

    def test_second_block_is_read(self, way: str) -> None:
        assert [c.name for c in run_open_case("p37", way).tool_calls] == ["tide_table", "noop"]


BY_IDS = {
    "i05": ("ans", "stop", "tokens ignored after the end: 1"),
    "i07": ("ab", "length", "<｜begin▁of▁sentence｜> was left out"),
    "i08": ("a", "stop", "opens another turn"),
}


@pytest.mark.parametrize("given", cases("parse_ids"))
def test_golden_ids(given: dict[str, Any]) -> None:
    message, events = feed(ChatParser(released(), thinking=True), given["ids"])
    theirs = given["stream_recipe_0_2_0"]
    made = [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in theirs["tool_calls"]]
    content, reason, remark = BY_IDS.get(given["id"][:3], (theirs["content"], "length", ""))
    assert plain(message) == {"reasoning_content": theirs["reasoning_content"], "content": content, "tool_calls": made}
    assert message.finish_reason == reason
    assert remark in "; ".join(message.problems)
    assert all("\ufffd" not in e.text for e in events if isinstance(e, ContentDelta))


# any cut, any input ---------------------------------------------------------------------------------------------

MARKUP = st.sampled_from([
    "<｜DSML｜ calls>", "</｜DSML｜ calls>", '<｜DSML｜ invoke name="f">', '<｜DSML｜ invoke name="g"/>',
    "</｜DSML｜ invoke>", '<｜DSML｜ parameter name="a" string="true">', '<｜DSML｜ parameter name="b" string="false">',
    '<｜DSML｜ parameter name="a">', "</｜DSML｜ parameter>", "<｜DSML｜", "</｜DSML｜", "｜DSML｜", "<｜", "<", "</",
    ">", '"',
    "\n", "\n\n", " calls>", "<think>", "</think>", "7", '{"k": 1}', "{", "é", "🙂", "word", EOS,
])  # fmt: skip
ANSWER = st.lists(MARKUP, max_size=16)


def summary(message: Message) -> tuple[Any, ...]:
    made = [(c.full_name, c.arguments_json, c.raw) for c in message.tool_calls]
    return message.content, message.reasoning, made, message.problems, message.parse_error, message.finish_reason


@given(ANSWER, st.booleans(), st.booleans(), st.lists(st.integers(0, 200), max_size=4))
@example(["<｜DSML｜ invoke name=\"g\"/>", "<｜DSML｜", "<｜DSML｜ calls>"], True, True, [])
def test_the_cut_does_not_matter(parts: list[str], thinking: bool, tools: bool, cuts: list[int]) -> None:
    text = "".join(parts)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    ways: list[list[Any]] = [[text], list(text), [text[a:b] for a, b in itertools.pairwise(edges)]]
    if EOS not in text:  # after the end, tokens are counted and text is not
        ways.append(nano().encode(text, control=True))
    results = []
    for way in ways:
        parser = ChatParser(nano(), thinking=thinking, parse_tools=tools, new_call_id=lambda: "id")
        results.append(summary(feed(parser, way)[0]))
    assert all(result == results[0] for result in results)


@given(ANSWER, st.booleans())
def test_nothing_is_swallowed(parts: list[str], thinking: bool) -> None:
    """Every word of the answer is in the reasoning, the content, a call, or a remark."""
    numbered = [p for i, part in enumerate(parts) for p in (part, f"w{i:03}q")]
    text = "".join(numbered).split(EOS)[0]
    message = parse(text, thinking=thinking)
    everywhere = repr(summary(message))
    assert [w for p in numbered if (w := p).startswith("w0") and w in text and w not in everywhere] == []


@given(st.lists(st.integers(0, 4095), max_size=40), st.booleans())
def test_any_token_stream(ids: list[int], thinking: bool) -> None:
    message, events = feed(ChatParser(nano(), thinking=thinking), ids)
    shown = f"{message.content}{message.reasoning or ''}"
    assert not any(c in shown for c in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", EOS, "<｜▁pad▁｜>"))
    hidden = nano().special_ids
    if not hidden & {*ids} and not thinking:
        assert message.content == nano().decode(ids).lstrip("\n")
    assert all(e.text for e in events if isinstance(e, (ContentDelta, ReasoningDelta, ToolCallDelta)))


@given(NASTY, NASTY, NASTY)
def test_spelled_markers_are_text(reasoning: str, content: str, value: str) -> None:
    """Markers made of ordinary tokens are text in reasoning, in the answer and inside an argument."""
    reasoning, content = reasoning.strip("\n"), content.strip("\n")
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": value, "y": [value]}}}
    past = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [call]}
    user = {"role": "user", "content": "hi"}
    start = len(render([user]).encode(nano()))
    ids = render([user, past]).encode(nano())[start:]
    message, _ = feed(ChatParser(nano(), thinking=True), ids)
    assert message.reasoning == reasoning
    assert message.content == content
    assert [dict(c.arguments) for c in message.tool_calls] == [{"x": value, "y": [value]}]
    assert (message.problems, message.finish_reason) == ((), "tool_calls")
    assert message.token_ids == tuple(ids)


# calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "value", "string", "expected"),
    [
        ({"type": "integer"}, "5", "false", 5),
        ({"type": "integer"}, "5", "true", 5),
        ({"type": "integer"}, "5", None, 5),
        ({"type": "integer"}, "five", "true", "five"),
        ({"type": "integer"}, "five", "false", "five"),
        ({"type": "string"}, "5", "true", "5"),
        ({"type": "string"}, "5", "false", "5"),
        ({"type": "string"}, "5", None, "5"),
        ({"type": "string"}, '"q"', "false", "q"),
        ({"type": ["string", "null"]}, "null", "false", None),
        ({"type": ["string", "integer"]}, "5", "false", 5),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "1.5", "true", 1.5),
        ({"anyOf": [{"type": "number"}, {}]}, "1.5", "true", "1.5"),
        ({"enum": [1, 2]}, "2", "true", 2),
        ({"const": "2"}, "2", None, "2"),
        ({"$ref": "#/$defs/n"}, "3", "true", 3),
        ({"$ref": "#/$defs/loop"}, "3", "true", "3"),
        ({"type": "object"}, '{"a": [1]}', "true", {"a": [1]}),
        ({"type": "boolean"}, "true", "true", True),
        ({}, "NaN", "false", "NaN"),
        ({}, "[" * 5000, "false", "[" * 5000),
        ({}, "x", None, "x"),
    ],
)
def test_typed_by_the_schema(schema: Any, value: str, string: str | None, expected: Any) -> None:
    definitions = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": schema}, "$defs": definitions}}}
    for by_ids in (False, True):
        message = parse(calls(invoke(parameter("x", value, string))), tools=[tool], ids=by_ids)
        (call,) = message.tool_calls
        assert call.arguments == {"x": expected}
        assert type(call.arguments["x"]) is type(expected)


@pytest.mark.parametrize(
    ("markup", "reason"),
    [
        (invoke(parameter("x", "1") + "stray"), "text after parameter 'x'"),
        (invoke("just text"), "neither a parameter nor a JSON object"),
        (invoke("[1, 2]"), "neither a parameter nor a JSON object"),
        (invoke("text" + parameter("x", "1")), "neither a parameter nor a JSON object"),
        (invoke(parameter("x", "1") + "</｜DSML｜ parameter>"), "closed twice"),
        (invoke("<｜DSML｜ calls>"), "cannot stand in a call"),
        (invoke(name=""), "no name"),
        (invoke("</｜DSML｜ parameter>"), "cannot stand in a call"),
        ('<｜DSML｜ invoke name="f">\n', "was not closed"),
    ],
)
@pytest.mark.parametrize("ids", [False, True])
def test_malformed_call_is_text_and_the_others_live(markup: str, reason: str, ids: bool) -> None:
    message = parse(f"Look.{calls(CALL, markup, CALL)}{EOS}", ids=ids)
    assert [c.name for c in message.tool_calls] == ["f", "f"]
    assert str(message.content).rstrip("\n") == f"Look.{markup}".rstrip("\n")
    assert reason in str(message.parse_error)
    assert message.finish_reason == "tool_calls"
    alone = parse(f"Look.{calls(markup)} And on.{EOS}", ids=ids)
    assert alone.tool_calls == () and alone.finish_reason == "stop"
    assert str(alone.content).startswith("Look.<｜DSML｜") and str(alone.content).endswith(" And on.")


def test_equal_duplicate_is_harmless() -> None:
    message = parse(calls(invoke(parameter("x", "1"), parameter("x", "1"))))
    assert message.tool_calls[0].arguments == {"x": "1"}


def test_unclosed_call_with_whole_parameters() -> None:
    text = f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{parameter("x", "1")}\n</｜DSML｜ calls>'
    message = parse(text)
    assert message.tool_calls[0].arguments == {"x": "1"}
    assert "not closed" in message.problems[0] and message.parse_error is None


@pytest.mark.parametrize("cut", range(1, len(calls(CALL))))
def test_cut_anywhere(cut: int) -> None:
    whole = calls(CALL)
    message = parse("Hm." + whole[:cut])
    assert message.finish_reason == "length"
    closed = whole.index("</｜DSML｜ invoke>") + len("</｜DSML｜ invoke>")
    assert len(message.tool_calls) == int(cut >= closed)
    if not message.tool_calls and "｜DSML｜" in whole[:cut]:
        assert message.parse_error
        assert whole[:cut].strip().rpartition("<｜DSML｜ calls>")[2].strip() in str(message.content)


def test_a_quoted_marker_does_not_swallow_the_reasoning() -> None:
    message = parse("I would write <｜DSML｜ calls> and then\n</think>Done.", thinking=True, ids=True)
    assert plain(message) == {
        "reasoning_content": "I would write <｜DSML｜ calls> and then", "content": "Done.", "tool_calls": [],
    }  # fmt: skip
    message = parse(f"Like {CALL[:40]}\n</think>Done.", thinking=True, ids=True)
    assert (message.content, message.tool_calls) == ("Done.", ())
    assert str(message.reasoning).startswith('Like <｜DSML｜ invoke name="f">')


def test_control_tokens_inside_an_argument_are_text() -> None:
    text = calls(invoke(parameter("x", "a<think>b<｜User｜>c<｜DSML｜ calls>d")))
    message = parse(text, ids=True)
    assert message.tool_calls[0].arguments == {"x": "a<think>b<｜User｜>c<｜DSML｜ calls>d"}
    assert "<｜User｜>" in "; ".join(message.problems)


def test_undeclared_tool_is_remarked() -> None:
    tool = {"type": "function", "function": {"name": "g"}}
    message = parse(calls(CALL), tools=[tool])
    assert len(message.tool_calls) == 1 and "'f' was not declared" in message.problems[0]


def test_namespaced_tool_is_typed() -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}, "namespace": "sea"}
    message = parse(calls(invoke(parameter("x", "4"), name="sea::f")), tools=[tool])
    (call,) = message.tool_calls
    assert (call.namespace, call.name, call.arguments, message.problems) == ("sea", "f", {"x": 4}, ())


def test_parsing_off_leaves_markup() -> None:
    for ids in (False, True):
        message = parse(f"ok{calls(CALL)}{EOS}", parse_tools=False, ids=ids)
        assert (message.content, message.tool_calls) == (f"ok{calls(CALL)}", ())


def test_call_ids_differ() -> None:
    message = parse(calls(CALL, CALL))
    assert len({c.id for c in message.tool_calls}) == 2


def test_arguments_stream_as_they_come() -> None:
    parser = ChatParser(None, thinking=False)
    parser.push_text('<｜DSML｜ invoke name="f"><｜DSML｜ parameter name="x" string="true">')
    assert parser.push_text('say "hi"\n') == [ToolCallDelta(0, parser._reader._invoke.id, 'say \\"hi\\"\\n')]  # type: ignore[union-attr]


# stop strings, end, misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [False, True])
def test_stop_string(ids: bool) -> None:
    message = parse("End is near</think>The End of it", thinking=True, stop=["End", "zzz"], ids=ids)
    assert (message.reasoning, message.content) == ("End is near", "The ")
    assert (message.finish_reason, message.stop) == ("stop", "End")


def test_stop_string_and_ids() -> None:
    head, tail = nano().encode("Title:\n"), nano().encode("###\n\nmore")
    parser = ChatParser(nano(), thinking=False, stop="###")
    message, _ = feed(parser, [*head, *tail])
    assert parser.ended and parser.stop == "###"
    assert (message.content, message.token_ids) == ("Title:\n", tuple(head))
    user = {"role": "user", "content": "hi"}
    spelled = render([user, message], thinking=False).encode(nano())
    assert spelled[-len(head) - 1 :] == [*head, nano().eos_id]
    inside, _ = feed(ChatParser(nano(), thinking=False, stop="tle"), head)
    assert (inside.content, inside.token_ids) == ("Ti", ())


@given(st.text("ab<\n", max_size=12), st.lists(st.text("ab<\n", min_size=1, max_size=3), min_size=1, max_size=2))
def test_stop_strings_like_cutting_the_whole(text: str, stops: list[str]) -> None:
    whole = str(parse(text).content)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    expected = whole[: min(ends)[1]] if ends else whole
    for ids in (False, True):
        assert parse(text, stop=stops, ids=ids).content == expected


def test_stop_does_not_look_into_calls() -> None:
    message = parse(f"a{calls(CALL)}", stop=["v"])
    assert message.tool_calls[0].arguments == {"x": "v"} and message.stop is None


def test_cut_inside_a_character() -> None:
    ids = nano().encode("ok 🙂")
    message, _ = feed(ChatParser(nano(), thinking=False), ids[:-1], "length")
    assert str(message.content).startswith("ok ") and str(message.content).endswith("\ufffd")
    assert message.token_ids == tuple(ids[:-1])


def test_reasons() -> None:
    assert feed(ChatParser(None, thinking=False), ["a"], "cancelled")[0].finish_reason == "cancelled"
    assert feed(ChatParser(None, thinking=False), [calls(CALL)], "stop")[0].finish_reason == "tool_calls"
    assert feed(ChatParser(None, thinking=False), [calls(CALL)], "length")[0].finish_reason == "length"
    with pytest.raises(OptionError, match="reason"):
        ChatParser(None, thinking=False).finish("")


def test_for_prompt() -> None:
    user = {"role": "user", "content": "hi"}
    start = {"role": "assistant", "content": "one", "prefix": True}
    parser = ChatParser.for_prompt(nano(), render([user, start]))
    assert feed(parser, nano().encode("\n\ntwo"))[0].content == "\n\ntwo"
    half = {"role": "assistant", "content": "", "reasoning_content": "r", "prefix": True}
    parser = ChatParser.for_prompt(nano(), render([user, half]))
    assert feed(parser, nano().encode("\nx</think>y", control=True))[0].reasoning == "\nx"
    with pytest.raises(ChatError, match="nothing to answer"):
        ChatParser.for_prompt(nano(), render([user, {"role": "assistant", "content": "x"}]))


def test_misuse() -> None:
    parser = ChatParser(nano(), thinking=False)
    with pytest.raises(TokenError):
        parser.push(4096)
    first = parser.finish()
    assert parser.finish() is first
    with pytest.raises(StateError, match="finished"):
        parser.push(5)
    with pytest.raises(StateError, match="finished"):
        parser.push_text("a")
    with pytest.raises(StateError, match="tokenizer"):
        ChatParser(None, thinking=False).push(5)
    with pytest.raises(ChatError, match="tools"):
        ChatParser(None, thinking=False, tools=[{}])
    with pytest.raises(OptionError, match="stop"):
        ChatParser(None, thinking=False, stop=[""])


# results --------------------------------------------------------------------------------------------------------


def test_reprs() -> None:
    message = parse(f"r</think>Let me look.{calls(CALL)}{EOS}", thinking=True, ids=True)
    shown = repr(message)
    for part in ("'assistant'", "reasoning='r'", "Let me look.", "f(x='v')", "tool_calls", "tokens"):
        assert part in shown
    assert len(repr(Message("assistant", "x" * 10_000))) < 200
    assert len(repr(ToolCall("1", "f", {"x": "y" * 10_000}))) < 200
    page = Message("assistant", "<b>&", "<i>", message.tool_calls)._repr_html_()
    assert "<b>&amp;" not in page and "&lt;b&gt;&amp;" in page and "&lt;i&gt;" in page


def test_message_dict_is_json() -> None:
    message = parse(f"r</think>Hi{calls(CALL)}{EOS}", thinking=True, ids=True)
    back = json.loads(json.dumps(message.to_dict()))
    assert back["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "v"}'}
    assert back["reasoning_content"] == "r" and back["token_ids"] == list(message.token_ids)
    assert message.token_digest == message.digest()
