"""Conversion of input rows to a `Request` or `ScoreRequest`.

The prompt of a row comes from a column of text or token ids, a Jinja template, or a column of chat messages.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pyarrow as pa

from batchgen.core.errors import InputError, RowError, one_line
from batchgen.core.request import PLAIN_CHAT, ChatOptions, Request, ScoreRequest
from batchgen.core.templates import Row
from batchgen.core.text import as_typed
from batchgen.core.text_file import read_text
from batchgen.dataset.bad_lines import bad_lines
from batchgen.dataset.binary_text import checked_text, decoded, has_binary, is_binary
from batchgen.dataset.column_types import (
    is_list,
    is_message_list,
    is_sharegpt,
    is_text,
    is_token_list,
    is_unsplit,
    listed,
    value_type,
)
from batchgen.dataset.continuations import CompiledContinuations
from batchgen.dataset.messages import normalize_messages, normalize_tools, without_nulls
from batchgen.dataset.row_numbers import row_numbers, without_row_numbers
from batchgen.dataset.sampling_column import RowSampling

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or chat messages with "role" and "content"

_NO_COLUMN = "--prompt-template names no column: every row has the same prompt (a column is written {{ name }})"
_SUGGESTED_COLUMNS = 3  # in the command that a message suggests
_ROW_IS_WHOLE = '"row" in the prompt template is the whole row: the column of that name is row["row"]'


class NoPromptColumn(InputError):
    """No column of the input is certain to hold the prompts, and no option names one.

    Attributes:
        option: Name of the option that would say what the prompts are.
        value: The option's value that the message suggests.
        reason: The beginning of the message.
    """

    def __init__(self, schema: pa.Schema, texts: tuple[str, ...], messages: str | None) -> None:
        """Choose the suggestion.

        Args:
            schema: The input's columns.
            texts: Columns that hold text.
            messages: A column that holds chat messages; None: there is none.
        """
        self._schema, self._texts, self._messages = schema, texts, messages
        named = "no column is named messages, prompt or text"
        self.option, self.value = "prompt_template", "\n".join(map(_variable, texts[:_SUGGESTED_COLUMNS]))
        if messages is not None:
            self.option, self.value = "messages_column", messages
        elif not texts:
            self.value = _variable(schema.names[0])
        others = len(texts) - _SUGGESTED_COLUMNS
        several = f"{', '.join(texts[:_SUGGESTED_COLUMNS])}{f' and {others} more' if others > 0 else ''} hold text"
        self.reason = f"{named}, and {several}" if len(texts) > 1 and messages is None else f"{named}{listed(schema)}"
        flag, typed = self.option.replace("_", "-"), shlex.quote(as_typed(self.value))
        super().__init__(f"{self.reason}: say what to ask, as in --{flag} {typed}")

    def among(self, holds_words: Callable[[str], bool]) -> str | NoPromptColumn:
        """The column of prompts where one column of text alone holds words; else the error about those that do.

        Args:
            holds_words: Function that tells whether a column of text holds words, not numbers.
        """
        words = tuple(filter(holds_words, self._texts))
        if self._messages is not None or not words:
            return self
        return words[0] if len(words) == 1 and len(self._texts) > 1 else NoPromptColumn(self._schema, words, None)


@dataclass(frozen=True)
class PromptSpec:
    """The source of prompts: at most one of `column`, `template` and `messages_column` is given.

    With none of them, the prompts are in the first of these columns that is there: "messages", "conversations" if it
    holds chat messages, "prompt", "text", and else the only column of text.

    Attributes:
        column: Column of text, which is used unchanged, or of token ids.
        template: Jinja template over the columns (see `compile_prompts`). "@file" is replaced by the text of the file
            when the object is created.
        messages_column: Column of lists of {role, content}, or of such lists as JSON text.
        system_prompt: System message that is put before a row's messages, unless they begin with a system message.
        chat: True where a text becomes the user's message in the model's chat template, False where it is the prompt
            as it is. None: True if the model has a chat template, or if other options are about chat messages.
        chat_template_kwargs: Variables for the chat template.
        continue_final: True where the model continues a last message of the assistant.

    Raises:
        InputError: Values contradict each other, or a file cannot be read.
    """

    column: str | None = None
    template: str | None = None
    messages_column: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | str | None = None
    continue_final: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat_template_kwargs", self.chat_options.chat_template_kwargs)
        given = [n for n in ("column", "template", "messages_column") if getattr(self, n) is not None]
        if len(given) > 1:
            flags = " and ".join("--" + (n if "_" in n else f"prompt-{n}").replace("_", "-") for n in given)
            raise InputError(f"{flags} exclude each other: give one")
        if self.chat is False and self.system_prompt is not None:
            raise InputError("--system and --no-chat exclude each other: give one")
        if self.template is not None and self.template.startswith("@"):
            object.__setattr__(self, "template", _read_template(self.template[1:]))

    @property
    def chat_options(self) -> ChatOptions:
        """The options for rendering chat messages into a prompt."""
        return ChatOptions(self.chat_template_kwargs or {}, self.continue_final)

    @property
    def makes_chat(self) -> bool | None:
        """True where a text becomes a chat message; None where that depends on the model."""
        if self.chat is None and (self.system_prompt is not None or self.chat_options.variables):
            return True
        return self.chat

    def identity(self) -> dict[str, Any]:
        """The JSON values that identify the prompts in a job's fingerprint, with the text of a template file."""
        return {
            "column": self.column,
            "template": self.template,
            "messages_column": self.messages_column,
            "system_prompt": self.system_prompt,
            "chat": self.chat,
            **self.chat_options.identity(),
        }


