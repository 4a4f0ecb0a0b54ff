"""Templates render as in Hugging Face, in a sandbox."""

import jinja2
import pytest

from jaxrl_llm.data.chat_template import compile_template
from jaxrl_llm.data.tokenizer import ByteTokenizer

CHATS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": " é 🎉 <|im_end|> "}],
]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m | tojson }}\n  {% endif %}\n{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ '<é>' | tojson }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ unknown }}",
        "{{ strftime_now('%Y') }}{% if add_generation_prompt %}go{% endif %}",
    ],
)
def test_compile_template_renders_as_hugging_face_does(template):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for messages in CHATS:
        expected, _ = chat_template_utils.render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True
        )
        got = compile_template(template).render(messages=messages, add_generation_prompt=True)
        assert got == expected[0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% if",
    ],
)
def test_render_reports_a_template_that_fails_or_reaches_out(template):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template fails"):
        tokenizer.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(jinja2.TemplateError):
        compile_template(template).render(messages=[])
