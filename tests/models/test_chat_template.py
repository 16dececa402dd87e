"""Chat templates: the texts that transformers makes of them, and no message lost on the way."""

import itertools

import pytest
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.errors import InputError, RowError
from batchgen.core.request import ChatOptions
from batchgen.core.templates import TemplateLimits
from batchgen.models.tokenizers.chat_template import Chat, ChatTemplate
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer import Tokenizer


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CHATML = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}\n{%- endfor "
    "%}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TRIMS = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Shaped as Qwen3's: a switch, thoughts of earlier answers left out, and those that come as fields.
THINKS = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'user' and ns.last < 0 %}{% set ns.last = loop.length - loop.index %}{% break %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- set thoughts = m.reasoning_content | default('') %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ thoughts }}{% if loop.index0 > ns.last %}!{% endif %}{{ content }}{% endgeneration %}
    {%- else %}{{ content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
AS_JSON = (
    "{% set d = dict(a=1) %}{{ strftime_now('%Y') }} {{ tools }} {{ d.a }}{{ documents | default('none') }}"
    "{% for m in messages %}{{ m | tojson(indent=1) }}{% if loop.index == 2 %}{% continue %}{% endif %};{% endfor %}"
    "{{ effort | default(0) | tojson }}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% "
    "endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}S{{ m.content }}{% else %}"
    "P{{ m.content[0].text }}{% endif %}{% endfor %}"
)

CONVERSATIONS = [
    [said("user", "Hello, <b>&</b> 'you' é\n\n  there \u4e00")],
    [said("system", " Be kind. "), said("user", "a"), said("assistant", "<think>hm</think>\n\nb"), said("user", " c ")],
    [said("user", "a"), said("assistant", "b", reasoning_content="why", tool_calls=None), said("user", "c")],
    [said("user", "a", name=None), said("assistant", "b", thinking="why")],
]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """template -> (ours, that of transformers)."""
    folder = tmp_path_factory.mktemp("tokenizer")

    def make(template, special_tokens="parse"):
        hf = make_tiny_tokenizer(folder, chat_template=template)
        return Tokenizer(TokenizerParts.of_transformers(hf), special_tokens), hf

    return make


@pytest.mark.parametrize("template", [CHATML, TRIMS, THINKS, AS_JSON], ids=["chatml", "trims", "thinks", "json"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"effort": ["<low>", 1.5, None]}])
def test_prompts_are_those_of_transformers(tokenizer_of, template, kwargs):
    ours, reference = tokenizer_of(template)
    known = {name: value for name, value in kwargs.items() if name in ours.chat_template.variables}
    chats = [Chat(messages, ChatOptions(known)) for messages in CONVERSATIONS]
    expected = [
        reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **known)
        for messages in CONVERSATIONS
    ]
    assert ours.render_chats(chats) == expected


@pytest.mark.parametrize("template", [CHATML, TRIMS, THINKS], ids=["chatml", "trims", "thinks"])
@pytest.mark.parametrize("last", ["The answer is", " The answer is ", "One\n\n", "<|im_end|> is", "assistant"])
@pytest.mark.parametrize("special_tokens", ["parse", "text"])
def test_a_last_message_is_continued_as_transformers_does(tokenizer_of, template, last, special_tokens):
    ours, reference = tokenizer_of(template, special_tokens)
    messages = [said("user", "What is it?"), said("assistant", last)]
    expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    options = ChatOptions(continue_final=True)
    if special_tokens == "parse":
        assert ours.render_chat(messages, options) == expected
    assert ours.decode(ours.encode_chat(messages, options), skip_special_tokens=False) == expected


def test_a_conversation_that_ends_with_the_user_is_answered_whatever_is_continued(tokenizer_of):
    ours, _ = tokenizer_of(CHATML)
    assert ours.render_chat([said("user", "a")], ChatOptions(continue_final=True)) == ours.render_chat(
        [said("user", "a")]
    )


def test_what_a_template_drops_of_the_last_message_cannot_be_continued(tokenizer_of):
    ours, _ = tokenizer_of(THINKS)
    with pytest.raises(RowError, match="cannot be continued"):
        ours.render_chat([said("user", "a"), said("assistant", "<think>b</think>c")], ChatOptions(continue_final=True))


def test_content_is_given_as_parts_where_the_template_reads_nothing_else(tokenizer_of):
    ours, reference = tokenizer_of(PARTS)
    messages = [said("system", "s"), said("user", "hi there"), said("assistant", "b"), said("user", "c")]
    assert ours.render_chat(messages) == "system: s\nuser: hi there\nassistant: b\nuser: c\n"
    in_parts = [said(m["role"], [{"type": "text", "text": m["content"]}]) for m in messages]
    assert ours.render_chat(in_parts) == reference.apply_chat_template(in_parts, tokenize=False)
    text = ours.render_chat([said("user", "a"), said("assistant", "One ")], ChatOptions(continue_final=True))
    assert text == "user: a\nassistant: One "
    either, _ = tokenizer_of(BOTH)
    assert either.render_chat([said("user", "a"), said("assistant", "b")]) == "SaSb"


def test_results_of_tools_have_a_role_where_tools_do_and_roles_are_written_as_they_are(tokenizer_of):
    """LFM2.5's template names no role but two: tools, their calls and their results are what the model was made for."""
    messages = [said("user", "When?"), said("assistant", "ferry()"), said("tool", "At noon")]
    with_tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    ours, reference = tokenizer_of(with_tools)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == expected and "tool\nAt noon" in expected
    by_role = "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}{{ m.content }}{% endfor %}{{ tools }}"
    for template, role in ((CHATML, "tool"), (by_role, "tool"), (with_tools, "tol")):
        with pytest.raises(RowError, match=f"message 3 has the role '{role}'"):
            tokenizer_of(template)[0].render_chat([*messages[:2], said(role, "At noon")])


