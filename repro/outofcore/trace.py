"""A recorded iteration: its function-sequence, as JSON, and the host memory that it needs."""

import json
from contextlib import suppress
from pathlib import Path

from repro.outofcore.baselines import DoesNotFit, on_demand
from repro.outofcore.host import SLAB_BYTES
from repro.outofcore.schedule import plan_swaps
from repro.outofcore.sequence import Function, FunctionSequence, TraceError


class Trace(FunctionSequence):
    """The function-sequence of one iteration; the arguments are those of `FunctionSequence`."""

    def host_bytes(self, budget_bytes: int) -> int:
        """Return the bytes of host memory that swapping within a budget takes, in whole slabs.

        They are the larger of the default schedule's and of demand paging's, by which the first
        iteration runs, with all that no function uses; 0 where there is room for all.

        Raises:
            BudgetTooSmall: One function alone needs more than the budget.
        """
        needed = plan_swaps(self, budget_bytes).host_bytes
        with suppress(DoesNotFit):  # where its iterations never repeat
            needed = max(needed, on_demand(self, budget_bytes).host_bytes)
        if self.peak_bytes > budget_bytes:
            needed += self.held_bytes
        return -(-needed // SLAB_BYTES) * SLAB_BYTES

    def to_json(self) -> str:
        """Return the trace as JSON text, which `from_json` reads."""
        functions = [[f.name, list(f.inputs), list(f.outputs)] for f in self.functions]
        more = {"sizes": dict(self.sizes), "kinds": dict(self.kinds), "deaths": dict(self.deaths)}
        return json.dumps({"functions": functions, **more})

    @classmethod
    def from_json(cls, text: str | Path) -> "Trace":
        """Read a trace from JSON text, or from a file by its Path.

        The text is an object with ``functions``, a list of ``[name, inputs, outputs]``, and
        ``sizes``; ``kinds`` and ``deaths`` may be left out.

        Raises:
            TraceError: It is no JSON, or not such an object.
        """
        source = text.read_text(encoding="utf-8") if isinstance(text, Path) else text
        try:
            data = json.loads(source)
            functions = tuple(
                Function(name, inputs, outputs) for name, inputs, outputs in data["functions"]
            )
            return cls(functions, data["sizes"], data.get("kinds", {}), data.get("deaths", {}))
        except TraceError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(
                f"this is no trace ({type(error).__name__}: {error}): give an object with "
                '"functions": [[name, inputs, outputs], ...] and "sizes": {variable: bytes}'
            ) from error
