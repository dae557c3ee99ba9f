"""Chat templates that strangers wrote: they end in time and memory, and in one sentence."""

import time

import pytest

from data.text.chat import rendering
from data.text.chat.template import ChatTemplate, Dialogue, Rendered
from tests.data.text.chat.test_chat import CONVERSATIONS
from untrusted.limited import LimitedProcesses
from untrusted.limited_process import Limits

#: As in data preparation and in the server, but for short tests.
PROCESSES = LimitedProcesses(
    rendering.render, Limits(cpu_s=0.5, memory_bytes=2**28, reply_bytes=2**22)
)
#: For templates that have another reason: Jinja compiles the longest for 0.3 seconds or more.
PATIENT_PROCESSES = LimitedProcesses(
    rendering.render, Limits(cpu_s=10, memory_bytes=2**28, reply_bytes=2**22)
)
_NESTED = "{% if 1 %}" * 3000 + "{% endif %}" * 3000
_LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
_DOUBLED = "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}"

TEMPLATES = {
    "nested blocks": (_NESTED, "nested too deeply"),
    "nested brackets": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    "long sum": ("{{ 1" + " + 1" * 20_000 + " }}", "is not a chat template"),
    "nested loops": (_LOOPS, "processor time"),
    "lipsum": ("{{ lipsum(n=9999, min=9999, max=99999) }}", "lipsum"),
    "slice": ("{{ messages | slice(10**9) | list }}", "processor time|memory"),
    "batch": ("{{ [1] | batch(10**9, 1) | list }}", "processor time|memory"),
    "repetition": ("{{ 'a' * 10**10 }}", "memory"),
    "wide field": ("{{ '%*d' % (10**10, 1) }}", "memory"),
    "wide format": ("{{ '{:>9999999999}'.format('a') }}", "memory"),
    "center": ("{{ 'a' | center(10**10) }}", "memory"),
    "power": ("{{ 7 ** (10**10) }}", "processor time"),
    "digits": ("{{ 10 ** (9999 + messages | length) }}", "refuses messages: Exceeds the limit"),
    "indent": ("{{ ('a\n' * 10**6) | indent(10**4) }}", "processor time|memory"),
    "doubled text": (_DOUBLED + "{% endfor %}{{ ns.a }}", "processor time|memory"),
    "long text": ("{{ 'a' * 2**23 }}", "a result of more than 4 MiB"),
    "endless macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "deep value": (
        "{% set n = namespace(a=[]) %}{% for i in range(9999) %}{% set n.a = [n.a] %}{% endfor %}"
        "{{ n.a | tojson }}",
        "nested too deeply",
    ),
    "words": (
        "{{ ('a ' * 10**7) | wordcount }}{{ ('a ' * 10**7) | title | urlize }}",
        "processor time|memory",
    ),
    "tokens": ("{% set x %}" * 3000 + "{% endset %}" * 3000, "nested too deeply"),
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", TEMPLATES)
def test_hostile_template_is_refused_within_the_limits(name):
    text, message = TEMPLATES[name]
    processes = PROCESSES if "processor time" in message else PATIENT_PROCESSES
    start = time.perf_counter()
    with pytest.raises(ValueError, match=rf"^gift.jinja .*({message})") as raised:
        ChatTemplate(text, "gift.jinja", {}, processes=processes).render(CONVERSATIONS[1])
    assert "\n" not in str(raised.value)
    assert time.perf_counter() - start < 20  # other processes may take the cores
    # The next template is rendered.
    good = ChatTemplate("{{ messages | length }}", "x.jinja", {}, processes=processes)
    assert good.render(CONVERSATIONS[0]) == "5"


@pytest.mark.parametrize("text", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_training_has_no_chance(text):
    with pytest.raises(ValueError, match=r"depend on chance.*data\.chat_template"):
        ChatTemplate(text, "x.jinja", {}).render(CONVERSATIONS[1])
    assert ChatTemplate(text, "x.jinja", {}, is_repeatable=False).render(CONVERSATIONS[1])


@pytest.mark.thorough
def test_slow_conversation_is_named_and_others_are_not_lost():
    """A batch that exceeds the limits is rendered line by line, up to the line that does."""
    text = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{% if messages[0].content == 'slow' %}" + _LOOPS + "{% endif %}"
    )
    template = ChatTemplate(text, "x.jinja", {}, processes=PROCESSES)
    dialogues = [
        Dialogue([{"role": "user", "content": each}]) for each in ("a", "b", "slow", "d", "slow")
    ]
    *found, error = template.learned_of_all(dialogues)
    assert [each.text for each in found if isinstance(each, Rendered)] == ["a", "b"]
    assert isinstance(error, ValueError) and "processor time" in str(error)


def test_namespaces_have_no_names_with_a_meaning_in_python():
    """As in `transformers`."""
    for text in ("{{ namespace(__class__=1) }}", "{% set n = namespace() %}{% set n._a = 1 %}"):
        with pytest.raises(ValueError, match=r"refuses messages: a namespace must not"):
            ChatTemplate(text, "x.jinja", {}).render([])
    text = "{% set n = namespace(a=1) %}{% set n.b = dict(c=2) %}{{ n.a }}{{ n.b }}{{ dict() }}"
    assert ChatTemplate(text, "x.jinja", {}).render([]) == "1{'c': 2}{}"


@pytest.mark.parametrize("text", ["\ud800", "{{ '\\ud800' }}"])
def test_template_with_half_a_character_is_refused(text):
    with pytest.raises(ValueError, match=r"x\.jinja.* lone surrogate"):
        ChatTemplate(text, "x.jinja", {}).learned(Dialogue(CONVERSATIONS[1][:1]))