def test_each_role_gets_its_content_as_its_template_reads_it(tokenizer_of):
    forms = {"string": "{{ m.content }}", "parts": "{% for c in m.content %}{{ c.text }}{% endfor %}"}
    for system, user, assistant in itertools.product(forms, forms, forms):
        ways = {"system": forms[system], "user": forms[user], "assistant": forms[assistant]}
        branches = "".join(f"{{% if m.role == '{role}' %}}{way}{{% endif %}}" for role, way in ways.items())
        ours, _ = tokenizer_of("{% for m in messages %}[" + branches + "]{% endfor %}")
        messages = [said("system", "one"), said("user", "two"), said("assistant", "three"), said("user", "four")]
        assert ours.render_chat(messages) == "[one][two][three][four]"


@pytest.mark.parametrize(
    ("template", "messages", "number"),
    [
        # A system message that is left out without a word, as older Phi-3's is.
        (
            CHATML.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}"),
            CONVERSATIONS[1],
            1,
        ),
        # One that stands in the prompt by accident.
        (
            "System: {% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            [said("system", "Sys"), said("user", "a")],
            1,
        ),
        ("{{ messages[-1].content }}", [said("user", "first"), said("user", "second")], 1),
        ("{% for m in messages %}{{ m.content[:5] }}{% endfor %}", [said("user", "more than that")], 1),
        ("{% for m in messages %}{{ m.text }}{% endfor %}", [said("user", "there")], 1),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", [said("user", [{"type": "text", "text": "there"}])], 1),
        ("{{ messages[0].content }}", [said("system", "a"), said("user", "no"), said("user", "b")], 2),
    ],
)
def test_a_text_that_is_not_in_the_prompt_fails_the_row(tokenizer_of, template, messages, number):
    ours, _ = tokenizer_of(template)
    failed, fine = ours.render_chats([Chat(messages), Chat([said("user", "")])])
    assert isinstance(failed, RowError) and f"leaves out the text of message {number} " in str(failed)
    assert "\n" not in str(failed) and (isinstance(fine, str) or "refuses" in str(fine))


@pytest.mark.parametrize(
    "template",
    [
        TRIMS,
        "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}",
        "{% for m in messages %}{% for line in m.content.split('\n') %}{{ line.strip() }} {% endfor %}{% endfor %}",
        "{{ messages[0].content }}\n\n{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_text_may_be_trimmed_or_quoted_in_the_prompt(tokenizer_of, template):
    ours, _ = tokenizer_of(template)
    text = '  a "quoted" word,\n\n  é and a tab\t  '
    assert isinstance(ours.render_chat([said("system", text), said("user", text)]), str)


def test_of_the_assistants_messages_thoughts_may_be_left_out(tokenizer_of):
    ours, _ = tokenizer_of(THINKS)
    assert "hm" not in ours.render_chat(CONVERSATIONS[1])


def test_a_variable_that_the_template_does_not_use_is_refused_by_name(tokenizer_of):
    ours, _ = tokenizer_of(THINKS)
    with pytest.raises(InputError, match=r"no variable 'enable_thinkin': it has enable_thinking$"):
        ours.require_chat_template(ChatOptions({"enable_thinkin": False}))
    failed, fine = ours.render_chats(
        [
            Chat(CONVERSATIONS[0], ChatOptions({"effort": "low"})),
            Chat(CONVERSATIONS[0], ChatOptions({"enable_thinking": True})),
        ]
    )
    assert "no variable 'effort'" in str(failed) and isinstance(fine, str)


@pytest.mark.parametrize(
    "given", ['{"messages": []}', {"tools": []}, {"add_generation_prompt": True}, "[1]", "{", {"a": {1}}, 3]
)
def test_variables_that_are_none_are_refused_in_a_line(given):
    with pytest.raises(InputError, match="chat_template_kwargs") as raised:
        ChatOptions(given)
    assert "\n" not in str(raised.value)


def test_a_template_by_name_is_the_default_one(tokenizer_of):
    named = {"default": CHATML, "tool_use": "none"}
    ours, reference = tokenizer_of(named)
    assert ours.render_chat(CONVERSATIONS[0]) == reference.apply_chat_template(
        CONVERSATIONS[0], tokenize=False, add_generation_prompt=True
    )
    with pytest.raises(InputError, match="none of them the default: tool_use"):
        ChatTemplate.of({"tool_use": "none"}, {})


def test_a_broken_template_is_an_input_error():
    with pytest.raises(InputError, match="chat template, line 2"):
        ChatTemplate.of("a\n{{ b", {}).check_variables({"a": 1})


def test_a_template_is_bounded_in_memory_and_time():
    limits = TemplateLimits(seconds=0.1, memory_bytes=64 << 20)
    for work in (
        "{{ 'a' * 10 ** 9 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ):
        text = "{% if messages[0].content == 'go' %}" + work + "{% endif %}{{ messages[0].content }}"
        failed, fine = ChatTemplate(text, {}, limits).render([Chat([said("user", "go")]), Chat([said("user", "stay")])])
        assert "shorten its values" in str(failed) and fine == "stay"


def test_templates_see_plain_values_alone(tokenizer_of):
    class Text(str):
        def upper(self):
            raise AssertionError("a method of the caller's is called")

    ours, _ = tokenizer_of("{% for m in messages %}{{ m.content.upper() }}{{ m.more }}{% endfor %}")
    assert ours.render_chat([said("assistant", Text("a"), more=object())]) == "A<object>"