@dataclass(frozen=True)
class CompiledPrompts:
    """A source of prompts that was checked against the input's columns.

    Attributes:
        columns: Columns that prompts are made of.
        render: The function that makes the prompts of rows, each {column: value}. It yields a RowError for a row
            without a valid prompt. An exception in place of a row is yielded unchanged.
        uses_chat: True where prompts are chat messages, for which the model must have a chat template. None where they
            are texts that become chat messages if the model has a chat template (`for_template`).
        chat: Options for rendering chat messages into a prompt.
        notices: Messages for the user about the way in which the columns are read.
        origin: Noun phrase for the source of the prompts, such as "the column text".
        tools_columns: Name of the column of tools, if there is one.
    """

    columns: tuple[str, ...]
    render: Callable[[Iterable[Row]], Iterator[Prompt | Exception]]
    uses_chat: bool | None
    chat: ChatOptions = PLAIN_CHAT
    notices: tuple[str, ...] = ()
    origin: str = ""
    tools_columns: tuple[str, ...] = ()

    def for_template(self, has_template: bool) -> CompiledPrompts:
        """The source of prompts for a model with or without a chat template; unchanged where that makes no difference.

        Args:
            has_template: True where the model has a chat template, in which a text is the user's message.
        """
        if self.uses_chat is not None:
            return self
        if not has_template:
            return replace(self, uses_chat=False)
        return replace(self, uses_chat=True, render=lambda rows: _each(_user_message)(self.render(rows)))

    def chat_of(self, row: Mapping[str, Any]) -> ChatOptions:
        """The options for rendering the chat messages of a row, given as {column: value}. Raises RowError."""
        chat = self.chat
        for column in self.tools_columns:
            chat = replace(chat, tools=normalize_tools(without_nulls(row[column]), f"column {column!r}"))
        return chat

    def with_tools(self, column: str | None, schema: pa.Schema) -> CompiledPrompts:
        """A copy of the source of prompts with tools from a column.

        Args:
            column: Column of lists of JSON schemas, or of such lists as JSON text; None: there are no tools.
            schema: The input's columns.

        Raises:
            InputError: The column does not exist or has an unsuitable type, or prompts are not chat messages.
        """
        if column is None:
            return self
        kind = value_type(schema, column, "--tools-column")
        if not (is_text(kind) or is_list(kind)):
            raise InputError(f"--tools-column {column!r} holds {kind}: it must be lists of tools, or JSON of them")
        if self.uses_chat is False:
            raise InputError("--tools-column is for chat messages, and these prompts are none: add --chat")
        return replace(self.for_template(True), tools_columns=(column,))


