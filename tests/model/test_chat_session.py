"""Chat on the nano model: whole and streamed, over several turns, tools, what is reused, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ds4v41 import ChatError, ContextError, Message, OptionError, Reply, Session, StateError
from ds4v41.chat import ContentDelta, ReasoningDelta, render

from .support import assert_as_fresh, nano

FIRST = {"role": "user", "content": "Write a function that checks whether a number is prime."}
SECOND = {"role": "user", "content": "Write a function that adds two numbers."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


def ask(session: Session, *messages: Any, **options: Any) -> Reply:
    """The whole reply, greedy."""
    return session.chat(list(messages), **{"temperature": 0, "max_tokens": 150, **options})


def test_code_comes_back() -> None:
    with nano().session(context=1024) as session:
        reply = ask(session, FIRST, thinking=False)
    assert isinstance(reply.content, str)
    assert "def check_prime(number):" in reply.content
    assert "return True" in reply.content
    assert (reply.role, reply.finish_reason, reply.problems, reply.reasoning) == ("assistant", "stop", (), None)
    namespace: dict[str, Any] = {}
    exec(reply.content.removeprefix("```python\n").removesuffix("```"), namespace)
    assert [n for n in range(20) if namespace["check_prime"](n)] == [2, 3, 5, 7, 11, 13, 17, 19]


def test_reasoning_and_answer_are_separated() -> None:
    with nano().session(context=1024) as session:
        reply = ask(session, SECOND, thinking=True)
    assert reply.reasoning and "adds two numbers" in reply.reasoning
    assert isinstance(reply.content, str) and "return a + b" in reply.content
    assert "think>" not in reply.reasoning + reply.content


def test_a_reply_is_shown_in_short() -> None:
    with nano().session(256) as session:
        reply = session.chat([{"role": "user", "content": "hello"}], temperature=0, thinking=False, max_tokens=4)
    assert repr(reply).startswith("Reply('assistant', content=") and repr(reply).endswith(", 4 tokens)")
    assert "token_ids" not in repr(reply)


def test_streamed_is_whole() -> None:
    """The same seed: the events, joined, are the reply."""
    with nano().session(context=1024) as session:
        whole = ask(session, SECOND, thinking=True, temperature=1, seed=4)
        stream = session.chat([SECOND], thinking=True, temperature=1, seed=4, max_tokens=150, stream=True)
        with pytest.raises(StateError, match="still being generated"):
            _ = stream.reply
        events = list(stream)
        assert stream.reply == whole
        assert stream.reply.token_ids == whole.token_ids
        assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == whole.content
        assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == whole.reasoning
        assert whole.seed == stream.seed == 4


# ---- several turns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"thinking": False}, {"thinking": True, "drop_thinking": False}])
@pytest.mark.parametrize("as_dict", [False, True])
def test_the_next_turn_reuses_everything(options: dict[str, Any], as_dict: bool) -> None:
    """BL-008: the replayed turn encodes to the ids that were generated, so all that the session holds is kept."""
    with nano().session(context=1024) as session:
        first = ask(session, FIRST, **options)
        held = session.tokens
        assert held[first.usage.prompt_tokens :] == list(first.token_ids[:-1])
        replayed = first.to_dict() if as_dict else first
        second = ask(session, FIRST, replayed, SECOND, **options)
        assert session.tokens[: len(held)] == held
        assert session.tokens[len(held)] == first.token_ids[-1]
        assert session.stats.reused == second.usage.reused_tokens == len(held)
        assert session.stats.prefilled == second.usage.prompt_tokens - len(held)
        assert isinstance(second.content, str) and "return a + b" in second.content
        tokens = session.tokens
        assert_as_fresh(session, tokens)


@pytest.mark.parametrize("gap", ["", "\n", "\n\n", " ", " \n \n\n", "\t\n\n\n"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_white_space_in_front_of_a_tool_call_is_replayed_as_it_was(gap: str, as_dict: bool) -> None:
    """BL-007: whatever stands between text and tool block, the replayed turn has the ids that were generated."""
    model = nano()
    asked = {"role": "user", "content": "List the files."}
    called = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"command":"ls"}'}}
    shown = render([asked, {"role": "assistant", "content": "Let me look.", "tool_calls": [called]}], tools=TOOLS)
    ids = [int(i) for i in shown.encode(model.tokenizer)]
    answer = len(render([asked], tools=TOOLS, thinking=False).encode(model.tokenizer))
    block = ids[ids.index(model.tokenizer.find_control("｜DSML｜"), answer) - 1 :]
    assert block[-1] == model.config.eos_token_id and model.tokenizer.decode(block).startswith("<｜DSML｜ calls>")
    forced = [*model.tokenizer.encode(f"Let me look.{gap}"), *block]
    with model.session(context=1024) as session:
        first = ask(session, asked, thinking=False, tools=TOOLS, mask=lambda ids: [forced[len(ids)]])
        held = session.tokens
        assert [call.name for call in first.tool_calls] == ["run"]
        assert str(first.content).strip() == "Let me look."
        assert held[first.usage.prompt_tokens :] == forced[:-1]
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a.py"}
        replayed = first.to_dict() if as_dict else first
        second = ask(session, asked, replayed, result, thinking=False, tools=TOOLS, max_tokens=4)
        assert second.usage.reused_tokens == len(held)
        assert session.tokens[: len(held) + 1] == [*held, forced[-1]]


def test_the_next_turn_is_as_in_a_new_session() -> None:
    with nano().session(context=1024) as session, nano().session(context=1024, chunk=16) as other:
        first = ask(session, FIRST)
        second = ask(session, FIRST, first, SECOND)
        assert ask(other, FIRST, first, SECOND).token_ids == second.token_ids
        assert other.stats.reused == 0


def test_dropped_reasoning_is_reused_up_to_its_turn() -> None:
    """By default the reasoning of earlier turns is not shown again (the official rule): what is before it is reused."""
    with nano().session(context=1024) as session:
        first = ask(session, FIRST, thinking=True)
        second = ask(session, FIRST, first, SECOND, thinking=True)
        assert second.usage.reused_tokens >= first.usage.prompt_tokens - 1
        assert "diverged at" in session.stats.why


def test_an_edited_reply_is_encoded_anew() -> None:
    """Ids speak for a message only while it is what was generated."""
    with nano().session(context=1024) as session:
        first = ask(session, FIRST, thinking=False)
        edited = Message("assistant", content="No.")
        second = ask(session, FIRST, edited, SECOND, thinking=False)
        shown = nano().tokenizer.decode(session.tokens[: second.usage.prompt_tokens], skip_special=True)
        assert "No." in shown
        assert "check_prime" not in shown
        assert second.usage.reused_tokens == first.usage.prompt_tokens


def test_replies_cut_by_max_tokens_replay_too() -> None:
    with nano().session(context=1024) as session:
        cut = ask(session, FIRST, thinking=False, max_tokens=10)
        assert cut.finish_reason == "length"
        assert len(cut.token_ids) == 10
        second = ask(session, FIRST, cut, SECOND, thinking=False)
        assert second.usage.reused_tokens >= cut.usage.prompt_tokens + 9


# ---- options -------------------------------------------------------------------------------------------------------


def test_stop_strings() -> None:
    with nano().session(context=1024) as session:
        free = ask(session, SECOND, thinking=False)
        reply = ask(session, SECOND, thinking=False, stop=["return"])
        assert isinstance(free.content, str)
        assert reply.content == free.content[: free.content.index("return")]
        assert (reply.finish_reason, reply.stop) == ("stop", "return")


def test_logprobs_for_every_token() -> None:
    with nano().session(context=1024) as session:
        reply = ask(session, SECOND, thinking=False, logprobs=True, top_logprobs=2)
        assert reply.logprobs is not None
        assert tuple(entry.token for entry in reply.logprobs) == reply.token_ids
        assert all(entry.top[0][0] == entry.token for entry in reply.logprobs)
        assert ask(session, SECOND, max_tokens=3).logprobs is None


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tools": TOOLS, "tool_choice": "required"}, OptionError, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, OptionError, "tool_choice"),
    ({"max_token": 5}, OptionError, "did you mean max_tokens"),
    ({"thinking": "yes"}, OptionError, "thinking"),
    ({"reasoning_effort": 101}, OptionError, "reasoning_effort"),
    ({"temperature": -1}, OptionError, "temperature"),
    ({"stream": 1}, OptionError, "stream"),
    ({"max_tokens": 5000}, ContextError, "max_tokens"),
    ({"revision": "latest"}, OptionError, "revision"),
]


@pytest.mark.parametrize(("options", "kind", "word"), REFUSED, ids=lambda value: str(value)[:30])
def test_options_are_refused(options: dict[str, Any], kind: type[Exception], word: str) -> None:
    with nano().session(context=1024) as session:
        session.prefill([5, 6, 7], logits=None)
        with pytest.raises(kind, match=word):
            session.chat([FIRST], **options)
        assert_as_fresh(session, [5, 6, 7])


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "user"}], [{"role": "king", "content": "x"}], ["hello"], [{"content": "x"}], "hello", None, [5]],
    ids=repr,
)
def test_bad_messages_are_refused(messages: Any) -> None:
    with nano().session(context=1024) as session:
        with pytest.raises((ChatError, OptionError)):
            session.chat(messages)
        assert session.position == 0


def test_tools_are_shown_unless_none_may_be_called() -> None:
    with nano().session(context=2048) as session:
        bare = ask(session, FIRST, max_tokens=2).usage.prompt_tokens
        none = ask(session, FIRST, max_tokens=2, tools=TOOLS, tool_choice="none").usage.prompt_tokens
        auto = ask(session, FIRST, max_tokens=2, tools=TOOLS, tool_choice="auto").usage.prompt_tokens
    assert bare == none < auto


# ---- ending it early -----------------------------------------------------------------------------------------------


def test_close_midway() -> None:
    with nano().session(context=1024) as session:
        want = ask(session, SECOND, thinking=False)
        stream = session.chat([SECOND], thinking=False, temperature=0, stream=True)
        first = next(stream)
        stream.close()
        assert stream.reply.finish_reason == "cancelled"
        assert isinstance(first, ContentDelta)
        assert isinstance(want.content, str) and want.content.startswith(first.text)
        assert list(stream) == []
        assert ask(session, SECOND, thinking=False).token_ids == want.token_ids


def test_async_forms() -> None:
    async def work() -> None:
        with nano().session(context=1024) as session:
            want = ask(session, SECOND, thinking=False)
            reply = await session.achat([SECOND], thinking=False, temperature=0)
            assert reply.token_ids == want.token_ids
            stream = session.achat([SECOND], thinking=False, temperature=0)
            assert "".join([e.text async for e in stream if isinstance(e, ContentDelta)]) == want.content
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.achat([FIRST], temperature=0, max_tokens=500, stop="never"), 0.05)
            assert (await session.achat([SECOND], thinking=False, temperature=0)).token_ids == want.token_ids

    asyncio.run(work())
