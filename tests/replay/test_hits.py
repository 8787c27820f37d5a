"""Each counter equals its definition computed at one stroke."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.hits import DEFAULT, MEANINGS, UNITS, make_counter
from tests.replay.replay_builders import rate_of

DEFINITIONS = tuple(MEANINGS)


@st.composite
def rows(draw):
    """Draw (cached, pages, input_length) of a ceil trace with pages of 4 tokens."""
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=12))
    return [(draw(st.integers(0, -(-n // 4))), -(-n // 4), n) for n in lengths]


@pytest.mark.parametrize("definition", DEFINITIONS)
@settings(max_examples=50, deadline=None)
@given(rows=rows())
def test_a_counter_equals_its_definition(definition, rows):
    counter = make_counter(definition, 4)
    for row in rows:
        counter.record(*row)

    assert counter.count().rate == pytest.approx(float(rate_of(definition, rows, 4)), abs=2e-9)


def test_a_repeated_prompt_tells_the_definitions_apart():
    counts = {}
    for definition in DEFINITIONS:
        counter = make_counter(definition, 4)
        for row in [(0, 3, 10), (3, 3, 10)]:
            counter.record(*row)
        count = counter.count()
        counts[definition] = (count.hits, count.total)

    assert counts == {
        "D1": (3, 6),
        "D2": (10, 20),
        "D3": (8, 20),
        "D4": (10**9, 2 * 10**9),
        "D5": (10, 10),
    }


def test_an_empty_trace_has_rate_zero():
    assert [make_counter(name, 4).count().rate for name in DEFINITIONS] == [0.0] * 5


def test_every_definition_has_a_meaning_and_a_unit():
    assert tuple(UNITS) == DEFINITIONS
    assert DEFAULT in MEANINGS
