"""Chat templates: the text of transformers, and nothing but text, whatever the template tries."""

import gc
import json
from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from glassformer.adapters.chat.template import ChatTemplate, Limits, read_chat, read_templates
from glassformer.spec.errors import FileError, InputError
from tests.adapters import folders

PLAIN = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "ä < b & 'c'", "parameters": {"type": "object"}},
    }
]
TALKS = {
    "one": PLAIN,
    "several": [
        {"role": "system", "content": "Be <b>short</b> & 'kind'."},
        {"role": "user", "content": "hi 你好\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo 👩🏽\u200d🚀"},
        {"role": "user", "content": "  more  "},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "22 °C"},
        {"role": "tool", "content": "rain"},
    ],
}

#: What templates in the wild use, each in a template of our own.
FEATURES = {
    "chatml": folders.CHATML,
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t.function.name }}{{ t | tojson }}"
    "{% endfor %}{% else %}none{% endif %}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "reversed": "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m['role'] }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "whitespace": "  {% if true %}\n    a\n  {% endif %}\n  b {#- c -#}\n\n",
    "macro": "{% macro say(m) %}[{{ m.role }}:{{ m.content | trim }}]{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
    "marks": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    "switch": "{% if think is defined and think is false %}off{% else %}on{% endif %}",
    "strings": "{{ messages[-1].content.split('i')[0].strip() + 'x' * 3 }}"
    "{{ messages | map(attribute='role') | join(',') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{{ add_generation_prompt }}",
    "tests": "{{ messages is iterable }}{{ tools is none }}{{ documents is none }}"
    "{{ messages[0].nothing is defined }}",
}


@pytest.mark.parametrize("talk", TALKS)
def test_the_text_is_that_of_transformers(talk):
    messages, names = TALKS[talk], {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(FEATURES, names=names)
    for name, source in FEATURES.items():
        for tools in (None, TOOLS):
            for prompt in (True, False):
                for options in ({}, {"think": False}):
                    (wanted,), _ = render_jinja_template(
                        conversations=[messages],
                        tools=tools,
                        chat_template=source,
                        add_generation_prompt=prompt,
                        **names,
                        **options,
                    )
                    found = template.render(
                        messages,
                        tools=tools,
                        add_generation_prompt=prompt,
                        template=name,
                        options=options,
                    )
                    assert found == wanted, name
    template.close()


def test_the_time_can_be_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert template.render(PLAIN, now=datetime(2024, 7, 26)) == "26 Jul 2024"
    assert template.render(PLAIN) == datetime.now().strftime("%d %b %Y")


# --- what a template may not do -----------------------------------------------------------------

HOSTILE = {
    "{% for i in range(10**9) %}x{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "seconds",
    "{{ 'a' * 10**10 }}": "megabytes",
    "{{ 'a'.ljust(10**10) }}": "megabytes",
    "{{ [1] * 10**9 }}": "megabytes",
    "{{ '%1000000000d' % 1 }}": "megabytes",
    "{{ messages | tojson(indent=10**9) }}": "megabytes",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "characters",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nests too deeply",
    "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}": "nests too deeply",
    "{{ ''.__class__.__mro__ }}": "may not",
    "{{ cycler.__init__.__globals__ }}": "may not",
    "{{ messages.append(1) }}": "may not",
    "{{ messages[0].update(role='x') }}": "may not",
    "{% if %}": "cannot be read",
    "{% unknown %}": "cannot be read",
}


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: source[:30])
def test_a_hostile_template_is_stopped(source):
    template = ChatTemplate(source, limits=Limits(seconds=0.2), where="somewhere")
    with pytest.raises((FileError, InputError), match=HOSTILE[source]) as caught:
        template.render(PLAIN)
    assert isinstance(caught.value, FileError) or "Range too big" in caught.value.what
    template.close()


@pytest.mark.parametrize("source", ["{% include 'x' %}", "{% import 'os' as o %}{{ o }}"])
def test_nothing_is_loaded(source):
    with pytest.raises(InputError, match="no loader"):
        ChatTemplate(source).render(PLAIN)


