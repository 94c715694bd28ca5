"""Chat templates of many families in `templates`, in our own words, and conversations
for them.
"""

import json
import re
from pathlib import Path

from rollweave.schema.chat import Message, ToolCall
from tests.support.tokenizer_forms import FORMS

TEMPLATES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").iterdir())}

MARKER = re.compile(
    r"<[|｜][^\s<>'\"|｜]+[|｜]>|</?[a-z_]+_of_turn>|\[/?[A-Z][A-Z_]+\]|<sop>|\[gMASK\]"
    r"|</?(?:think|tool_call|tool_response)>|<(?:start|end)_function_[a-z]+>"
)
MADE_OF_PIECES = ("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Markers that some templates do not spell, since they write them in pieces."""


def user(content: str) -> Message:
    return Message(role="user", content=content)


def agent(content: str, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls)


def call(number: int, name: str = "look", arguments: str = '{"place": "here"}') -> ToolCall:
    return ToolCall(id=f"{number:09d}", name=name, arguments=arguments)


def result(number: int, content: str, name: str = "look") -> Message:
    return Message(role="tool", content=content, tool_call_id=f"{number:09d}", name=name)


SYSTEM = Message(role="system", content="The system is of use.")
TOOLS = tuple(
    json.dumps({"type": "function", "function": {"name": name, **more}})
    for name, more in (
        ("look", {"description": "Look <around> & sée.", "parameters": {"type": "object"}}),
        ("go", {"description": "", "parameters": {"type": "object", "properties": {}}}),
    )
)


def checkpoint(directory: Path, template: str, form: str) -> Path:
    """Write the tokenizer and the template of a checkpoint."""
    source = TEMPLATES[template].read_text()
    pieces = MADE_OF_PIECES if "'<|' " in source else ()
    FORMS[form](directory, sorted({*MARKER.findall(source), *pieces}))
    (directory / "chat_template.jinja").write_text(source)
    return directory
