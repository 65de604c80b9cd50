"""The gallery of other kinds of models: every row is a model, and one of each kind is cut exactly and well."""

import pytest
import torch

from submodels import ScalableModel
from submodels.coverage import GALLERY, Row, _example, summary, write_table
from submodels.gallery import MODELS

torch.set_num_threads(1)

SHOWN = [
    "recurrent:lstm-language-state-in-and-out",
    "transformer:nano-gpt",
    "segmentation:unet",
    "image:conditional-generator",
    "table:skipgram-sparse",
    "video:frames-lstm",
    "graph:gcn-index-add",
    "audio:tcn-weight-norm",
    "idiom:fno",
    "idiom:femnist-literal-view",
    "idiom:vq-vae",
    "idiom:bilinear",
    "idiom:kan",
]


@pytest.mark.parametrize("name", SHOWN)
def test_one_of_each_kind_is_exact_and_compressed(name):
    torch.manual_seed(0)
    model, inputs, options = _example(f"{GALLERY}{name}")
    report = ScalableModel(model, inputs, **options).verify([0.5])
    assert report.exact and report.comparisons[0].share <= 0.6


def test_every_kind_is_in_the_gallery():
    kinds = {name.partition(":")[0] for name in MODELS} - {"huggingface"}
    assert kinds == {name.partition(":")[0] for name in SHOWN}


def test_the_table_has_two_parts_with_figures_of_their_own(tmp_path):
    good = {"round_trip": True, "forward": 0.0, "gradient": 0.0}
    rows = [Row("timm:a", "timm:a", share=0.3, **good), Row(f"{GALLERY}b", f"{GALLERY}b", share=0.9, **good)]
    write_table(rows, tmp_path / "coverage.md")
    first, _, second = (tmp_path / "coverage.md").read_text().partition("## Other kinds of models")
    assert summary(rows[:1]) in first and "1 exact and compressed" in first and "timm:a" in first
    assert summary(rows[1:], "models") in second and "0 exact and compressed" in second and f"{GALLERY}b" in second
