"""Chat templates: rendered as Hugging Face does, in a sandbox, every failure a ValueError that says why."""

import datetime
import json
from typing import Any

import pytest

from minisgl.tokenizer.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(source: str, messages=HI, special_tokens=None, **options) -> str:
    return ChatTemplate({"default": source}, special_tokens or {}).render(messages, **options)


def test_a_conversation_opens_the_answer_unless_told_otherwise():
    asked = "<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML) == asked + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == asked


def test_blocks_leave_no_white_space_behind():
    assert render("{% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_special_tokens_are_variables_and_what_is_not_given_is_empty():
    source = "{{ bos_token }}|{{ unk_token }}|{{ tools is none }}|{{ documents is none }}"
    assert render(source, special_tokens={"bos_token": "<s>"}) == "<s>||True|True"


def test_further_keyword_arguments_are_variables_of_the_template():
    assert render("{{ enable_thinking }} {{ bos_token }}", enable_thinking=False, bos_token="<b>") == "False <b>"
    assert render("{{ documents[0].title }}", documents=[{"title": "t"}]) == "t"


def test_json_is_written_for_a_prompt_and_not_for_a_page():
    value = [{"role": "user", "content": "<é> & 'x'"}]
    assert render("{{ messages[0].content | tojson }}", value) == "\"<é> & 'x'\""
    options = {"ensure_ascii": True, "indent": 2, "separators": [",", ":"], "sort_keys": True}
    assert render("{{ v | tojson(**o) }}", v={"b": "é", "a": 1}, o=options) == '{\n  "a":1,\n  "b":"\\u00e9"\n}'


def test_the_date_of_today_is_at_hand():
    before = datetime.datetime.now()
    shown = render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    assert before.replace(microsecond=0) <= datetime.datetime.fromisoformat(shown) <= datetime.datetime.now()


def test_loops_may_break_and_continue():
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}"
    assert render(source + "{% endfor %}") == "02"


def test_the_generation_tag_only_groups_what_it_holds():
    source = "{% set x = 1 %}a{% generation %}{% set x = 2 %}b{{ x }}{% endgeneration %}c{{ x }}"
    assert render(source) == "ab2c1"


@pytest.mark.parametrize(
    ("tools", "text"), [(None, "plain"), ([{"type": "function"}], "with tools"), ([], "with tools")]
)
def test_tools_choose_the_template_for_tools_where_there_is_one(tools, text):
    templates = {"default": "plain", "tool_use": "with tools", "rag": "{{ 1 / 0 }}"}
    assert ChatTemplate(templates, {}).render(HI, tools=tools) == text
    assert ChatTemplate({"default": "plain"}, {}).render(HI, tools=tools) == "plain"


def test_templates_without_a_default_are_refused_with_their_names():
    with pytest.raises(ValueError, match="no chat template is named default, only rag, tool_use"):
        ChatTemplate({"tool_use": "", "rag": ""}, {}).render(HI)


def test_a_template_is_compiled_once():
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {})
    assert template._compiled("default") is template._compiled("default")
    assert [template.render(HI), template.render(HI)] == ["Hi", "Hi"]


# Messages


def test_text_parts_and_missing_text_become_a_string():
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert render("[{{ messages[0].content }}]", [{"role": "user", "content": None}]) == "[]"
    calls = [{"role": "assistant", "tool_calls": [{"id": "1"}]}]
    assert render("[{{ messages[0].content }}]{{ messages[0].tool_calls[0].id }}", calls) == "[]1"


def test_other_fields_reach_the_template_and_those_that_are_none_do_not():
    message = {"role": "tool", "content": "x", "name": "f", "tool_calls": None}
    assert render("{{ messages[0].name }} {{ messages[0].tool_calls is defined }}", [message]) == "f False"


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    before = json.dumps(messages)
    render(CHATML, messages, continue_final_message=True)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "messages must be a list of at least one message"),
        ("Hi", "messages must be a list"),
        ({"role": "user", "content": "Hi"}, "messages must be a list"),
        (["Hi"], "message 0 must be an object with role and content, got 'Hi'"),
        ([{"content": "Hi"}], "message 0 must have a string as its role, got None"),
        ([*HI, {"role": 5, "content": "Hi"}], "message 1 must have a string as its role, got 5"),
        ([{"role": "user"}], r"message 0 \(user\) has no content"),
        ([{"role": "user", "content": 5}], r"message 0 \(user\): content must be a string or a list .* got 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts are supported.*'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "only text parts are supported.* got {'type'"),
        ([{"role": "user", "content": ["Hi"]}], "only text parts are supported.* got 'Hi'"),
    ],
)
def test_messages_that_are_not_well_formed_are_refused(messages, error):
    with pytest.raises(ValueError, match=error):
        render(CHATML, messages)


# An answer that is continued


@pytest.mark.parametrize("content", ["The capital", "The capital ", "two\nlines\n", ""])
def test_the_final_message_stays_open_to_be_continued(content):
    messages = [*HI, {"role": "assistant", "content": content}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + content
    assert render(CHATML, messages, continue_final_message=True) == expected


def test_a_template_that_trims_messages_trims_the_one_to_continue():
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": " b "}]
    assert render(source, messages, continue_final_message=True) == "[a][b"


def test_a_template_that_does_not_show_the_final_message_cannot_continue_it():
    with pytest.raises(ValueError, match="continue_final_message: the chat template does not show"):
        render("{{ messages[0].role }}", continue_final_message=True)


def test_continuing_and_opening_an_answer_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        render(CHATML, add_generation_prompt=True, continue_final_message=True)


# Templates that fail


def test_a_template_that_refuses_the_messages_speaks_for_itself():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(ValueError, match=r"^System role not supported$"):
        render(source, [{"role": "system", "content": "Be brief."}])


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% if %}", "the chat template is broken at line 1: Expected an expression"),
        ("\n{{ x | sparkle }}", "the chat template is broken at line 2: No filter named 'sparkle'"),
        ("{% break %}", "the chat template is broken: 'break' outside loop"),
        ("{{ nothing.here }}", "the chat template failed: UndefinedError: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "the chat template failed: ZeroDivisionError"),
        ("{% include '/etc/hostname' %}", "the chat template failed: TypeError: no loader"),
    ],
)
def test_a_template_that_is_broken_or_fails_is_a_clear_error(source, error):
    with pytest.raises(ValueError, match=error):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ strftime_now.__globals__['json'].dumps(1) }}",
        "{{ raise_exception.__code__.co_name.upper() + 1 }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(strftime_now) }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_the_sandbox_keeps_a_template_from_python(source):
    with pytest.raises(ValueError, match=r"the chat template failed: \w+Error"):
        render(source)


def test_an_argument_that_the_template_gets_anyway_cannot_be_set_again():
    variables: dict[str, Any] = {"messages": []}
    with pytest.raises(ValueError, match="messages cannot be given again"):
        ChatTemplate({"default": CHATML}, {}).render(HI, **variables)
