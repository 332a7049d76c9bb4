"""What the paper says about out-of-core training."""

from repro.experiments.design import Claim
from repro.experiments.outofcore import checks

TABLE1 = (
    Claim(
        "With chunks, ResNet-50 trains at 7.5 times the batch size in core, at 55 % of its speed",
        "Abstract",
        checks.check_largest,
    ),
    Claim(
        "Scheduling alone keeps 68 % of the speed at 4.9 times the batch size (928)",
        "Section 5.1",
        checks.check_alone,
    ),
    Claim(
        "The schedule is faster than LMS (as we put it: than the fastest of LMS's pairs of "
        "distances and budgets that torch's allocator serves, on the same trace)",
        "Section 5.1",
        checks.check_over_lms,
    ),
    Claim(
        "With chunks, a 1.55 times larger network trains than with LMS",
        "Abstract",
        checks.check_reach_over_lms,
    ),
    Claim(
        "With chunks, a 1.55 times larger ResNet-50 trains than without (1440 over 928)",
        "Section 5.1",
        checks.check_reach,
    ),
    Claim(
        "Scheduling alone trains nothing beyond 4.9 times the batch size in core",
        "Section 5.1",
        checks.check_end_of_alone,
    ),
    Claim(
        "With chunks it is faster at 4.9 times the batch size, for the budget can be larger",
        "Section 5.1",
        checks.check_faster_with_va,
    ),
    Claim(
        "Larger batch sizes train than by other means of torch (our question, not the paper's)",
        "none",
        checks.check_peers,
    ),
)
FIGURE3 = (
    Claim(
        "Without chunks, fragmentation nearly halves the budget that can be used at 928",
        "Section 5.1",
        checks.check_fragmentation,
    ),
    Claim("With chunks, use stays close to the budget", "Section 5.1", checks.check_close),
    Claim(
        "What chunks lose inside shrinks as the network grows", "Section 4", checks.check_internal
    ),
)
FIGURE4 = (
    Claim(
        "Scheduling alone trains 1.5, 4 and 5.3 times the batch size in core",
        "Section 5.2",
        checks.check_growth,
    ),
    Claim(
        "Chunks train 1.5 to 2 times larger than scheduling alone",
        "Section 5.2",
        checks.check_growth_with_va,
    ),
    Claim("Chunks cost little speed", "Section 5.2", checks.check_cost_of_chunks),
    Claim("Pix2PixHD gains speed beyond the core", "Section 5.2", checks.check_gain),
)
FIGURE5 = (
    Claim(
        "With chunks, memory is almost constant whatever the batch size (beyond the core; budgets "
        "are as large as the limit allows)",
        "Section 5.2",
        checks.check_flat,
    ),
)
