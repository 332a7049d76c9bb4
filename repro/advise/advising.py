"""All methods for one batch and one memory, ranked."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from repro.advise.measuring import SETTLING, STEPS, WARMUP, measured
from repro.advise.predicting import METHODS, Prediction, predict
from repro.advise.snippets import snippet
from repro.advise.speed import Speed, probe
from repro.advise.workload import AdviceError, Workload
from repro.measure import accelerator
from repro.measure.checks import is_whole
from repro.measure.datasheets import DEVICES, GIB
from repro.report import DASH

TITLES = {
    "undivided": "undivided",
    "accumulation": "gradient accumulation",
    "mbs": "Micro-Batch Streaming",
    "mbs_deferred": "MBS, deferred BatchNorm",
    "outofcore": "out-of-core, to host memory",
    "outofcore_file": "out-of-core, to a file",
    "checkpointing": "activation checkpointing",
    "save_on_cpu": "torch's save_on_cpu",
    "checkpointing_mbs": "checkpointing + MBS",
    "mbs_in_outofcore": "MBS in out-of-core",
}
CHANGES = (
    "In micro-batches BatchNorm normalises by its micro-batch. Gradient accumulation needs a loss "
    "that is a mean over samples; Micro-Batch Streaming refuses others, unless weights or "
    "two_pass=True are given (docs/losses.md). Checkpointing updates BatchNorm's running "
    "statistics twice. Otherwise each method computes the mini-batch's gradient."
)


@dataclass(frozen=True)
class Advice:
    """Predictions of all methods for a batch of a workload within a memory limit on a device.

    `grounds` is the source of the seconds. `rows` has a prediction for each method: those that fit,
    by their time, the measured ones first; then those that do not.
    """

    workload: Workload
    batch: int
    memory_bytes: int
    device: str
    grounds: str
    rows: tuple[Prediction, ...]

    def __getitem__(self, method: str) -> Prediction:
        found = next((row for row in self.rows if row.method == method), None)
        if found is None:
            raise AdviceError(f"method {method!r} is none of {', '.join(TITLES)}")
        return found

    @property
    def best(self) -> Prediction | None:
        """No method where the batch fits undivided, else the fastest that fits, if one does."""
        return next((row for row in (self["undivided"], self.rows[0]) if row.fits), None)

    def code(self, method: str) -> str:
        """Lines of code that use a method; none where it is refused or does not fit."""
        lines = snippet(self[method])
        single = all(isinstance(part, torch.Tensor) for part in self.workload.samples(1))
        if ".to(device)" in lines and not single:
            return f"# Move, and split, what is no single tensor your way.\n{lines}"
        return lines

    def table(self) -> list[dict[str, str]]:
        """A row for each method, in words."""
        measured = any(row.measured_s for row in self.rows)
        return [
            {
                "method": TITLES[row.method],
                "fits": "yes" if row.fits else "no",
                "peak (GiB)": f"{row.peak_bytes / GIB:.3g}",
                **({"measured (s)": _number(row.measured_s, ".3g")} if measured else {}),
                "predicted (s)": _number(row.seconds, ".3g"),
                "time over undivided": _number(row.slowdown, ".2f"),
                "host (GiB)": _number(row.host_bytes / GIB or None, ".3g"),
                "largest batch": _number(row.largest, ","),
                "μ-batch": str(row.settings.get("micro_batch") or DASH),
            }
            for row in self.rows
        ]

    def answer(self) -> str:
        """Which method to take, in a sentence or two."""
        best, memory = self.best, f"{self.memory_bytes / GIB:.3g} GiB"
        if best is None:
            least = min(self.rows, key=lambda row: row.peak_bytes)
            size = f"{least.peak_bytes / GIB:.3g} GiB"
            why = f" ({least.reason})" if least.reason else ""
            return f"Nothing fits {memory}: the least, {TITLES[least.method]}, takes {size}{why}."
        said = f"{best.peak_bytes / GIB:.3g} of {memory}"
        if best.measured_s:
            said += f", {best.measured_s:.3g} s a step as measured"
        if best.method == "undivided":
            return f"Take no method: the batch fits undivided, {said}."
        if best.slowdown is not None:
            percent = round(100 * (best.slowdown - 1))
            word = "faster" if percent < 0 else "slower"
            said += f", {abs(percent)} % {word} than undivided would be"
        return f"Take {TITLES[best.method]}: {said}."

    def text(self, method: str | None = None) -> str:
        """The answer, the table, its sources, and the code of the best method or another."""
        from repro import terminal

        title = (
            f"{self.workload.name}, batches of {self.batch:,} within "
            f"{self.memory_bytes / GIB:.3g} GiB on {self.device}"
        )
        sources = (
            f"Times: {self.grounds}. Peaks: live tensors of a recorded step; what kernels take "
            "inside comes on top. μ-batch: samples of a micro-batch. Predicted times can be far "
            "off (`python -m repro show together/advice`): --measure, or measure=True, times steps "
            "where the device is here."
        )
        reasons = [f"{TITLES[row.method]}: {row.reason}" for row in self.rows if row.reason]
        parts = [
            terminal.prose(self.answer()),
            terminal.table(self.table(), title),
            terminal.prose("\n".join([CHANGES, *reasons])),
            terminal.prose(sources),
        ]
        chosen = method or (self.best.method if self.best else None)
        if chosen is not None and (code := self.code(chosen)):
            parts += [f"{TITLES[chosen]}:", code]
        return "\n\n".join(parts)


def _number(value: float | None, form: str) -> str:
    return DASH if value is None else f"{value:{form}}"


def advise(
    model: nn.Module | str,
    batch: int,
    memory_bytes: int,
    *,
    device: str | torch.device = "cpu",
    probe_seconds: float = 6.0,
    measure: bool = False,
    **given: Any,
) -> Advice:
    """Predict for each method whether a batch fits, and its time.

    Where the device is present it times some steps of small batches, and with `measure` steps of
    each method that fits; else it computes nothing. No argument is changed.

    Args:
        model: A model, or its name, as of `Workload.of`.
        batch: Samples of the mini-batch.
        memory_bytes: Limit on the device.
        device: ``"cpu"``, an accelerator of torch's such as ``"cuda"``, or a name with a data sheet
            (``"H100"``), which gives the rates of an absent device; ``"cuda"`` is then an H100.
        probe_seconds: Most seconds of timing small batches; 0 times none.
        measure: Run each method that fits, on a copy of the model, and rank by the median of
            `STEPS` steps. One that runs out of memory does not fit; one that fails otherwise is
            ranked by its prediction, last. Needs the device; a CPU enforces no limit.
        **given: As of `Workload.of`: `example`, `image`, `loss_fn`, `optimizer`, `blocks`,
            `options`.

    Raises:
        AdviceError: A number or a name is invalid, or the step cannot be recorded or run.
    """
    if not 0 <= probe_seconds < float("inf"):
        raise AdviceError(f"probe_seconds is {probe_seconds!r}: give seconds, 0 or more")
    device = re.sub(r"^cpu:\d+$", "cpu", str(device))
    present = _is_present(device)
    kind = "cpu" if device == "cpu" else "accelerator"
    if not is_whole(batch, 1):
        raise AdviceError(f"batch is {batch!r}: give a whole number of at least 1")
    workload = replace(Workload.of(model, **given), batch=int(batch))
    workload = workload if kind == "cpu" else workload.on_accelerator
    predict(workload, "undivided", batch, memory_bytes, device=kind)  # refuses what cannot be
    speed = Speed.of(device if device in ("cpu", *DEVICES) else "H100")
    if present and probe_seconds:
        try:
            speed = probe(workload, device, batch, memory_bytes, probe_seconds)
        except Exception as error:
            raise AdviceError(
                f"a training step of {workload.name} failed on {device} "
                f"({type(error).__name__}: {error}): the example must be what model and loss "
                "take, and copy.deepcopy must copy the model; probe_seconds=0 measures nothing"
            ) from error
    rows = [predict(workload, m, batch, memory_bytes, speed, device=kind) for m in METHODS]
    grounds = speed.grounds
    if measure and present:
        rows = measured(workload, rows, device, memory_bytes)
        count = sum(row.measured_s is not None for row in rows)
        grounds = (
            f"{count} methods measured, median of {STEPS} steps after {WARMUP} ({SETTLING} where "
            f"tensors are swapped); else {grounds}"
        )
    elif not present and (measure or device not in DEVICES):
        grounds = f"nothing measured, as {device} is not here; {grounds}"
    return Advice(workload, batch, memory_bytes, device, grounds, ranked(rows))


def ranked(rows: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """Sort: methods that fit first, of these the measured ones, by time, then by simplicity."""

    def rank(row: Prediction) -> tuple[bool, bool, float, int]:
        # Without a time it goes behind undivided training, of which it is a variation.
        time = row.measured_s or (1.0 + 1e-6 if row.slowdown is None else row.slowdown)
        # Equal times differ by rounding.
        return not row.fits, row.measured_s is None, float(f"{time:.9g}"), places[row.method]

    places = {method: place for place, method in enumerate(METHODS)}
    return tuple(sorted(rows, key=rank))


def _is_present(device: str) -> bool:
    if device in DEVICES:
        return False
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise AdviceError(
            f"the device {device!r} is not known: give cpu, an accelerator of torch's such as "
            f"cuda, or one of {', '.join(DEVICES)}"
        ) from error
    if kind == "meta":
        raise AdviceError("the device meta computes nothing: give the one that is to train")
    return kind in ("cpu", accelerator.present())


def parse_memory(text: str) -> int:
    """Bytes of a text such as ``16GiB`` or ``800 MB``, at least 1 MiB; else an AdviceError."""
    parts = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*(?:([KMGT]?)(I?)B)?\s*", text.upper())
    number, prefix, binary = parts.groups(default="") if parts else ("0", "", "")
    nbytes = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
    if nbytes < 2**20:  # such as 16 without its unit
        raise AdviceError(f"the memory is {text[:40]!r}: give 1 MiB or more, such as 16GiB")
    return nbytes


def parse_sides(text: str) -> tuple[int, int]:
    """Height and width of a text such as ``224`` or ``512x1024``; else an AdviceError."""
    parts = re.fullmatch(r"([1-9]\d{0,5})(?:[x×]([1-9]\d{0,5}))?", text)
    if parts is None:
        raise AdviceError(f"the image is {text[:40]!r}: give pixels, as 224 or 512x1024")
    return int(parts[1]), int(parts[2] or parts[1])
