"""What `doctor` runs of the study of all five: nothing that the five do not run themselves."""

from collections.abc import Sequence

from repro.experiments.selftests import SelfTest

TESTS: Sequence[SelfTest] = ()
