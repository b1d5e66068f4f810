"""Tools: checking their declarations, writing them and past calls into a prompt, typing the arguments of new calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds4v41.chat.prompt import Control, Text
from ds4v41.chat.tokens import CALLS_TAG, DSML, INVOKE_TAG, PARAMETER_TAG, THINK_CLOSE, THINK_OPEN
from ds4v41.chat.types import to_json
from ds4v41.errors import shown

# The frame around the schemas, byte for byte as the model was trained. In it the markers are control tokens.
_FRAME_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}{CALLS_TAG}>" block like the following:

<{DSML}{CALLS_TAG}>
<{DSML}{INVOKE_TAG} name="$TOOL_NAME">
<{DSML}{PARAMETER_TAG} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}{PARAMETER_TAG}>
...
</{DSML}{INVOKE_TAG}>
<{DSML}{INVOKE_TAG} name="$TOOL_NAME2">
...
</{DSML}{INVOKE_TAG}>
</{DSML}{CALLS_TAG}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_OPEN}), you MUST output your complete reasoning inside \
{THINK_OPEN}...{THINK_CLOSE} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_CLOSE} with tool calls or final response.

### Available Tool Schemas

"""
_FRAME_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_MARKER = re.compile(f"({THINK_OPEN}|{THINK_CLOSE}|{DSML})")


def split_namespace(name: str, namespace: str | None) -> tuple[str | None, str]:
    """`ns::name` -> (ns, name). Raises ValueError when prefix and field disagree or `::` is left in a part."""
    prefix, mark, bare = name.partition("::")
    if mark:
        if namespace not in (None, prefix):
            raise ValueError(f"namespace {namespace!r} contradicts the name {name!r}")
        namespace, name = prefix, bare
    if "::" in name or "::" in (namespace or ""):
        raise ValueError(f"'::' inside a part of the name ({namespace!r}, {name!r})")
    return namespace, name


def name_problem(name: Any) -> str | None:
    """Why `name` cannot stand in the markup, or None."""
    if not isinstance(name, str) or not name:
        return f"expected a non-empty name, found {shown(name)}"
    if '"' in name or "\n" in name:
        return f"the name {name!r} holds a quote or a newline, which the markup cannot carry"
    return None


def tool_schema(tool: Any) -> dict[str, Any]:
    """The function object of one tool as the prompt shows it: namespace folded into name and description.

    Takes the OpenAI form `{"type": "function", "function": {...}}` or the bare function object. Raises ValueError
    with the reason.
    """
    if not isinstance(tool, Mapping):
        raise ValueError(f"expected an object, found {type(tool).__name__}")
    if tool.get("type", "function") != "function":
        raise ValueError(f"type {tool['type']!r} is not supported, expected 'function'")
    function = tool.get("function", tool if "name" in tool else None)
    if not isinstance(function, Mapping):
        raise ValueError("expected a 'function' object with a name and parameters")
    schema = {k: v for k, v in function.items() if function is not tool or k != "type"}
    inner = schema.pop("namespace", None)
    namespace: Any = inner if tool.get("namespace") is None else tool["namespace"]
    about = None
    if isinstance(namespace, Mapping):
        namespace, about = namespace.get("name"), namespace.get("description")
    problem = name_problem(schema.get("name"))
    if problem:
        raise ValueError(problem)
    if namespace is not None and name_problem(namespace):
        raise ValueError(f"namespace: {name_problem(namespace)}")
    space, name = split_namespace(schema["name"], namespace)
    schema["name"] = name if space is None else f"{space}::{name}"
    if about:
        schema["description"] = f"{about}\n{schema.get('description') or ''}"
    try:
        to_json(schema).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON ({error})") from None
    return schema