def compile_prompts(
    spec: PromptSpec, schema: pa.Schema, id_column: str | None = None, *, may_be_empty: bool = False
) -> CompiledPrompts:
    """Check a source of prompts, and the column of row ids, against the columns of the input.

    The variables of a template are the columns. `row` is a mapping of all columns, for names that are not identifiers:
    `{{ row["Zip Code"] }}`. Null is rendered as nothing. One newline at the end of the template is dropped, since
    editors add it and models answer differently after it. `tojson` writes plain JSON, not escaped for HTML. All else is
    standard Jinja in a sandbox. An undefined name is an error of the row, and so is exceeding `TemplateLimits`.

    Args:
        spec: The source of prompts.
        schema: The input's columns.
        id_column: Column of the rows' ids; None: row indices are the ids.
        may_be_empty: True where an empty prompt is valid.

    Raises:
        InputError: A column or variable does not exist, a type is wrong, or a template has a syntax error; the message
            has the line of the error.
    """
    schema = without_row_numbers(schema)
    if id_column is not None:
        id_type = value_type(schema, id_column, "--id-column")
        if not (is_text(id_type) or pa.types.is_integer(id_type)):
            raise InputError(f"--id-column {id_column!r} holds {id_type}: ids must be text or integers")
    if spec.template is not None:
        from batchgen.dataset.templates import compile_template

        columns, render = compile_template(spec.template, schema)
        notices = (_ROW_IS_WHOLE,) if "row" in columns else () if columns else (_NO_COLUMN,)
        as_prompt = _each(partial(_text_prompt, spec=spec, makes_chat=spec.makes_chat, may_be_empty=may_be_empty))
        return CompiledPrompts(
            columns,
            lambda rows: as_prompt(render(rows)),
            spec.makes_chat,
            spec.chat_options,
            notices,
            "the prompt template",
        )
    column, holds_messages = _source_column(spec, schema, id_column)
    origin = f"the column {column}"
    if holds_messages:
        messages = _each(lambda row: _message_prompt(row[column], column, spec))
        return CompiledPrompts((column,), messages, True, spec.chat_options, _message_notices(schema, column), origin)
    if is_token_list(value_type(schema, column, "column")):
        if spec.makes_chat:
            raise InputError(f"column {column!r} holds token ids, which cannot be chat messages: leave out --chat")
        return CompiledPrompts(
            (column,),
            _each(lambda row: _ids_of(row[column], column, may_be_empty)),
            False,
            spec.chat_options,
            origin=origin,
        )
    makes_chat = spec.makes_chat
    texts = _each(lambda row: _text_prompt(_text_of(row[column], column), spec, makes_chat, may_be_empty))
    return CompiledPrompts((column,), texts, spec.makes_chat, spec.chat_options, origin=origin)