def test_hidden_attributes_are_undefined():
    source = "{{ messages | map(attribute='__class__') | list }}{{ '{0.__class__}'.format(1) }}"
    assert ChatTemplate(source).render(PLAIN) == "[Undefined]"


def test_it_works_again_after_it_was_stopped():
    loop = "{% for i in range(99999) %}"
    sources = {
        "default": "{{ 'a' * 10**10 }}",
        "slow": loop + loop + "{% endfor %}{% endfor %}",
        "good": "{{ messages[0].content }}",
    }
    template = ChatTemplate(sources, limits=Limits(seconds=0.2))
    for _ in range(2):
        for bad in ("default", "slow"):
            with pytest.raises(FileError):
                template.render(PLAIN, template=bad)
            assert template.render(PLAIN, template="good") == "hi"


def test_a_refusal_is_told_without_its_escapes():
    template = ChatTemplate("{{ raise_exception('roles must \x1b[31m alternate') }}")
    with pytest.raises(InputError, match=r"refuses this conversation: roles must \\x1b\[31m"):
        template.render(PLAIN)


def test_messages_that_do_not_fit():
    template = ChatTemplate("{{ messages[0].content.nothing.more }}")
    with pytest.raises(InputError, match="cannot use this conversation"):
        template.render(PLAIN)
    with pytest.raises(InputError, match="without a role"):
        template.render([{"content": "x"}])
    with pytest.raises(InputError, match="not plain data"):
        template.render([{"role": "user", "content": object()}])


def test_the_process_ends_with_its_owner():
    template = ChatTemplate("x")
    template.render(PLAIN)
    worker = template._worker
    assert worker.poll() is None
    del template
    gc.collect()
    assert worker.poll() is not None


# --- where templates are found ------------------------------------------------------------------


def test_the_jinja_file_comes_first_then_the_key(tmp_path):
    folders.write_names(tmp_path)
    assert read_templates(tmp_path) == {"default": folders.CHATML}
    folders.write(tmp_path, "chat_template.jinja", "file")
    folders.write(tmp_path / "additional_chat_templates", "rag.jinja", "more")
    assert read_templates(tmp_path) == {"default": "file", "rag": "more"}


def test_named_templates_and_the_one_for_tools(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    folders.write_names(tmp_path, chat_template=named)
    chat = read_chat(tmp_path)
    assert chat.render(PLAIN) == "d"
    assert chat.render(PLAIN, tools=TOOLS) == "t"
    assert chat.render(PLAIN, template="tool_use") == "t"
    with pytest.raises(InputError, match="no chat template 'tool_us'"):
        chat.render(PLAIN, template="tool_us")


def test_the_folders_marks_are_there(tmp_path):
    folders.write_names(tmp_path, chat_template="{{ eos_token }}{{ pad_token }}{{ bos_token }}")
    assert read_chat(tmp_path).render(PLAIN) == "<|im_end|><|endoftext|>"


def test_a_checkpoint_keeps_its_template_in_origin(tmp_path):
    folders.write_names(tmp_path / "origin")
    assert read_templates(tmp_path) == {"default": folders.CHATML}


@pytest.mark.parametrize("bad", [5, [{"name": "x"}], [{"name": "x", "template": 3}], {"a": "b"}])
def test_a_strange_template_is_refused(bad, tmp_path):
    folders.write_names(tmp_path, chat_template=bad)
    with pytest.raises(FileError, match=r"chat.template"):
        read_templates(tmp_path)


def test_no_template_is_said(tmp_path):
    with pytest.raises(InputError, match="no chat template"):
        read_chat(tmp_path)
    folders.write(tmp_path, "chat_template.jinja", "x" * 1_000_001)
    with pytest.raises(FileError, match="bytes"):
        read_templates(tmp_path)


def test_all_of_a_long_conversation_arrives():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    long = [{"role": "user", "content": "\U0001f680é" * 50_000} for _ in range(5)]
    assert template.render(long) == "".join(message["content"] for message in long)
    assert json.loads(json.dumps(long)) == long
