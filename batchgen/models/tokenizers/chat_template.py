"""The chat template of a model, which renders messages into a prompt; the prompt is checked to have them all.

Templates come with models and are written for transformers. The rendered text equals that of transformers'
`apply_chat_template`, with two additions. A template that expects content as a list of parts gets it as parts. If the
text of a message is not in the prompt, this is an error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import PLAIN_CHAT, ChatOptions
from batchgen.core.templates import DEFAULT_LIMITS, SafeTemplate, TemplateFailed, TemplateLimits, TemplateSyntax

# Behind a message that is continued: where the template has put its end.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# Names under which messages have what was thought before them; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Messages that tell how a template takes content: no text of a template has these.
_PROBES = {role: f"qzv{role}vzq" for role in ("system", "user", "assistant")}
# Words that switch thinking, and that SmolLM3's template takes out of a system message.
_SWITCHES = re.compile("/no_think|/think|/system_override")
_BY_ACCIDENT = 32  # characters: longer texts do not stand in a prompt by accident

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation that is rendered into a prompt.

    Attributes:
        messages: Messages of the conversation.
        options: Options of the prompt.
    """

    messages: Sequence[Any]
    options: ChatOptions = PLAIN_CHAT

    @property
    def continues(self) -> bool:
        """True if the answer continues the assistant's last message."""
        return self.options.continue_final and ends_with_assistant(self.messages)


