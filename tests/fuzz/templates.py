"""Chat templates for the fuzz tests: valid ones, damaged ones, and hostile programs."""

import re
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from data.text.chat import rendering
from data.text.chat.template import ROLES, Dialogue, find_template
from tests.data.text.chat.test_chat import CONVERSATIONS, TEMPLATES
from tests.data.text.chat.test_chat_masks import PARTS
from tests.data.text.chat.test_chat_tools import CALLS, FUNCTIONS, TOOLS
from tests.fuzz.mutations import damaged_bytes
from untrusted.limited import LimitedProcesses
from untrusted.limited_process import Limits

#: As in data preparation and in the server, but for many inputs.
_PROCESSES = LimitedProcesses(rendering.render, Limits(cpu_s=0.1, memory_bytes=2**28))
_VALID = [each.encode() for each in (ROLES, *TEMPLATES.values(), TOOLS, PARTS)]
_TAG = re.compile(r"({%.*?%}|{{.*?}})", re.DOTALL)

_VALUES = r"""
    messages messages[0] messages[0].content messages[-1]['role'] tools bos_token loop none true 1
    -1 0.5 10**9 'a' 'é\ud800' [1] {} {'a':[]} range(99999) namespace(a=1) dict(a=1)
    cycler('a','b') joiner('-') lipsum self caller x undefined_name messages.append
    messages.__class__ ''.format
""".split()
_FILTERS = """
    abs attr('__class__') batch(10**8,1)|list capitalize center(10**9) count default('a') dictsort
    escape filesizeformat first float forceescape format(10**9,'a') groupby(0) indent(10**8) int
    items join('a'*10**6) last length list lower map('upper')|list max min pprint random
    reject('none')|list replace('','a'*10**5) reverse|list round(10**9) safe select('defined')|list
    slice(10**8)|list sort string striptags sum sum(start=[]) title tojson tojson(indent=10**8) trim
    truncate(10**9) unique upper urlencode urlize wordcount wordwrap(1) xmlattr
""".split()
_OPERATORS = ("+", "-", "*", "**", "//", "%", "~", "==", "<", "in", "and", "if x else", "is sameas")
_CALLS_OF = ("split('')", "upper()", "zfill(10**9)", "join(messages)", "format(*range(99999))")
_BLOCKS = (
    ("{% if 1 %}", "{% endif %}"),
    ("{% if messages %}", "{% else %}x{% endif %}"),
    ("{% for x in messages %}", "{% endfor %}"),
    ("{% for x in range(99999) %}", "{% endfor %}"),
    ("{% for x in [[[1]]] recursive %}{{ loop(x) }}", "{% endfor %}"),
    ("{% set x %}", "{% endset %}"),
    ("{% macro m(x=1) %}", "{{ m() }}{% endmacro %}{{ m(2) }}"),
    ("{% generation %}", "{% endgeneration %}"),
    ("{% filter upper %}", "{% endfilter %}"),
    ("{% call m() %}", "{% endcall %}"),
    ("{% raw %}", "{% endraw %}"),
    ("{% block b %}", "{% endblock %}"),
    ("{% include 'a' %}{% import 'b' as c %}{% extends 'd' %}", ""),
    ("{% set x = x + x %}{% break %}", ""),
    ("{{", "}}"),
    ("{# ", ""),
)


def write_template(directory: Path) -> None:
    """Write a valid chat template."""
    (directory / "chat_template.jinja").write_text(TOOLS)


def render_template(directory: Path) -> None:
    """Render conversations as in the server and as in training."""
    found = find_template("", directory, "</s>", is_repeatable=False, processes=_PROCESSES)
    assert found is not None
    found.render(CONVERSATIONS[0], add_generation_prompt=True)
    trained = find_template("", directory, "</s>", processes=_PROCESSES)
    assert trained is not None
    for dialogue in (Dialogue(CONVERSATIONS[0], num_given=3), Dialogue(CALLS, tools=FUNCTIONS)):
        result = trained.learned(dialogue)
        assert all(0 <= start <= stop <= len(result.text) for start, stop in result.spans)


def _expressions() -> st.SearchStrategy[str]:
    return st.recursive(
        st.sampled_from(_VALUES),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(_FILTERS)).map(lambda each: "({} | {})".format(*each)),
            st.tuples(inner, st.sampled_from(_CALLS_OF)).map(lambda each: "({}).{}".format(*each)),
            st.tuples(inner, st.sampled_from(_OPERATORS), inner).map(
                lambda each: "({} {} {})".format(*each)
            ),
        ),
        max_leaves=6,
    )


def _programs() -> st.SearchStrategy[str]:
    depths = st.sampled_from([1, 1, 1, 2, 3, 30, 300, 3000])
    return st.recursive(
        _expressions().map(lambda each: f"{{{{ {each} }}}}"),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("\n".join),
            st.tuples(st.sampled_from(_BLOCKS), depths, inner).map(
                lambda each: each[0][0] * each[1] + each[2] + each[0][1] * each[1]
            ),
        ),
        max_leaves=5,
    )


@st.composite
def _with_other_tags(draw: st.DrawFn) -> bytes:
    """Draw a valid template with some of its tags removed, repeated, exchanged or replaced."""
    parts = _TAG.split(draw(st.sampled_from(_VALID)).decode())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(parts) - 1))
        other = draw(st.sampled_from(parts))
        parts[place] = draw(
            st.sampled_from(["", parts[place] * 2, other])
            | st.just(parts[place] + other)
            | _programs()
        )
    return "".join(parts).encode("utf-8", "surrogatepass")


def damaged_template(contents: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw a damaged template, or a program that no tokenizer has."""
    programs = _programs().map(lambda each: each.encode("utf-8", "surrogatepass"))
    return _with_other_tags() | programs | damaged_bytes([*contents, *_VALID])