def tool_schemas(tools: Any, where: str, problems: list[str]) -> list[dict[str, Any]]:
    """Schemas of all tools; what is wrong with them is added to `problems`."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        problems.append(f"{where}: expected a list of tools, found {type(tools).__name__}")
        return []
    schemas = []
    for i, tool in enumerate(tools):
        try:
            schemas.append(tool_schema(tool))
        except ValueError as error:
            problems.append(f"{where}[{i}]: {error}")
    names = [s["name"] for s in schemas]
    problems += [f"{where}: the name {n!r} is declared {names.count(n)} times" for n in sorted({*names})
                 if names.count(n) > 1]
    return schemas


def tools_block(schemas: Sequence[Mapping[str, Any]]) -> Iterator[Text | Control]:
    """The tools section of a system message; ends in a newline."""
    for piece in _MARKER.split(_FRAME_HEAD):
        yield Control(piece) if _MARKER.fullmatch(piece) else Text(piece)
    yield Text("\n".join(map(to_json, schemas)) + _FRAME_TAIL)


def format_block(response_format: Mapping[str, Any]) -> Text:
    """The response-format section of a system message."""
    return Text(_FORMAT_HEAD + to_json(response_format))


def calls_block(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Text | Control]:
    """Past calls, each (full name, arguments), as the model writes them, with the blank line in front.

    Strings stand verbatim; the ids of the closing tag are control tokens, so even a value that spells it is safe.
    """
    yield from _tag("\n\n<", f"{CALLS_TAG}>\n")
    for i, (name, arguments) in enumerate(calls):
        yield from _tag("\n<" if i else "<", f'{INVOKE_TAG} name="{name}">\n')
        for j, (key, value) in enumerate(arguments.items()):
            is_text = isinstance(value, str)
            kind = "true" if is_text else "false"
            yield from _tag("\n<" if j else "<", f'{PARAMETER_TAG} name="{key}" string="{kind}">')
            yield Text(value if is_text else to_json(value))
            yield from _tag("</", f"{PARAMETER_TAG}>")
        yield from _tag("\n</", f"{INVOKE_TAG}>")
    yield from _tag("\n</", f"{CALLS_TAG}>")


def _tag(before: str, after: str) -> tuple[Text, Control, Text]:
    return Text(before), Control(DSML), Text(after)


def read_arguments(given: Any) -> Mapping[str, Any]:
    """Arguments of a past call: an object, or JSON text of one, also encoded twice. Anything else becomes one
    parameter named `arguments` that holds what was given."""
    value = given
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            break
    return value if isinstance(value, Mapping) else {"arguments": given}


# typing of new calls -----------------------------------------------------------------------------------------------

_JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


class ToolTypes:
    """Which JSON types the declared tools allow for a parameter."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tools = {s["name"]: s for s in schemas}

    def __contains__(self, full_name: str) -> bool:
        return full_name in self._tools

    @property
    def declared(self) -> bool:
        """True when any tool is declared."""
        return bool(self._tools)

    def of(self, full_name: str, parameter: str) -> frozenset[str] | None:
        """Allowed types, or None when the schema does not say."""
        schema = self._tools.get(full_name, {}).get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        declared = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _types(declared, schema, 8)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    if "type" in schema:
        names = schema["type"]
        names = [names] if isinstance(names, str) else names
        known = frozenset(names) & _JSON_TYPES if isinstance(names, list) else frozenset()
        return known or None
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if key == "enum" and isinstance(schema[key], list) else [schema[key]]
            return frozenset[str]().union(*(json_types(v) for v in values))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            options = [_types(s, root, depth - 1) for s in schema[key]]
            found = [o for o in options if o is not None]
            return frozenset[str]().union(*found) if options and len(found) == len(options) else None
    return None


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def json_types(value: Any) -> frozenset[str]:
    """The JSON schema types that `value` is an instance of."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array"}) if isinstance(value, (list, tuple)) else frozenset({"object"})


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_value(raw: str, marked_text: bool | None, types: frozenset[str] | None) -> tuple[Any, str | None]:
    """The value of a parameter and, if it had to be bent, a remark.

    `marked_text` is the model's own mark (`string="true"`), None when it is missing. The mark decides; where the
    schema contradicts it the schema does, as far as the text allows.
    """
    if marked_text and (types is None or "string" in types):
        return raw, None
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        expected = "/".join(sorted(types)) if types else "JSON"
        silent = marked_text is None and (types is None or "string" in types)
        return raw, None if silent else f"expected {expected}, found {raw[:40]!r}, kept as text"
    if marked_text:  # the schema does not allow a string here
        return (value, None) if json_types(value) & (types or frozenset()) else (raw, "the schema allows no string")
    if types is not None and "string" in types and (marked_text is None or not json_types(value) & types):
        return (value if isinstance(value, str) and marked_text is False else raw), None
    return value, None