def ends_with_assistant(messages: Sequence[Any]) -> bool:
    """Tell whether the last message of a conversation is from the assistant."""
    return bool(messages) and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a model.

    Attributes:
        text: Source of the template.
        special_tokens: Variables of the tokenizer that the template gets, such as `bos_token`.
        limits: Limits of time and memory for rendering one conversation.
    """

    text: str
    special_tokens: Mapping[str, str | list[str]]
    limits: TemplateLimits = DEFAULT_LIMITS

    @classmethod
    def of(cls, given: Any, special_tokens: Mapping[str, Any]) -> ChatTemplate:
        """The chat template of a tokenizer. If it has several by name, the default one is used.

        Args:
            given: Template, or templates by name, of a tokenizer.
            special_tokens: Variables of the tokenizer, such as `bos_token`.

        Raises:
            InputError: The tokenizer has no template.
        """
        text = given.get("default") if isinstance(given, dict) else given
        if not text:
            if given:
                raise InputError(f"the model has several chat templates, none of them the default: {', '.join(given)}")
            raise InputError(
                "the model has no chat template: give one with --chat-template, or prompts instead of messages, without"
                " --chat and --system"
            )
        names = {
            name: list(map(str, t)) if isinstance(t, list | tuple) else str(t) for name, t in special_tokens.items()
        }
        return cls(text, names)

    @cached_property
    def roles(self) -> frozenset[str]:
        """Roles that every template knows, and all quoted texts in this template, which may be roles."""
        return frozenset(["system", "user", "assistant", *re.findall(r"""['"](\w+)['"]""", self.text)])

    def knows_role(self, role: str) -> bool:
        """Tell whether the template knows a role.

        A template that takes tools and writes every role as it is, such as LFM2.5's, knows that of their results.
        """
        return role in self.roles or (role == "tool" and "tools" in self.variables and self._writes_any_role)

    @cached_property
    def _writes_any_role(self) -> bool:
        messages = [{"role": "user", "content": "?"}, {"role": _PROBES["user"], "content": "!"}]
        (text,) = self._template.render([self._around(messages, add_generation_prompt=True)])
        return isinstance(text, str) and _PROBES["user"] in text

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template uses. Raises InputError if the text is not a template."""
        try:
            return frozenset(self._template.use().variables)
        except TemplateSyntax as error:
            raise InputError(f"the model's chat template, line {error.line}: {error}") from error
        except TemplateFailed as error:
            raise InputError(f"the model's chat template: {error}") from error

    @property
    def reads_messages(self) -> bool:
        """True if the rendered text depends on the messages."""
        return "messages" in self.variables

    def check_variables(self, names: Mapping[str, Any]) -> None:
        """Raise InputError for a variable that the template does not use, and which would have no effect."""
        for name in names:
            if name not in self.variables:
                known = sorted(
                    self.variables - set(self.special_tokens) - {"messages", "tools", "add_generation_prompt"}
                )
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise InputError(f"chat_template_kwargs: the model's chat template has no variable {name!r}: {has}")

    def render(self, chats: Sequence[Chat]) -> list[str | RowError]:
        """Render conversations.

        Returns:
            For each conversation its prompt, or the error that explains why it has none.
        """
        given: list[Mapping[str, Any] | Exception] = []
        for chat in chats:
            try:
                given.append(self._variables_of(chat))
            except (RowError, InputError) as error:
                given.append(RowError(str(error)))
        results: list[str | RowError] = []
        for chat, variables, text in zip(chats, given, self._template.render(given), strict=True):
            try:
                results.append(self._checked(chat, variables, text))
            except RowError as error:
                results.append(error)
        return results

    @cached_property
    def _template(self) -> SafeTemplate:
        return SafeTemplate("chats", self.text, self.limits)

    def _variables_of(self, chat: Chat) -> dict[str, Any]:
        """The variables that the template gets for a conversation. Raises RowError or InputError."""
        variables = chat.options.variables
        self.check_variables(variables)
        messages = [self._as_given(message) for message in chat.messages]
        if chat.continues:
            messages[-1] = {**messages[-1], "content": _with_end_mark(messages[-1].get("content"))}
        tools = None if chat.options.tools is None else _plain(list(chat.options.tools))
        if tools is not None and "tools" not in self.variables:
            raise RowError("the model's chat template takes no tools: leave them out, or choose another model")
        around = self._around(
            messages, add_generation_prompt=not (chat.continues or chat.options.is_whole), tools=tools
        )
        return around | dict(variables)

    def _around(
        self, messages: Sequence[Any], *, add_generation_prompt: bool, tools: list[Any] | None = None
    ) -> dict[str, Any]:
        variables = {"messages": messages, "tools": tools, "documents": None}
        return {**self.special_tokens, **variables, "add_generation_prompt": add_generation_prompt}

    def _as_given(self, message: Any) -> Any:
        """A message as the template gets it: plain JSON values without null, and content as text or as parts."""
        if not isinstance(message, Mapping):
            raise RowError("the model's chat template takes {role, content} objects: a message is none")
        plain = {name: _plain(value) for name, value in message.items() if value is not None}
        if "tool_calls" in plain:  # beside which templates expect a content, if only None
            plain.setdefault("content", None)
        thoughts = next((plain[name] for name in _REASONING if name in plain), None)
        if thoughts is not None:
            plain = {"thinking": thoughts, **plain, "reasoning_content": thoughts}
        content = plain.get("content")
        if isinstance(content, str) and self._takes_parts(plain.get("role")):
            plain["content"] = [{"type": "text", "text": content}]
        return plain

    def _takes_parts(self, role: Any) -> bool:
        takes = self._taken
        return takes.get(role, takes["user"]) == "parts"

    @cached_property
    def _taken(self) -> dict[str, str]:
        """The form in which the template expects the content of each role: "text", "parts" or "not at all".

        "not at all" means that the prompt never has the content of this role.
        """
        whole = [{"role": role, "content": _PROBES[role]} for role in ("system", "user", "assistant", "user")]
        if self._kept(whole, *_PROBES):
            return dict.fromkeys(_PROBES, "text")
        taken: dict[str, str] = {}
        conversations = (("user",), ("system", "user"), ("user", "assistant", "user"))
        for role, spoken in zip(("user", "system", "assistant"), conversations, strict=True):
            kept: dict[str, bool | None] = {}
            for way in ("text", "parts"):
                ways = {**taken, role: way}
                kept[way] = self._kept([{"role": each, "content": _content(each, ways[each])} for each in spoken], role)
            refused = None in kept.values()  # templates that know no such role refuse it
            otherwise = taken.get("user", "text") if refused else "not at all"
            taken[role] = next((way for way, is_kept in kept.items() if is_kept), otherwise)
        return taken

    def _kept(self, messages: Sequence[Message], *roles: str) -> bool | None:
        """True if the prompt has the text of messages with some roles, and has no parts in Python notation.

        None if the template rejects the messages.
        """
        (text,) = self._template.render([self._around(messages, add_generation_prompt=True)])
        if not isinstance(text, str):
            return None
        if "'type'" in text or '"type"' in text:
            return False
        return all(_PROBES[role] in text for role in roles)

    def _checked(self, chat: Chat, variables: Mapping[str, Any] | Exception, text: str | Exception) -> str:
        """The rendered prompt of a conversation, after a check that it contains the texts of all messages.

        Args:
            chat: The conversation.
            variables: Variables that the template got, or the error of making them.
            text: The rendered text, or the error of rendering.

        Raises:
            RowError: There was an error, or the text of a message is not in the prompt.
        """
        if isinstance(text, RowError):
            raise text
        if isinstance(text, Exception) or isinstance(variables, Exception):
            raise RowError(f"the model's chat template refuses the messages: {text}")
        if not self.reads_messages:
            return text
        for number, message in enumerate(chat.messages, 1):
            # Templates leave out the thoughts of the assistant's messages.
            role = message.get("role")
            left_out = self._taken.get(role) == "not at all"
            if not all(name in text for name in _called(message)):
                raise RowError(
                    f"the model's chat template leaves out the tool calls of message {number}:"
                    " write them into its content, or choose another model"
                )
            if role != "assistant" and not all(_holds(text, said, left_out) for said in _texts(message)):
                raise RowError(
                    f"the model's chat template leaves out the text of message {number} ({role}):"
                    " give the messages in another form, or the prompt as text"
                )
        return _cut_at_end_mark(text, chat.messages[-1]) if chat.continues else text


def _called(message: Message) -> Iterator[str]:
    """The names of the functions that a message calls."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(name := function.get("name"), str):
            yield name


