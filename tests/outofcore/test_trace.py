import json
import random

import pytest
from traces import chain, random_trace

from repro.outofcore import Function, Trace, TraceError


def two() -> Trace:
    return Trace(
        (Function("f", ("w",), ("a",)), Function("g", ("w", "a"), ("w",))), {"w": 5, "a": 7}
    )


class TestFunction:
    def test_a_variable_counts_once(self):
        function = Function("f", ("a", "b", "a"), ("b", "c", "c"))
        assert function.inputs == ("a", "b")
        assert function.outputs == ("b", "c")
        assert function.variables == ("a", "b", "c")

    def test_a_text_is_no_sequence_of_names(self):
        with pytest.raises(TraceError, match="inputs of f is the text 'abc'"):
            Function("f", "abc")


class TestTrace:
    def test_what_is_first_read_persists(self):
        assert two().persistent == {"w"}
        assert two().lifetimes == {"a": (0, 2)}

    def test_a_death_makes_a_given_variable_of_it(self):
        trace = Trace(two().functions, two().sizes, deaths={"w": 2})
        assert trace.persistent == frozenset()
        assert trace.lifetimes == {"w": (0, 2), "a": (0, 2)}

    def test_variable_sequence(self):
        assert two().variables == ["w", "a", "w", "a"]

    def test_bytes_by_hand(self):
        # f_0: w and the new a; f_1: w and a.
        assert two().needs_bytes == [12, 12]
        assert two().live_bytes == [12, 12]
        chained = chain(2, width=10, weight=3)
        # f_0: a0, a1, both w; f_1: and a2; loss: and g2; backward 1: g1, d1, without a2 and g2
        # only after it; backward 0: a0, a1 is gone, g1, g0, d0, d1; updates: a0, w, d.
        assert chained.live_bytes == [26, 36, 46, 49, 42, 22, 19]
        assert chained.peak_bytes == 49

    def test_a_death_in_the_next_iteration(self):
        functions = (Function("f", (), ("a",)), Function("g", ("a",), ()), Function("h"))
        trace = Trace(functions, {"a": 4}, deaths={"a": 3})
        assert trace.live_bytes == [4, 4, 4]
        functions = (Function("h"), Function("f", (), ("a",)), Function("g", ("a",), ()))
        trace = Trace(functions, {"a": 4}, deaths={"a": 4})
        # The one of the iteration before is there until function 1, which makes the next.
        assert trace.live_bytes == [4, 4, 4]

    def test_live_bytes_by_counting(self):
        rng = random.Random(3)
        for _ in range(300):
            trace = random_trace(rng)
            n = len(trace.functions)
            expected = []
            for i in range(n):
                alive = set(trace.persistent)
                for name, (birth, death) in trace.lifetimes.items():
                    if birth <= i < death or birth <= i + n < death:
                        alive.add(name)
                expected.append(sum(trace.sizes[name] for name in alive))
            assert trace.live_bytes == expected

    def test_bytes_by_kind(self):
        trace = Trace(two().functions, two().sizes, {"w": "parameter"})
        assert trace.bytes_by_kind() == {"parameter": 5, "unknown": 7}


class TestJson:
    def test_there_and_back(self):
        rng = random.Random(0)
        for _ in range(50):
            trace = random_trace(rng)
            assert Trace.from_json(trace.to_json()) == trace

    def test_objects_and_files(self, tmp_path):
        text = json.dumps(
            {
                "functions": [{"name": "f", "inputs": [], "outputs": ["a"]}],
                "sizes": {"a": 3},
            }
        )
        (tmp_path / "trace.json").write_text(text)
        assert Trace.from_json(tmp_path / "trace.json") == Trace(
            (Function("f", (), ("a",)),), {"a": 3}
        )

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"functions": [["f"]], "sizes": {}}', '{"functions": 3}']
    )
    def test_what_is_no_trace(self, text):
        with pytest.raises(TraceError):
            Trace.from_json(text)


class TestErrors:
    def test_no_function(self):
        with pytest.raises(TraceError, match="at least one function"):
            Trace((), {})

    def test_a_missing_size(self):
        with pytest.raises(TraceError, match="'a' has no size"):
            Trace((Function("f", (), ("a",)),), {})

    @pytest.mark.parametrize("size", [-1, 1.5, True])
    def test_a_size_that_is_none(self, size):
        with pytest.raises(TraceError, match="the size of 'a'"):
            Trace((Function("f", (), ("a",)),), {"a": size})

    def test_an_unknown_kind(self):
        with pytest.raises(TraceError, match="choose one of parameter"):
            Trace((Function("f", (), ("a",)),), {"a": 1}, {"a": "weight"})

    @pytest.mark.parametrize("death", [0, 3, 1.0])
    def test_a_death_out_of_bounds(self, death):
        functions = (Function("f", (), ("a",)), Function("g"))
        with pytest.raises(TraceError, match="give 1 to 2"):
            Trace(functions, {"a": 1}, deaths={"a": death})

    def test_a_death_of_nobody(self):
        with pytest.raises(TraceError, match="no function uses it"):
            Trace((Function("f"),), {"a": 1}, deaths={"a": 1})
