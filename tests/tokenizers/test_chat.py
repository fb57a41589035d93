import datetime
import sys

import pytest

from xformer.errors import BackendError, CheckpointError
from xformer.tokenizers.chat import _compiled, render_chat_template

pytest.importorskip("jinja2")


def test_functions_of_templates():
    year = str(datetime.datetime.now().year)
    assert render_chat_template("{{ strftime_now('%Y') }}") == year
    assert render_chat_template("{{ x | tojson }}", x={"ü": "<'&'>"}) == '{"ü": "<\'&\'>"}'
    assert render_chat_template("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"
    assert render_chat_template("{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}") == "2"
    assert render_chat_template("a\n  {% if true %}\nb\n  {% endif %}\n") == "a\nb\n"
    assert render_chat_template("{% generation %}x{% endgeneration %}") == "x"
    assert render_chat_template("{{ '=' * 3 }}{{ undefined }}") == "==="


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[0] }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ 'x' * 10**9 }}", "{{ 9 ** (9 ** 9) }}",
    "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}",
    "{% for a in range(70000) %}{{ 'x' * 1000 }}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '/etc/passwd' %}", "{% if %}", "{{ 1 + 'a' }}",
])  # fmt: skip
def test_templates_that_fail_or_leave_the_sandbox(template):
    with pytest.raises(CheckpointError, match="the chat template") as error:
        render_chat_template(template, messages=[])
    assert "\n" not in str(error.value)


def test_a_template_is_compiled_once_and_its_loops_are_bounded_in_each_rendering():
    template = "{% for _ in range(600000) %}{% endfor %}{{ x }}"
    assert [render_chat_template(template, x=x) for x in "ab"] == ["a", "b"]
    assert _compiled(template) is _compiled(template)


def test_a_missing_jinja2(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BackendError, match=r"pip install \"array-transformers\[chat\]"):
        render_chat_template("x")