def _content(role: str, way: str) -> Any:
    """The content of a test message of a role, as text or as parts."""
    return [{"type": "text", "text": _PROBES[role]}] if way == "parts" else _PROBES[role]


def _texts(message: Message) -> Iterator[str]:
    """The texts of a message, one by one."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _holds(prompt: str, text: str, left_out: bool) -> bool:
    """Tell whether a prompt contains a text, unchanged except for white space and switches of thinking, or as JSON.

    Args:
        prompt: The prompt.
        text: The text.
        left_out: Whether the template is known to leave out this text. Then a short text counts as not contained,
            because it may be in the prompt by accident.
    """
    if left_out and 0 < len(text.strip()) < _BY_ACCIDENT:
        return False
    if text.strip() in prompt:
        return True
    spoken = "".join(prompt.split())
    if any("".join(each.split()) in spoken for each in (text, _SWITCHES.sub("", text))):
        return True
    return any(json.dumps(text.strip(), ensure_ascii=ascii_only)[1:-1] in prompt for ascii_only in (False, True))


def _with_end_mark(content: Any) -> Any:
    """The content of a message, with a mark after its text. Raises RowError."""
    if isinstance(content, str):
        return content + _END_MARK
    parts = list(content) if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        if isinstance(parts[index], dict) and isinstance(parts[index].get("text"), str):
            parts[index] = {**parts[index], "text": parts[index]["text"] + _END_MARK}
            return parts
    raise RowError("the last message has no text to go on with")


def _cut_at_end_mark(prompt: str, message: Message) -> str:
    """The prompt up to the mark at the end of the message that is continued. Raises RowError."""
    at = prompt.rfind(_END_MARK.strip())
    last = list(itertools.islice(reversed(list(_texts(message))), 1))
    if at < 0 or not all(text.strip() in prompt for text in last):
        raise RowError(
            "the model's chat template leaves out a part of the last message, which so cannot be continued: leave out"
            " --continue-final, or that part"
        )
    if prompt.startswith(_END_MARK, at):
        return prompt[:at]
    return prompt[:at].rstrip()  # the template trims messages


def _plain(value: Any) -> Any:
    """A value as plain JSON types, so that a template cannot call methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):  # numpy's
        return _plain(value.tolist())
    if callable(getattr(value, "model_dump", None)):  # pydantic's
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"
