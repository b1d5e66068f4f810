"""Rendering: the golden prompts, ids that no text can forge, replayed turns, honest errors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any

import deepseek_recipe as recipe
import pytest
from chat_support import NANO_TOKENIZER, NASTY, PLAIN, case, cases, nano, released
from hypothesis import given
from hypothesis import strategies as st

from ds4v41.chat import ChatParser, Message, Prompt, ToolCall, render, resolve_effort
from ds4v41.errors import ChatError, OptionError, TokenError, TokenizerError
from ds4v41.tokenizer import Tokenizer

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tide_table",
        "description": "High and low water.",
        "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]},
    },
}
STAYS_TEXT = "r44"
"""The official encoder refuses text that spells the image placeholder, because it cannot tell it from a real one.
Here it is text like any other (docs/decisions/0003)."""


def render_case(given: dict[str, Any], **options: Any) -> Prompt:
    for ours, theirs in (("reasoning_effort", "reasoning_effort"), ("drop_thinking", "drop_thinking"),
                         ("context", "context"), ("add_bos", "add_default_bos_token")):  # fmt: skip
        if theirs in given:
            options[ours] = given[theirs]
    return render(given["messages"], thinking=given["thinking_mode"] == "thinking", **options)


def control_ids(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return [i for i in ids if i in tokenizer.special_ids]


# golden cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", cases("render"))
def test_golden_prompt(given: dict[str, Any]) -> None:
    expected = given["expected"]
    if given["id"].startswith(STAYS_TEXT):
        expected = {"prompt": given["recipe_0_2_0"]["prompt"], "images": []}
    if "error" in expected:
        with pytest.raises((ChatError, OptionError)):
            render_case(given)
        return
    prompt = render_case(given)
    assert prompt.text == expected["prompt"]
    assert list(prompt.images) == expected["images"]


@pytest.mark.parametrize("given", [p for p in cases("render") if "prompt" in p.values[0]["expected"]])
def test_golden_ids(given: dict[str, Any]) -> None:
    ids = render_case(given).encode(released())
    if "safe_ids" in given:
        assert ids == given["safe_ids"]["ids"]
        return
    expected = given["expected"]
    assert len(ids) == expected["n_tokens_full_vocab"]
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()
    assert digest == expected["ids_sha256_full_vocab"]


@pytest.mark.parametrize("given", [p for p in cases("render") if "prompt" in p.values[0]["expected"]])
def test_golden_prompt_1017(given: dict[str, Any]) -> None:
    expected = given.get("variant_1017", given["expected"])
    prompt = render_case(given, revision="1017")
    assert (prompt.text, list(prompt.images)) == (expected["prompt"], expected["images"])


@pytest.mark.parametrize("given", [p for p in cases("render") if "prompt" in p.values[0]["expected"]])
def test_segments_encode_like_the_text(given: dict[str, Any]) -> None:
    """Where no content spells a control token, the ids are those of the whole text with control tokens recognised."""
    prompt = render_case(given)
    if "safe_ids" in given:
        assert prompt.encode(nano()) != nano().encode(prompt.text, control=True)
    else:
        assert prompt.encode(nano()) == nano().encode(prompt.text, control=True)


def test_context_and_rest_are_the_whole() -> None:
    given = case("r64")
    context, rest = given["context"], given["messages"]
    whole = render([*context, *rest], thinking=False)
    parts = render(context, thinking=False).text + render(rest, thinking=False, context=context).text
    assert parts == whole.text


# injection ------------------------------------------------------------------------------------------------------


@given(NASTY, NASTY, NASTY, NASTY, st.booleans())
def test_no_text_becomes_a_control_token(one: str, two: str, three: str, four: str, thinking: bool) -> None:
    def conversation(a: str, b: str, c: str, d: str) -> Prompt:
        call = {"id": "1", "function": {"name": "tide_table", "arguments": {"harbour": c, "note": [d]}}}
        about = {"type": "function", "function": {"name": "tide_table", "description": d, "parameters": {"x": b}}}
        return render(
            [
                {"role": "system", "content": a, "response_format": {"type": c}},
                {"role": "user", "content": [{"type": "text", "text": b}, {"type": "image_url", "image_url": "u"}]},
                {"role": "assistant", "content": c, "reasoning_content": d, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": a}]},
                {"role": "latest_reminder", "content": b},
                {"role": "user", "content": c},
            ],
            tools=[about],
            thinking=thinking,
        )

    nasty, tame = conversation(one, two, three, four), conversation("a", "b", "c", "d")
    ids = nasty.encode(nano())
    assert control_ids(ids, nano()) == control_ids(tame.encode(nano()), nano())
    assert nano().decode(ids) == nasty.text


# the second oracle ----------------------------------------------------------------------------------------------

RECIPE = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(NANO_TOKENIZER)))
GROUNDING = ("ref｜>", "box｜>", "point｜>", "polygon｜>")
TEXT = st.one_of(NASTY, PLAIN).filter(lambda text: bool(text) and not any(mark in text for mark in GROUNDING))
"""Grounding marks in past answers are control tokens for recipe and text for us."""
VALUE = st.one_of(TEXT, st.integers(-9, 9), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=2))
KEY = st.sampled_from(["harbour", "days", "a b"])
ROUND = st.tuples(TEXT, st.one_of(st.none(), TEXT), TEXT, st.lists(st.dictionaries(KEY, VALUE), max_size=2), TEXT)


@given(st.one_of(st.none(), TEXT), st.lists(ROUND, max_size=3), TEXT, st.booleans(), st.booleans(),
       st.sampled_from(["low", "high", "max"]))  # fmt: skip
def test_like_deepseek_recipe(system: str | None, rounds: list[Any], last: str, tools: bool, thinking: bool,
                              effort: Any) -> None:
    ours: list[dict[str, Any]] = []
    theirs: list[recipe.Message] = []
    if system is not None or tools:
        ours.append({"role": "system", "content": system or ""})
        theirs.append(recipe.SystemMessage(system or ""))
    for question, reasoning, answer, calls, result in rounds:
        ids = [f"c{i}" for i in range(len(calls))]
        pairs = list(zip(ids, calls, strict=True))
        ours.append({"role": "user", "content": question})
        theirs.append(recipe.UserMessage(question))
        ours.append({
            "role": "assistant", "content": answer, "reasoning_content": reasoning or "",
            "tool_calls": [{"id": i, "function": {"name": "f", "arguments": c}} for i, c in pairs],
        })  # fmt: skip
        made = [recipe.ToolCall(i, "f", json.dumps(c, ensure_ascii=False)) for i, c in pairs]
        theirs.append(recipe.AssistantMessage(answer, reasoning or "", made or None))
        for i in reversed(ids):
            ours.append({"role": "tool", "tool_call_id": i, "content": result + i})
            theirs.append(recipe.ToolMessage(result + i, i))
    ours.append({"role": "user", "content": last})
    theirs.append(recipe.UserMessage(last))
    f = TOOL["function"]
    declared = [recipe.ToolDefinition(f["name"], f["description"], f["parameters"])] if tools else []
    conversation = recipe.Conversation(theirs, thinking_mode=thinking, tools=declared, reasoning_effort=effort)
    prompt = render(ours, tools=[TOOL] if tools else None, thinking=thinking, reasoning_effort=effort)
    assert prompt.text == RECIPE.render_conversation(conversation).prompt
    assert prompt.encode(nano()) == RECIPE.encode(conversation)


def test_reasoning_prefix_like_recipe() -> None:
    ours = render([USER, {"role": "assistant", "content": "", "reasoning_content": "Let me", "prefix": True}])
    theirs = recipe.Conversation([recipe.UserMessage("hi"), recipe.AssistantMessage("", "Let me", None, True)])
    assert ours.text == RECIPE.render_conversation(theirs).prompt
    assert ours.opens == "reasoning_more"


# replay ---------------------------------------------------------------------------------------------------------

GENERATED = [
    "Because.</think>Yes.<｜end▁of▁sentence｜>",
    "\n\nr \n</think>\n\nThe answer\n\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"tide_table\">\n<｜DSML｜ parameter "
    "name=\"n\" string=\"false\"> 1e3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls><｜end▁of▁sentence｜>",
    "</think>no reasoning<｜end▁of▁sentence｜>",
]  # fmt: skip


def generate(text: str, thinking: bool = True, **options: Any) -> tuple[list[int], Message]:
    ids = nano().encode(text, control=True)
    parser = ChatParser(nano(), thinking=thinking, **options)
    for i in ids:
        parser.push(i)
    return ids, parser.finish()


@pytest.mark.parametrize("text", GENERATED)
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_replayed_turn_keeps_its_ids(text: str, as_dict: bool) -> None:
    ids, message = generate(text)
    before = render([USER]).encode(nano())
    back: Any = json.loads(json.dumps(message.to_dict())) if as_dict else message
    prompt = render([USER, back, {"role": "user", "content": "more"}], drop_thinking=False)
    assert prompt.notes == ()
    assert prompt.encode(nano())[: len(before) + len(ids)] == before + ids


def test_dropped_reasoning_is_cut_from_the_ids() -> None:
    ids, message = generate(GENERATED[1])
    answer = ids[ids.index(nano().control_id("</think>")) + 1 :]
    before = render([USER], thinking=False).encode(nano())
    again = render([USER, message, USER], thinking=False).encode(nano())
    assert again[: len(before) + len(answer)] == before + answer


def test_ids_without_reasoning_in_a_thinking_prompt() -> None:
    ids, message = generate("plain<｜end▁of▁sentence｜>", thinking=False)
    assert message.reasoning is None
    before = render([USER]).encode(nano())
    again = render([USER, message, USER], drop_thinking=False).encode(nano())
    close = nano().control_id("</think>")
    assert again[: len(before) + len(ids) + 1] == [*before, close, *ids]


@pytest.mark.parametrize(("text", "missing"), [("cut in thou", ["</think>", "<｜end▁of▁sentence｜>"]),
                                               ("r</think>cut in ans", ["<｜end▁of▁sentence｜>"])])  # fmt: skip
def test_a_cut_turn_is_closed(text: str, missing: list[str]) -> None:
    ids, message = generate(text)
    before = render([USER]).encode(nano())
    again = render([USER, message, USER], drop_thinking=False).encode(nano())
    closed = ids + [nano().control_id(m) for m in missing]
    assert again[: len(before) + len(closed)] == before + closed
    prefix = render([USER, {**message.to_dict(), "prefix": True}], drop_thinking=False)
    assert prefix.encode(nano()) == before + ids
    assert prefix.opens == ("reasoning_more" if len(missing) == 2 else "content_more")


def test_a_call_inside_the_reasoning_can_be_replayed_or_written_out() -> None:
    call = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f"/>\n</｜DSML｜ calls>'
    ids, message = generate(f"so{call}<｜end▁of▁sentence｜>")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}
    before = render([USER]).encode(nano())
    kept = render([USER, message, result], drop_thinking=False).encode(nano())
    assert kept[: len(before) + len(ids)] == before + ids
    dropped = render([USER, message, result])
    plain = render([USER, {**message.to_dict(), "token_ids": None}, result])
    assert dropped.encode(nano()) == plain.encode(nano())


def test_an_edited_message_is_encoded_anew() -> None:
    _, message = generate(GENERATED[0])
    edited = dataclasses.replace(message, content="No.")
    prompt = render([USER, edited, USER], drop_thinking=False)
    plain = [USER, {"role": "assistant", "content": "No.", "reasoning_content": "Because."}, USER]
    assert prompt.encode(nano()) == render(plain, drop_thinking=False).encode(nano())
    assert "edited" in prompt.notes[0]


def test_bad_replayed_ids() -> None:
    answer = {"role": "assistant", "content": "x"}
    with pytest.raises(TokenError):
        render([USER, {**answer, "token_ids": [5000]}]).encode(nano())
    with pytest.raises(ChatError, match="before the end"):
        render([USER, {**answer, "token_ids": [10, 1, 11, 1]}]).encode(nano())
    with pytest.raises(ChatError, match="token_ids"):
        render([USER, {**answer, "token_ids": "abc"}])


# options --------------------------------------------------------------------------------------------------------


def test_tools_argument_is_the_leading_system_message() -> None:
    by_hand = render([{"role": "system", "content": "S", "tools": [TOOL]}, USER])
    assert render([{"role": "system", "content": "S"}, USER], tools=[TOOL]).text == by_hand.text
    empty = render([{"role": "system", "content": "", "tools": [TOOL]}, USER])
    assert render([USER], tools=[TOOL]).text == empty.text
    assert render([USER], tools=[TOOL["function"]]).text == empty.text
    assert render([USER], tools=[]).text == render([USER]).text


def test_tool_choice() -> None:
    assert render([USER], tools=[TOOL], tool_choice="none").text == render([USER]).text
    inline = {"role": "system", "content": "S", "tools": [TOOL]}
    assert "Tools" not in render([inline, USER], tool_choice="none").text
    assert "Tools" in render([inline, USER], tool_choice="auto").text
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(OptionError, match="tool_choice"):
            render([USER], tools=[TOOL], tool_choice=choice)  # type: ignore[arg-type]


def test_response_format_argument() -> None:
    schema = {"type": "json_object"}
    by_hand = render([{"role": "system", "content": "", "response_format": schema}, USER])
    assert render([USER], response_format=schema).text == by_hand.text
    assert render([USER], response_format={"type": "text"}).text == render([USER]).text


@pytest.mark.parametrize(("given", "number"), [(None, 75), ("low", 50), ("high", 75), ("max", 100), (1, 1), (100, 100)])
def test_effort(given: Any, number: int) -> None:
    assert resolve_effort(given) == number
    assert f"Effort: {number} (" in render([USER], reasoning_effort=given).text


@pytest.mark.parametrize("bad", [0, 101, True, 50.0, "50", "medium", "xhigh", "none", "minimal", "", [], 10**30])
def test_bad_effort(bad: Any) -> None:
    for thinking in (True, False):
        with pytest.raises(OptionError, match="reasoning_effort"):
            render([USER], thinking=thinking, reasoning_effort=bad)


@pytest.mark.parametrize(
    ("messages", "options", "opens"),
    [
        ([USER], {}, "reasoning"),
        ([USER], {"thinking": False}, "content"),
        ([], {}, "nothing"),
        ([{"role": "system", "content": "x"}], {}, "nothing"),
        ([USER, {"role": "assistant", "content": "x"}], {}, "nothing"),
        ([USER, {"role": "assistant", "content": "x", "wo_eos": True}], {}, "content_more"),
        ([USER, {"role": "assistant", "content": "x", "prefix": True}], {}, "content_more"),
        ([USER, {"role": "system", "content": "x"}], {}, "reasoning"),
        ([USER, {"role": "latest_reminder", "content": "x"}], {}, "reasoning"),
        ([{"role": "latest_reminder", "content": "x"}], {}, "nothing"),
        ([{**USER, "task": "title"}], {}, "content"),
        ([{**USER, "task": "action"}], {}, "reasoning"),
    ],
)
def test_where_generation_starts(messages: list[Any], options: Any, opens: str) -> None:
    prompt = render(messages, **options)
    assert prompt.opens == opens
    ends = {"reasoning": ("<think>", "<｜action｜>", "x"), "content": ("</think>", "<｜title｜>")}
    assert opens not in ends or prompt.text.endswith(ends[opens])


def test_option_values() -> None:
    for options in ({"revision": "v4"}, {"thinking": 1}, {"drop_thinking": None}, {"add_bos": "yes"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            render([USER], **options)


# errors and notes -----------------------------------------------------------------------------------------------


def test_all_problems_at_once() -> None:
    messages: list[Any] = [
        {"role": "system", "content": 3},
        {"role": "user"},
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}, {"x": 1}]},
        {"role": "tool", "content": None, "tool_call_id": 7},
        {"role": "user", "content": [{"type": "text"}, {"type": "image"}, 5], "task": "nap", "temprature": 1},
        "text",
    ]
    with pytest.raises(ChatError) as error:
        render(messages, tools=[{"type": "web_search"}])
    for part in (
        "messages[0].content", "messages[1].content", "messages[2].role", "system message", "tool_calls[0].function",
        "tool_calls[1]", "messages[4].content", "tool_call_id", "content[0].text", "content[1]", "content[2]",
        "messages[5].task", "temprature", "messages[6]", "tools[0]",
    ):  # fmt: skip
        assert part in str(error.value), part


@pytest.mark.parametrize("messages", [None, "hi", USER, 7, Message("user", "x")])
def test_not_a_list(messages: Any) -> None:
    with pytest.raises(ChatError, match="expected a list of messages"):
        render(messages)


@pytest.mark.parametrize(
    ("tools", "part"),
    [
        ([{"function": {}}], "name"),
        ([{"function": {"name": 'a"b'}}], "quote"),
        ([{"function": {"name": "a::b::c"}}], "::"),
        ([{"function": {"name": "a::b"}, "namespace": "c"}], "contradicts"),
        ([{"function": {"name": "f", "parameters": {1, 2}}}], "JSON"),
        ([TOOL, TOOL], "declared 2 times"),
        ({"name": "f"}, "list of tools"),
        ([None], "expected an object"),
    ],
)
def test_bad_tools(tools: Any, part: str) -> None:
    with pytest.raises(ChatError, match=r"tools") as error:
        render([USER], tools=tools)
    assert part in str(error.value)


def test_lone_surrogates_are_located() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": "\udc00"}}}
    messages: list[Any] = [
        {"role": "system", "content": "a\ud83d"},
        {"role": "user", "content": [{"type": "text", "text": "\ud83d"}]},
        {"role": "assistant", "content": "x", "reasoning_content": "\ud83d", "tool_calls": [call]},
        {"role": "tool", "content": "\ud83d"},
    ]
    with pytest.raises(ChatError) as error:
        render(messages)
    for part in ("[0].content: character 1", "[1].content[0].text", "reasoning_content", "arguments", "[3].content"):
        assert part in str(error.value)


def test_tools_in_two_places() -> None:
    with pytest.raises(ChatError, match="one place"):
        render([{"role": "system", "content": "", "tools": [TOOL]}, USER], tools=[TOOL])


def test_reasoning_prefix_only_at_the_end() -> None:
    half: Any = {"role": "assistant", "content": "", "reasoning_content": "r", "prefix": True}
    for messages, thinking in (([USER, half, USER], True), ([USER, half], False)):
        with pytest.raises(ChatError, match="prefix"):
            render(messages, thinking=thinking)


def test_what_has_no_place_is_said() -> None:
    prompt = render([{**USER, "name": "Ann", "refusal": None}, {**USER, "task": "title"}])
    assert len(prompt.notes) == 2
    assert "messages[0].name" in prompt.notes[0] and "task" in prompt.notes[1]
    assert "notes" in repr(prompt)


def test_message_objects_and_dicts_are_the_same() -> None:
    call = ToolCall("1", "tide_table", {"harbour": "Brest"})
    objects = [Message("user", "hi"), Message("assistant", "x", "r", (call,)), Message("tool", "ok", tool_call_id="1")]
    assert render(objects).text == render([m.to_dict() for m in objects]).text
    assert "<tool_result>ok</tool_result>" in render(objects).text


def test_reasoning_alias() -> None:
    one = [USER, {"role": "assistant", "content": "x", "reasoning": "r"}]
    two = [USER, {"role": "assistant", "content": "x", "reasoning_content": "r"}]
    assert render(one).text == render(two).text
    with pytest.raises(ChatError, match="differ"):
        render([USER, {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "s"}])


def test_tool_result_blocks_in_a_user_message() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    asked: list[Any] = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    block = {"type": "tool_result", "tool_use_id": "1", "content": "ok"}
    assert (render([*asked, {"role": "user", "content": [block]}]).text
            == render([*asked, {"role": "tool", "tool_call_id": "1", "content": "ok"}]).text)  # fmt: skip


def test_images_follow_their_placeholders() -> None:
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
    shots = [{"role": "tool", "tool_call_id": i, "content": [{"type": "image", "url": i}]} for i in "ba"]
    prompt = render([USER, {"role": "assistant", "content": "", "tool_calls": calls}, *shots])
    assert [image["url"] for image in prompt.images] == ["a", "b"]
    assert prompt.encode(nano()).count(4095) == 2


def test_a_vocabulary_without_markers_is_named() -> None:
    doc = json.loads(NANO_TOKENIZER.read_text(encoding="utf-8"))
    for token in doc["added_tokens"]:
        if token["content"] == "<｜User｜>":
            token["content"] = "<|other|>"
    with pytest.raises(TokenizerError, match="User"):
        render([USER]).encode(Tokenizer.from_bytes(json.dumps(doc)))