def _each(convert: Callable[[Any], Any]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Make a function that applies `convert` to each value of an iterable.

    An exception in place of a value is yielded unchanged; a RowError of `convert` is yielded in place of the result.
    """

    def convert_each(values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            try:
                yield value if isinstance(value, Exception) else convert(value)
            except RowError as error:
                yield error

    return convert_each


def rows_to_requests(
    batch: pa.RecordBatch,
    first_row: int,
    compiled: CompiledPrompts,
    sampling: RowSampling,
    id_column: str | None = None,
) -> Iterator[Request]:
    """Yield one Request per row of a batch.

    The id of a request is the row's value in `id_column`, or the row's number where there is no value.

    Args:
        batch: The rows.
        first_row: Index of the batch's first row in the input.
        compiled: The source of prompts.
        sampling: The sampling parameters of rows.
        id_column: Column of the rows' ids.
    """
    more = (*sampling.columns, *compiled.tools_columns)
    for row_id, row, prompt in _rows(batch, first_row, compiled, more, id_column):
        try:
            if isinstance(prompt, Exception):
                raise prompt
            yield Request(prompt, sampling.of_row(row), row_id, chat=compiled.chat_of(row))
        except RowError as error:
            yield Request("", sampling.job, row_id, error=str(error))


def text_column(schema: pa.Schema, name: str, flag: str) -> None:
    """Raise InputError unless the input has a column of text of this name. flag: The option that names it."""
    kind = value_type(schema, name, flag)
    if not is_text(kind):
        raise InputError(f"{flag} {name!r} holds {kind}, and must hold text")


def with_pairs(requests: Iterable[Request], batch: pa.RecordBatch, column: str) -> Iterator[Request]:
    """Give each request the second text of its pair.

    Args:
        requests: The requests of the rows of a batch.
        batch: The rows.
        column: Column of the second texts.
    """
    for index, request in enumerate(requests):
        if request.error is not None:
            yield request
            continue
        try:
            second = _value(batch, column, index)
            if not isinstance(second, str):
                raise RowError(f"column {column!r} has no text in this row")
            yield replace(request, pair=checked_text(second, column))
        except RowError as error:
            yield replace(request, prompt="", error=str(error))


def rows_to_score_requests(
    batch: pa.RecordBatch,
    first_row: int,
    compiled: CompiledPrompts,
    continuations: CompiledContinuations,
    logprobs: int | None = None,
    id_column: str | None = None,
) -> Iterator[ScoreRequest]:
    """Yield one ScoreRequest per row of a batch: the prompt is the context, or itself the text to score.

    The id of a request is the row's value in `id_column`, or the row's number where there is no value.

    Args:
        batch: The rows.
        first_row: Index of the batch's first row in the input.
        compiled: The source of prompts.
        continuations: The source of continuations.
        logprobs: Number of most likely tokens to report at each position; None: none.
        id_column: Column of the rows' ids.
    """
    more = (*continuations.columns, *compiled.tools_columns)
    for row_id, row, prompt in _rows(batch, first_row, compiled, more, id_column):
        try:
            if isinstance(prompt, Exception):
                raise prompt
            if continuations.of_row is None:
                # Chat messages are refused where prompts are what is scored.
                yield ScoreRequest("", (cast("str | list[int]", prompt),), row_id, logprobs)
            else:
                yield ScoreRequest(prompt, continuations.of_row(row), row_id, logprobs, chat=compiled.chat_of(row))
        except RowError as error:
            yield ScoreRequest("", (), row_id, error=str(error))


def _rows(
    batch: pa.RecordBatch, first_row: int, compiled: CompiledPrompts, more: tuple[str, ...], id_column: str | None
) -> Iterator[tuple[str | int, dict[str, Any], Prompt | Exception]]:
    """Yield (id, columns, prompt or exception) of each row of a batch.

    Args:
        batch: The rows.
        first_row: Index of the batch's first row in the input.
        compiled: The source of prompts.
        more: Columns to read besides those of the prompt.
        id_column: Column of the rows' ids.
    """
    bad, names = bad_lines(batch), tuple(dict.fromkeys((*compiled.columns, *more)))
    numbers = row_numbers(batch, first_row)
    values = {name: _values(batch, name) for name in names}
    ids: deque[str | int] = deque()  # of rows that were read, and whose prompts have not come
    read: deque[dict[str, Any]] = deque()

    def rows() -> Iterator[Row]:
        for index in range(batch.num_rows):
            row_id: str | int = numbers[index]
            row: Row = {}
            try:
                if first_row + index in bad:
                    raise RowError(bad[first_row + index])
                if id_column is not None:
                    own = _value(batch, id_column, index)
                    row_id = row_id if own is None else checked_text(own, id_column)
                row = {name: of_rows(index) for name, of_rows in values.items()}
            except RowError as error:
                row = error
            ids.append(row_id)
            read.append({} if isinstance(row, Exception) else row)
            yield row if isinstance(row, Exception) else {name: row[name] for name in compiled.columns}

    for prompt in compiled.render(rows()):
        yield ids.popleft(), read.popleft(), prompt


def _read_template(path: str) -> str:
    try:
        return read_text(os.path.expanduser(path), "utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"cannot read the template file {path} ({one_line(getattr(error, 'strerror', None) or error)}): "
            "after @ comes a UTF-8 file; a template that begins with @ itself is written {{ '@' }}..."
        ) from error


def _source_column(spec: PromptSpec, schema: pa.Schema, id_column: str | None) -> tuple[str, bool]:
    """The column of prompts, and True where it holds chat messages.

    Args:
        spec: The source of prompts.
        schema: The input's columns.
        id_column: Column of the rows' ids, which holds no prompts unless it is named.

    Raises:
        InputError: The column does not exist, or has an unsuitable type.
    """
    if spec.messages_column is not None:
        column, flag, messages = spec.messages_column, "--messages-column", True
    elif spec.column is not None:
        column, flag, messages = spec.column, "--prompt-column", False
    else:
        column, flag = _default_column(schema, id_column), "column"
        column_type = schema.field(column).type
        messages = column in ("messages", "conversations") or (is_list(column_type) and not is_token_list(column_type))
    column_type = value_type(schema, column, flag)
    if pa.types.is_null(column_type):
        raise InputError(f"{flag} {column!r} holds only nulls: choose another column")
    if messages and not (is_text(column_type) or is_message_list(column_type)):
        raise InputError(
            f"{flag} {column!r} holds {column_type}: it must be lists of {{role, content}} or of ShareGPT's"
            f" {{from, value}}, or JSON of them"
        )
    if not messages and not is_text(column_type) and not is_token_list(column_type):
        fix = "--messages-column" if is_list(column_type) else "--prompt-template '{{ row[\"" + column + "\"] }}'"
        raise InputError(f"{flag} {column!r} holds {column_type}, not text: give {fix}")
    return column, messages


def _default_column(schema: pa.Schema, id_column: str | None) -> str:
    """The column of prompts where the user named none. Raises NoPromptColumn where there is no suitable column."""
    types = {name: value_type(schema, name, "column") for name in schema.names}
    conversations = [name for name, kind in types.items() if is_message_list(kind)]
    if "messages" in types and ("messages" in conversations or is_text(types["messages"])):
        return "messages"
    names = [*(["conversations"] if "conversations" in conversations else []), "prompt", "text"]
    if known := [name for name in names if name in types]:
        return known[0]
    texts: list[str] = [
        name for name, kind in types.items() if name != id_column and is_text(kind) and not is_binary(kind)
    ]
    if len(texts) == 1 and not conversations and not is_unsplit(schema):
        return texts[0]
    raise NoPromptColumn(schema, tuple(texts), conversations[0] if conversations else None)


def _message_notices(schema: pa.Schema, column: str) -> tuple[str, ...]:
    if not is_sharegpt(value_type(schema, column, "column")):
        return ()
    return (f"column {column!r} holds ShareGPT's {{from, value}}: human is the user, gpt the assistant",)


def _variable(column: str) -> str:
    """A column's value in a prompt template."""
    return f"{{{{ {column} }}}}" if column.isidentifier() else f'{{{{ row["{column}"] }}}}'


def _user_message(prompt: Prompt) -> Prompt:
    """A text prompt as chat messages; a text that begins nothing is no message."""
    if not prompt:
        raise RowError("the prompt is empty")
    return [{"role": "user", "content": prompt}]


def _text_prompt(text: str, spec: PromptSpec, makes_chat: bool | None, may_be_empty: bool) -> Prompt:
    if not text and (makes_chat or not may_be_empty):
        raise RowError("the prompt is empty")
    if not makes_chat:
        return text
    return _with_system([{"role": "user", "content": text}], spec)


def _message_prompt(value: Any, column: str, spec: PromptSpec) -> list[dict[str, Any]]:
    if value is None:
        raise RowError(f"column {column!r} is null")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {column!r} is not valid JSON: {one_line(error)}") from error
    else:
        value = without_nulls(value)
    return _with_system(normalize_messages(value), spec)


def _with_system(messages: list[dict[str, Any]], spec: PromptSpec) -> list[dict[str, Any]]:
    if spec.system_prompt is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": spec.system_prompt}, *messages]


def _text_of(value: str | bytes | None, column: str) -> str:
    if value is None:
        raise RowError(f"column {column!r} is null")
    text: str = checked_text(value, column)
    return text


def _ids_of(value: list[Any] | None, column: str, may_be_empty: bool) -> list[int]:
    if value is None:
        raise RowError(f"column {column!r} is null")
    if None in value:
        raise RowError(f"column {column!r} has a null token id")
    if not value and not may_be_empty:
        raise RowError("the prompt is empty")
    return value


def _values(batch: pa.RecordBatch, column: str) -> Callable[[int], Any]:
    """A function from the index of a row to its value in a column, as `_value` has it."""
    array = batch.column(column)
    if has_binary(array.type):
        return partial(_value, batch, column)
    try:
        values: list[Any] = array.to_pylist()
        return values.__getitem__
    except (ValueError, OverflowError, pa.ArrowException):  # of some row, which alone fails
        return partial(_value, batch, column)


def _value(batch: pa.RecordBatch, column: str, index: int) -> Any:
    """One value of a column as a Python value, with bytes decoded as text.

    Values are converted one by one, so that an invalid value fails only its own row.
    """
    try:
        values = batch.column(column)
        value = values[index].as_py()
        return decoded(value) if has_binary(values.type) else value
    except (ValueError, OverflowError, pa.ArrowException) as error:  # invalid UTF-8, a date beyond Python's
        raise RowError(f"column {column!r} cannot be read: {one_line(error)}") from error
