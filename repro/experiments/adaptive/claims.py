"""What the paper says about θ-adaptive batch sizes."""

from functools import partial

from repro.experiments.adaptive import checks
from repro.experiments.adaptive.grids import CIFAR, DIV2K, PHANTOM
from repro.experiments.design import Claim

_MODEL = "The model of strong scaling predicts steps of two processes (our question)"


def _scaling(task: str) -> tuple[Claim, ...]:
    return (
        Claim(
            "θ-adaptive training scales further than the other two, whose speed-ups predict its "
            "own to 20 % (SIMULATED)",
            "Section VI",
            partial(checks.check_scaling, task=task),
        ),
        Claim(_MODEL, "none", partial(checks.check_model, task=task)),
    )


def _restoration(task: str) -> tuple[Claim, ...]:
    return (
        Claim(
            "θ-adaptive training ends within 0.1 dB of the best fixed batch",
            "Section VI-A",
            partial(checks.check_within, task=task),
        ),
        Claim(
            "Linear scaling ends with a lower PSNR",
            "Section VI-A",
            partial(checks.check_loses, task=task, strategy="linear"),
        ),
        Claim(
            "An adaptive batch at a fixed rate ends within 0.1 dB of the best fixed batch",
            "Section VI-A",
            partial(checks.check_within, task=task, strategy="scheduled"),
        ),
        Claim(
            "Gradients are averaged less often, by the factor that the schedule implies",
            "Section III-B",
            partial(checks.check_fewer_updates, task=task),
        ),
        Claim(
            "θ-adaptive training converges in about as many epochs as the best fixed batch",
            "Section VI-A",
            partial(checks.check_epochs, task=task),
        ),
    )


FIGURE1 = (
    Claim(
        "Batch sizes above 64 end with a significantly lower PSNR",
        "Figure 1",
        checks.check_large_is_worse,
    ),
    Claim("Larger batches converge more slowly, in epochs", "Section I", checks.check_slower),
)
FIGURE2 = (
    Claim("All batch sizes end with almost the same cost", "Figure 2", checks.check_same_cost),
    Claim("The higher θ, the lower the accuracy", "Figure 2", checks.check_sharpness),
    Claim(
        "θ of a larger batch peaks later",
        "Section III-D",
        partial(checks.check_later_peak, task=CIFAR),
    ),
    Claim(
        "θ peaks, and then K is found",
        "Section III-D",
        partial(checks.check_interval, task=CIFAR),
    ),
)
FIGURE3 = (
    Claim(
        "After the first decay θ of the proposed method does not rise, others' do",
        "Section III-E",
        checks.check_flat_after_decay,
    ),
)
STABLE = (
    Claim(
        "Gradient norms give B_s = 256, 64 and 32 (at scale)",
        "Sections III-D, VI",
        checks.check_stable,
    ),
)
FIGURE4, FIGURE5 = _restoration(DIV2K), _restoration(PHANTOM)
FIGURE6 = (
    Claim(
        "θ peaks, and then K is found (DIV2K)",
        "Section VI-A",
        partial(checks.check_interval, task=DIV2K),
    ),
    Claim(
        "θ peaks, and then K is found (Phantom)",
        "Section VI-A",
        partial(checks.check_interval, task=PHANTOM),
    ),
    Claim(
        "θ of a larger batch peaks later (DIV2K)",
        "Section III-D",
        partial(checks.check_later_peak, task=DIV2K),
    ),
    Claim(
        "θ of a larger batch peaks later (Phantom)",
        "Section III-D",
        partial(checks.check_later_peak, task=PHANTOM),
    ),
)
FIGURE7, FIGURE8, FIGURE11 = _scaling(DIV2K), _scaling(PHANTOM), _scaling(CIFAR)
BREAKDOWN = (
    Claim(
        "Blocked time becomes significant at 128 nodes and more at 256 (SIMULATED)",
        "Section VI-B",
        checks.check_blocked,
    ),
    Claim(
        "Communication takes as long as computation at 128 nodes (SIMULATED)",
        "Section VI-B",
        checks.check_communication,
    ),
    Claim(
        "Computation at B_m does not fall linearly from 64 nodes on (SIMULATED)",
        "Section VI-B",
        checks.check_not_linear,
    ),
)
FIGURE9 = (
    Claim(
        "A step of few samples uses the hardware badly",
        "Section VI-B",
        checks.check_inefficiency,
    ),
    Claim(
        "All-to-all and allgather block less than an allreduce",
        "Section IV-B",
        checks.check_averaging,
    ),
    Claim(
        "The three ways of averaging give the same weights (our question)",
        "none",
        checks.check_same_weights,
    ),
)
FIGURE10 = (
    Claim(
        "θ-adaptive training ends less than 1 % below the best fixed batch",
        "Section VI-C",
        partial(checks.check_within, task=CIFAR),
    ),
    Claim(
        "Linear scaling loses accuracy",
        "Section VI-C",
        partial(checks.check_loses, task=CIFAR, strategy="linear"),
    ),
    Claim(
        "An adaptive batch at a fixed rate loses accuracy",
        "Section VI-C",
        partial(checks.check_loses, task=CIFAR, strategy="scheduled"),
    ),
    Claim(
        "SGD at 2048 without scaling loses accuracy (46.29 against 90.78 %)",
        "Section III-E",
        partial(checks.check_loses, task=CIFAR, strategy="large"),
    ),
    Claim(
        "Gradients are averaged less often, by the factor that the schedule implies",
        "Section III-B",
        partial(checks.check_fewer_updates, task=CIFAR),
    ),
)
