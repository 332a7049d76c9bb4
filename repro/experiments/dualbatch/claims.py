"""What the paper says about dual-batch learning and cyclic progressive learning."""

from functools import partial

from repro.experiments.design import Claim
from repro.experiments.dualbatch import checks
from repro.experiments.dualbatch.grids import CIFAR, IMAGENET

FIGURE3 = (
    Claim("The time of a batch is a line of its size", "Section 3.2", checks.check_linear),
    Claim(
        "TensorFlow's times are more predictable than PyTorch's",
        "Section 3.2",
        checks.check_predictable,
    ),
)
FIGURE4 = (
    Claim("An epoch takes less time with larger batches", "Section 3.2", checks.check_falls),
    Claim(
        "Equation 2 predicts the time of an epoch in TensorFlow across all batch sizes (as we put "
        "it: to Table 4's 3.5 %)",
        "Section 3.2",
        checks.check_raw_predictions,
    ),
)
TABLE2 = (
    Claim("Equations 4 to 8 give the values of Table 2", "Table 2", checks.check_table2),
    Claim(
        "The authors' raw measurements lead to Table 2's batch sizes (our question, not the "
        "paper's)",
        "none",
        checks.check_raw_plan,
    ),
)
TABLE3 = (
    Claim(
        "The factor d_S/d_L gains accuracy in all cases over none",
        "Section 5.1.2",
        partial(checks.check_factor, scheme="linear"),
    ),
    Claim(
        "The factor √(d_S/d_L) gains accuracy over none with two and three small-batch workers",
        "Section 5.1.2",
        partial(checks.check_factor, scheme="sqrt", numbers=(2, 3)),
    ),
    Claim(
        "√(d_S/d_L) is less accurate than d_S/d_L with one and with three small-batch workers",
        "Section 5.1.2",
        checks.check_root_is_worse,
    ),
)
TABLE4 = (
    Claim("The time of a worker's share is predicted to 3.5 %", "Table 4", checks.check_shares),
)
TABLE5 = (
    Claim(
        "Two small-batch workers or more gain accuracy (the paper 2.3 to 2.9 points)",
        "Section 5.1.3",
        checks.check_gain,
    ),
    Claim(
        "One small-batch worker gains less accuracy than three",
        "Section 5.1.3",
        checks.check_one_is_too_few,
    ),
    Claim(
        "Three small-batch workers end with the highest accuracy",
        "Section 5.1.3",
        checks.check_three_best,
    ),
    Claim(
        "One small-batch worker ends with the lowest test loss",
        "Section 5.1.3",
        checks.check_lowest_loss,
    ),
    Claim(
        "The extra training time is k (by the virtual clock, which has the plan's own a and b: "
        "only rounding and short last batches can differ)",
        "Section 3.3",
        checks.check_extra_time,
    ),
)
TABLE6 = (Claim("Equations 4 to 8 give the values of Table 6", "Table 6", checks.check_table6),)
TABLE7 = (
    Claim("The schedule is Table 7's", "Table 7", partial(checks.check_schedule, table="table7")),
)
TABLE8 = (
    Claim(
        "The hybrid scheme is more accurate than dual-batch learning in all cases",
        "Section 5.2.2",
        checks.check_hybrid_accuracy,
    ),
    Claim(
        "The hybrid scheme gains accuracy over the baseline (the paper 3.3 points)",
        "Abstract",
        checks.check_hybrid_gain,
    ),
    Claim(
        "The hybrid scheme takes 10.1 % less time than dual-batch learning",
        "Section 5.2.2",
        partial(checks.check_saving, role=CIFAR),
    ),
)
TABLE9 = (
    Claim("The schedule is Table 9's", "Table 9", partial(checks.check_schedule, table="table9")),
)
TABLE10 = (
    Claim(
        "The hybrid scheme takes 34.8 % less time than dual-batch learning on ImageNet",
        "Section 5.2.3",
        partial(checks.check_saving, role=IMAGENET),
    ),
    Claim(
        "With more than two small-batch workers accuracy on ImageNet is the baseline's",
        "Section 5.2.3",
        checks.check_imagenet_accuracy,
    ),
)
FIGURE13 = (
    Claim(
        "The largest batch size that fits is predicted to 3.5 % (CIFAR) and 3.7 % (ImageNet)",
        "Section 5.3",
        checks.check_memory,
    ),
)
ENGINES = (
    Claim(
        "Real processes and the simulation give the same weights for the same order of commits "
        "(our question, not the paper's)",
        "none",
        checks.check_engines,
    ),
)
