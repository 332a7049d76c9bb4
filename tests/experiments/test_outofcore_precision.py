"""Half precision beside float32: what is trained, what it takes, and what is claimed."""

import pytest
import torch
from made import FAILED
from repro.experiments.outofcore.settings import HALF_MEASURED
from test_outofcore_settings import (
    PAPER,
    World,
    checked,
    is_hollow,
    judged,
    nothing,
    panels,
    table,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from repro.experiments.outofcore import building, settings
from repro.experiments.outofcore.modelled import trace_at
from repro.outofcore import OutOfCore, record

TOY = {"model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": [8, 8]}
PLAYERS = settings.MODELS["smoke"][settings.PIX2PIXHD]
# What makes each claim fail.
WRONG = {
    "speed_kept": {"relative": {("half", "schedule_va"): 0.5}},
    "keeps_as_much_here": {"relative": {("half", "schedule_va"): 0.5}},
}


def word(key: str, world: World) -> str:
    return judged(f"precision/{key}", world).word


class TestClaims:
    def test_every_claim_is_tried(self):
        assert list(PAPER.artefacts["precision"].exhibit.claims) == list(WRONG)

    @pytest.mark.parametrize("key", WRONG)
    def test_right_and_wrong(self, key):
        assert word(key, World()) == "reproduced"
        assert word(key, World(**WRONG[key])) == "not reproduced"
        for rules in ({"places": ()}, {"status": {(): FAILED}}):
            assert word(key, World(**rules)) == "not run"

    def test_on_a_gpu_nothing_in_core_is_timed_beside(self):
        assert word("keeps_as_much_here", World("paper")) == "not run"


class TestChecks:
    @pytest.mark.parametrize(
        ("words", "wrong"),
        [
            ("Simulated allocators", {"reach": {("half",): 1}}),
            ("Simulated allocators", {"reach": {("half", "schedule_va"): "lms"}}),
            ("moves fewer bytes", {"moved": {("half",): 200}}),
        ],
    )
    def test_right_and_wrong(self, words, wrong):
        assert checked("precision", World(), words)["holds"] == "yes"
        assert checked("precision", World(**wrong), words)["holds"] == "NO"
        for rules in ({"places": ()}, {"status": {(): FAILED}}):
            assert checked("precision", World(**rules), words)["holds"] == "not run"

    def test_bytes_on_a_gpu_and_of_one_precision_alone(self):
        words = "moves fewer bytes"
        assert checked("precision", World("paper"), words)["holds"] == "yes"
        alone = World(status={(HALF_MEASURED,): None})
        assert checked("precision", alone, words)["holds"] == "not run"


def test_table_and_figure():
    rows = table("precision", World())
    largest = {row["precision"]: row for row in rows if row["batch"] == "largest"}
    assert list(largest) == ["float32", "bfloat16"]  # float16's on accelerators alone
    assert largest["float32"]["LMS"] == "N = 928" and largest["bfloat16"]["LMS"] == "N = 1856"
    assert [row["batch"] for row in rows[2:]] == [*settings.HALF_BATCHES, 32, 32]
    shown = panels("precision", World())
    assert all("SIMULATED V100" in title for title in shown)
    sizes, speeds = shown.values()
    assert is_hollow(sizes, "paper, float32") and is_hollow(speeds, "paper, float32")
    told = [text.get_text().strip() for text in sizes.texts]
    assert "float32: 928" in told and "bfloat16: 1,856" in told
    assert not table("precision", nothing)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses_and_weights(config, budget):
    """Return the trained weights, swapped within a budget where one is given."""
    seen: list[torch.Tensor] = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.extend(p.detach().clone() for p in parameters(optimizer))
    )
    try:
        step = building.training_step(config, "cpu")
        if budget is None:
            for _ in range(3):
                step()
        else:
            with OutOfCore(budget, window_bytes=None, device="cpu") as block:
                for _ in range(3):
                    step()
            assert block.statistics.bytes_out and block.statistics.peak_bytes <= budget
    finally:
        handle.remove()
    return seen


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("precision", settings.HALVES)
    @pytest.mark.parametrize(
        "toy",
        [
            pytest.param(TOY, id="classes"),
            pytest.param(PLAYERS, id="players", marks=pytest.mark.thorough),
        ],
    )
    def test_swapping_changes_no_bit(self, toy, precision, one_thread):
        config = toy | {"precision": precision, "batch": 4}
        trace = trace_at(config, 4)
        budget = (trace.smallest_budget + trace.peak_bytes) // 2
        whole, swapped = (losses_and_weights(config, limit) for limit in (None, budget))
        assert len(whole) == len(swapped) > 10
        assert all(torch.equal(a, b) for a, b in zip(whole, swapped, strict=True))
        assert all(weight.dtype == torch.float32 for weight in whole)
        assert all(weight.isfinite().all() for weight in whole)

    def test_float16s_loss_is_scaled_and_its_gradients_are_not(self, one_thread):
        gradients = {}
        for precision in ("float32", *settings.HALVES):
            seen: list[torch.Tensor] = []
            handle = register_optimizer_step_pre_hook(
                lambda optimizer, *_, seen=seen: seen.extend(
                    p.grad.clone() for p in parameters(optimizer)
                )
            )
            try:
                building.training_step(TOY | {"precision": precision, "batch": 8}, "cpu")()
            finally:
                handle.remove()
            gradients[precision] = torch.cat([gradient.flatten() for gradient in seen])
        for precision in settings.HALVES:
            off = (gradients[precision] - gradients["float32"]).norm()
            assert 0 < off < 0.2 * gradients["float32"].norm()

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", settings.HALVES)
    def test_a_trace_without_values_is_that_of_training(self, precision, one_thread):
        config = TOY | {"precision": precision}
        step = building.training_step(config | {"batch": 6}, "cpu")
        computed = record(step, warmup=2, in_parts=False)
        extended = trace_at(config, 6)
        assert extended.functions == computed.functions
        # Of batch norm's own statistics torch foretells half of the bytes that a CPU makes.
        assert extended.peak_bytes == pytest.approx(computed.peak_bytes, rel=0.002)
        assert extended.peak_bytes < 0.85 * trace_at(TOY, 6).peak_bytes

    def test_an_unknown_precision_is_refused(self):
        with pytest.raises(ValueError, match=r"'half': give one of 'float32', 'bfloat16'"):
            building.training_step(TOY | {"precision": "half", "batch": 2}, "cpu")

    def test_float32_whatever_torchs_default_is(self):
        torch.set_default_dtype(torch.float64)
        try:
            losses = losses_and_weights(TOY | {"batch": 2}, None)
        finally:
            torch.set_default_dtype(torch.float32)
        assert {weight.dtype for weight in losses} == {torch.float32}
