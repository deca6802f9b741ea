"""Nested state goes to JSON and comes back exactly, or is refused with the path of what cannot."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.tree import decode, encode
from elastictrain.errors import SnapshotDamagedError, StateValueError


class FakeTensor:
    """Equal by identity, as a key to what was put in."""


def is_tensor(value: object) -> bool:
    return isinstance(value, FakeTensor)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(allow_nan=False),
    st.text(),
    st.text().map(lambda text: "$" + text),
    st.binary(max_size=9),
    st.builds(FakeTensor),
)
KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=3)),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$"]), inner, max_size=1),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal in value, type and order, at every level."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return a == b


@given(TREES)
def test_what_is_encoded_comes_back(tree):
    encoded, tensors = encode(tree, is_tensor, "task.state")
    text = json.dumps(encoded, allow_nan=False)
    assert same(decode(json.loads(text), tensors), tree)
    assert all(key.startswith("task.state") for key in tensors)


def test_numbers_that_json_has_no_word_for():
    encoded, _ = encode([math.nan, math.inf, -math.inf, -0.0], is_tensor)
    assert encoded == [{"$float": "nan"}, {"$float": "inf"}, {"$float": "-inf"}, -0.0]
    nan, *rest = decode(json.loads(json.dumps(encoded, allow_nan=False)), {})
    assert math.isnan(nan)
    assert rest[:2] == [math.inf, -math.inf]
    assert math.copysign(1, rest[2]) == -1


def test_tensors_are_named_by_their_path_and_stored_once():
    a, b = FakeTensor(), FakeTensor()
    encoded, tensors = encode({"x": [a, (b, a)], 3: b}, is_tensor, "s")
    assert tensors == {"s['x'][0]": a, "s['x'][1][0]": b}
    assert decode(encoded, tensors) == {"x": [a, (b, a)], 3: b}


class Foo: ...


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"a": [0, 1, 2, {"foo": {1, 2}}]}, "state['a'][3]['foo']", "set"),
        ([lambda: None], "state[0]", "function"),
        ({"x": Foo()}, "state['x']", "Foo"),
        ((1, np.float64(0.5)), "state[1]", "numpy.float64"),
        ({"n": np.zeros(2)}, "state['n']", "numpy.ndarray"),
        ({"c": 1j}, "state['c']", "complex"),
        ({frozenset(): 1}, "state has a key", "frozenset"),
        ({(1, Foo()): 1}, "state has a key", "Foo"),
    ],
)
def test_anything_else_is_refused_with_path_and_type(value, path, kind):
    with pytest.raises(StateValueError) as refused:
        encode(value, is_tensor)
    assert path in str(refused.value)
    assert kind in str(refused.value)


def test_a_list_within_itself_is_refused():
    loop: list[object] = [1]
    loop.append({"again": loop})
    with pytest.raises(StateValueError, match=r"state\[1\]\['again'\] contains itself"):
        encode(loop, is_tensor)


def test_the_same_list_twice_is_fine():
    inner = [1]
    assert encode([inner, inner], is_tensor)[0] == [[1], [1]]


def test_a_missing_tensor_and_an_unknown_tag_are_damage():
    with pytest.raises(SnapshotDamagedError, match="the tensor k is missing"):
        decode({"$tensor": "k"}, {})
    with pytest.raises(SnapshotDamagedError, match="unknown kind"):
        decode({"$other": 1}, {})
