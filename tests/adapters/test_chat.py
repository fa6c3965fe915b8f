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


#: Templates of our own in the manner of a family: its marks, its roles, what it computes.
FAMILIES = {
    "gemma": "{{ bos_token }}"
    "{%- set head = messages[0].content + '\\n\\n' if messages[0].role == "
    "'system' else '' -%}{%- for m in messages if m.role != 'system' -%}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}"
    "\n{{ head if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor -%}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "llama 3": "{{- bos_token }}{%- set date = date_string | default('26 Jul 2024') %}"
    "{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{%- if loop.first %}{{- 'Today: ' ~ date }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
    "mistral": "{{ bos_token }}"
    "{% set turns = messages | selectattr('role', 'ne', 'system') | list %}"
    "{% for m in turns %}{% if m.role == 'user' %}"
    "{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ m.content ~ eos_token }}{% else %}{{ m | tojson }}{% endif %}{% endfor %}",
    "phi 3": "{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}"
    "{% endif %}",
    "granite": "{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{%- if not loop.last %}"
    "{{- '\\n\\n' }}{%- endif %}{%- endfor %}{%- endif %}{%- for m in messages %}"
    "{{- '<|start_of_role|>' ~ m.role ~ '<|end_of_role|>' ~ m.content ~ "
    "'<|end_of_text|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}",
    "glm 4": "[gMASK]<sop>{%- for m in messages -%}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>{%- if m.tool_calls -%}"
    "{%- for c in m.tool_calls -%}{{ c.function.name }}"
    "\n{{ c.function.arguments | tojson }}{%- endfor -%}{%- else -%}\n{{ m.content }}"
    "{%- endif -%}{%- endfor -%}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "cohere": "{{ bos_token }}{% for m in messages %}"
    "<|START_OF_TURN_TOKEN|>{{ {'user': '<|USER_TOKEN|>', 'system': "
    "'<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}.get(m.role, '<|TOOL|>') }}"
    "{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>{% endfor %}",
    "smollm 3": "{%- set ns = namespace(system='', mode='/think') -%}"
    "{%- if messages[0].role == 'system' -%}"
    "{%- set ns.system = messages[0].content.rstrip() -%}{%- endif -%}"
    "{%- if think is defined and not think -%}{%- set ns.mode = '/no_think' -%}"
    "{%- endif -%}<|im_start|>system\n{{ ns.mode }}\n{{ ns.system }}"
    "<|im_end|>\n{%- for m in messages[1:] if m.content is string -%}"
    "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "<|im_end|>\n{%- endfor -%}",
    "qwen 3": "{%- set ns = namespace(last=messages | length - 1, seen=false) %}"
    "{%- for m in messages[::-1] %}{%- if not ns.seen and m.role == 'user' %}"
    "{%- set ns.seen = true %}{%- set ns.last = messages | length - 1 - loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'tool' and (loop.first or loop.previtem.role != 'tool') %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' ~ m.content if m.role == 'tool' else "
    "'<|im_start|>' ~ m.role ~ ns.last }}{%- endfor %}",
    "gpt-oss": "{%- macro shape(p) -%}{%- if p.type == 'object' -%}"
    "({{ p | items | map('first') | join('|') }}){%- else -%}{{ p.type }}{%- endif -%}"
    "{%- endmacro -%}"
    "<|start|>system<|message|>Knowledge cutoff: 2024-06\n{% for t in tools or [] %}"
    "type {{ t.function.name }} = (_: {{ shape(t.function.parameters) }}"
    ") => any;\n{% endfor %}{%- for m in messages %}<|start|>{{ m.role }}"
    "{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endfor %}",
    "olmo 2": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<|assistant|>\\n' + m['content'] + eos_token }}{% else %}"
    "{{ '<|' ~ m['role'] ~ '|>\\n' + m['content'] ~ '\\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    "{% endfor %}",
    "llama3": "{{ bos_token }}{% for m in messages %}{% set said = m['content'] | trim %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + said + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "phi3": "{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}"
    "{{ '<|system|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'user' %}"
    "{{ '<|user|>\\n' + m['content'] + '<|end|>\\n' }}{% elif m['role'] == 'assistant' %}"
    "{{ '<|assistant|>\\n' + m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    "olmo2": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\\n' + m['content'] + eos_token + '\\n' }}"
    "{% else %}{{ '<|assistant|>\\n' + m['content'] + eos_token }}{% endif %}"
    "{% else %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '\\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}",
    "glm4": "[gMASK]<sop>{%- if tools -%}<|system|>\\n{% for tool in tools %}"
    "## {{ tool.function.name }}\\n\\n{{ tool.function | tojson(indent=4) }}\\n{% endfor %}"
    "{%- endif -%}{%- for m in messages %}{%- if m.role == 'system' %}<|system|>\\n"
    "{{ m.content }}{%- else %}<|{{ m.role }}|>\\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "falcon": "{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ m.role | capitalize }}"
    ": {{ m.content | replace('\\r\\n', '\\n') | replace('\\n\\n', '\\n') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}",
}


@pytest.mark.parametrize("talk", TALKS)
def test_templates_of_families_give_the_text_of_transformers(talk):
    messages, names = TALKS[talk], {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(FAMILIES, names=names)
    for name, source in FAMILIES.items():
        for tools, prompt, options in (
            (None, True, {}),
            (TOOLS, True, {"think": False}),
            (TOOLS, False, {}),
        ):
            (wanted,), _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=prompt,
                **names,
                **options,
            )
            found = template.render(
                messages, tools=tools, add_generation_prompt=prompt, template=name, options=options
            )
            assert found == wanted and found, name
    template.close()


def test_a_family_may_refuse_roles_in_its_own_words():
    """Turns must take turns, as Gemma and Mistral do it."""
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.render(PLAIN) == "hi"
    with pytest.raises(InputError, match="must alternate"):
        template.render(PLAIN * 2)
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
