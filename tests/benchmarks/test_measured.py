"""The table of measured steps: its docs show the stored results, whose predictions are current."""

import json

import pytest

from benchmarks import measured
from benchmarks.harness import docs_page


def test_docs_show_the_stored_results():
    results = json.loads(measured._RESULTS.read_text(encoding="utf-8"))
    text = measured._DOCS.read_text(encoding="utf-8")
    assert docs_page.with_tables(measured._DOCS, measured.tables(results)) == text


def test_steps_take_about_as_long_as_predicted():
    """Kernels of attention were fitted to these steps; products and most others were not."""
    results = json.loads(measured._RESULTS.read_text(encoding="utf-8"))
    assert len(results) >= 5
    for name, step in results.items():
        ratio = step["predicted"]["step_s"] / step["ours"]["step_time_s"]["median"]
        assert 0.9 < ratio < 1.05, name
        attention = step["predicted"]["attention_s"] / step["kernel_seconds"]["attention_s"]
        assert attention == pytest.approx(1, abs=0.05), name


def test_kernels_are_summed_by_category():
    names = ("nvjet_tst_128x64", "cudnn_generated_sdpa", "loop_add_fusion", "memcpy128")
    kernels = [{"kernel": name, "seconds": 2.0**i} for i, name in enumerate(names)]
    assert measured.by_category(kernels) == {"matmul_s": 1, "attention_s": 2, "other_s": 12}


def test_gpu_without_a_description_is_refused():
    with pytest.raises(ValueError, match="'NVIDIA X1' has no description"):
        measured._machine("NVIDIA X1")
    assert "H200" in measured._machine("NVIDIA H200").device_kind
