"""Chat templates: jinja as checkpoints write it, in a sandbox, with errors that say whose fault it is."""

import pytest

from glm_dcp_jax.engine.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<1> & 'ü'"}]


def test_messages_and_variables_are_rendered():
    template = ChatTemplate(
        "[gMASK]<sop>{% for m in messages %}\n"
        "<|{{ m.role }}|>{{ m.content }}\n"
        "{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rendered = template.render(MESSAGES, add_generation_prompt=True)
    assert rendered == "[gMASK]<sop><|system|>Be brief.<|user|><1> & 'ü'<|assistant|>"


def test_blocks_leave_no_blank_lines():
    template = ChatTemplate("a\n    {% if true %}\nb\n    {% endif %}\nc")
    assert template.render([]) == "a\nb\nc"


def test_tojson_escapes_nothing_for_html_and_keeps_unicode():
    template = ChatTemplate("{{ messages[1] | tojson }}")
    assert template.render(MESSAGES) == '{"role": "user", "content": "<1> & \'ü\'"}'


def test_tojson_takes_an_indent():
    assert ChatTemplate("{{ {'a': 1} | tojson(indent=2) }}").render([]) == '{\n  "a": 1\n}'


def test_loop_controls_and_the_date_are_there():
    template = ChatTemplate("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert template.render([]) == "01"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]).isdecimal()


def test_a_bad_template_is_refused_with_its_line():
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("fine\n{% if %}")


def test_a_template_may_refuse_messages():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize("source", ["{{ messages[0].a.b }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_a_failing_template_is_not_a_crash(source):
    with pytest.raises(ChatTemplateError, match="failed on these messages"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_the_sandbox_holds(source):
    messages = list(MESSAGES)
    with pytest.raises(ChatTemplateError, match="failed on these messages"):
        ChatTemplate(source).render(messages)
    assert messages == MESSAGES


def test_a_long_range_is_refused():
    assert ChatTemplate("{{ range(10000) | length }}").render([]) == "10000"
    with pytest.raises(ChatTemplateError, match="at most 10000"):
        ChatTemplate("{% for i in range(10001) %}{% endfor %}").render([])


def test_a_template_tells_which_variables_it_reads_and_what_it_compares_them_with():
    template = ChatTemplate(
        "{% set seen = tools %}{% if effort == 'high' %}{{ 'low' ~ a }}{% endif %}{# documents #}text"
    )
    assert [template.reads(name) for name in ("tools", "effort", "seen", "documents")] == [
        True,
        True,
        False,
        False,
    ]
    assert [template.knows(value) for value in ("high", "low", "text", "max")] == [True, True, False, False]
