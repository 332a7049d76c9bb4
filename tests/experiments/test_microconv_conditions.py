"""Tables I to IV and VI of μ-cuDNN, beside the paper's."""

import made_microconv as made
import pytest
from made import check_row

from repro.experiments.microconv import conditions

MIB = 2**20


def here(make=lambda run: None, profile="quick"):
    rows = made.table("tables", make, profile)
    return {(row["table"], row["row"]): row["here"] for row in rows.to_dict("records")}


def test_without_records_machines_are_not_run_and_layers_are_there():
    found = here()
    assert {found[cell] for cell in found if cell[0] in ("I", "II", "VI")} == {"not run"}
    assert found["IV", "OCR"] == "4 layers: 3×3; batch size 16"
    assert found["III", "cluster"] == "WR; 64 MiB; ResNet-18"
    assert check_row("microconv/tables", 0, made.results("tables", lambda run: None))["holds"] == (
        "yes"
    )


def test_algorithms_by_configuration():
    def make(run):
        if run.experiment != "deepbench" or run.config["role"] != "OCR":
            return None
        half = run.config["setting"] == "fp16"
        names = ("cudnn_half:WINOGRAD", "cudnn:FFT_TILING") if half else ("cudnn:IMPLICIT_GEMM",)
        layers = [
            {"divided": {"parts": [[16, name]], "workspace_bytes": number * MIB}}
            for number, name in enumerate(names)
        ]
        return {"metrics": {"layers": [*layers, {}], "left_out": 0}}

    found = here(make, "gpu")
    assert found["I", "TRUE_HALF"] == "Winograd (up to 0.0 MiB)"
    assert found["I", "PSEUDO_HALF"] == "FFT (up to 1.0 MiB)"
    assert found["I", "FLOAT"] == "GEMM (up to 0.0 MiB)"
    assert found["II", "frameworks"] == "PyTorch"


@pytest.mark.parametrize(
    ("algorithm", "family"),
    [
        ("nnpack:ft8x8", "FFT"),
        ("nnpack:wt8x8", "Winograd"),
        ("cudnn:WINOGRAD_NONFUSED", "Winograd"),
        ("torch:im2col", "GEMM"),
        ("torch:native", "torch's own"),
    ],
)
def test_families(algorithm, family):
    assert conditions._family(algorithm) == family
