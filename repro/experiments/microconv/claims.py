"""What the paper says about μ-cuDNN."""

from repro.experiments.design import Claim
from repro.experiments.microconv import checks

FIGURE1 = (
    Claim(
        "Fast undivided algorithms need more workspace than a small limit gives",
        "Section I",
        checks.check_larger_workspace,
    ),
)
FIGURE6 = (
    Claim("Divided configurations lie on the Pareto front", "Section III-C1", checks.check_front),
    Claim("Few configurations are desirable", "Section III-C1", checks.check_front_size),
)
FIGURE8 = (
    Claim(
        "Dividing makes DeepBench's layers faster at 64 MiB", "Section IV-A", checks.check_layers
    ),
    Claim("3×3 and 5×5 kernels gain", "Section IV-A", checks.check_kernel_sizes),
    Claim(
        "Dividing is faster than what the library does by itself (as we put it: than torch's own "
        "convolution of today, without a limit)",
        "Abstract",
        checks.check_left,
    ),
)
FIGURE9 = (
    Claim("With a moderate workspace, dividing is faster", "Section IV-B1", checks.check_moderate),
    Claim("With 8 MiB for each kernel, nothing is gained", "Section IV-B1", checks.check_small),
    Claim("With 512 MiB for each kernel, nothing is gained", "Section IV-B1", checks.check_ample),
    Claim(
        "Divided at 64 MiB takes a fraction of undivided's workspace at 512 MiB, for 4 % of time",
        "Section IV-B1",
        checks.check_memory,
    ),
    Claim("powerOfTwo is as good as all", "Section IV-B1", checks.check_policies),
)
FIGURE10 = (
    Claim("Dividing admits faster algorithms for conv2", "Section IV-B1", checks.check_conv2),
)
FIGURE11 = (
    Claim(
        "WD is faster than undivided WR with the same workspace in all",
        "Section IV-B2",
        checks.check_wd,
    ),
    Claim(
        "WD with 120 MiB is faster than undivided with 960 MiB",
        "Section IV-B2",
        checks.check_wd_saves,
    ),
    Claim(
        "ResNet-50 with WD is faster with half of undivided's workspace",
        "Section IV-B2",
        checks.check_wd_resnet,
    ),
)
FIGURE12 = (
    Claim(
        "WD gives conv2 and conv3 most of the workspace", "Section IV-B2", checks.check_assignment
    ),
)
FIGURE13 = (
    Claim("Unequal devices together beat one", "Section IV-C", checks.check_cluster),
    Claim("An even split wastes the faster device", "Section IV-C", checks.check_even),
)
TABLE5 = (
    Claim(
        "All three networks gain at 64 MiB",
        "Table V",
        checks.check_table5,
    ),
    Claim("Results do not change", "Section II", checks.check_accuracy),
)
OPTIMISATION = (
    Claim(
        "powerOfTwo takes far less time to tune than all",
        "Section IV-B1",
        checks.check_optimisation,
    ),
    Claim("The 0-1 programme is solved in practical time", "Section IV-B2", checks.check_solver),
)
