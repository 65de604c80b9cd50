"""ONNX and ExecuTorch files, run in their runtimes; left out where the extra `export` is not installed."""

import importlib.util
import json

import pytest
import torch
from exports import Branches, small_subject
from torch import nn

from hetperm.runs.export import formats, verify
from hetperm.runs.export.export import _export
from hetperm.runs.export.options import Options

pytestmark = pytest.mark.slow


def extra(*names: str) -> list:
    """The formats as cases, each left out with a reason if its packages are missing."""
    cases = []
    for name in names:
        missing = [package for package in formats.EXTRA[name] if importlib.util.find_spec(package) is None]
        reason = f"{', '.join(missing)} not installed (make test-export installs them)"
        cases.append(pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=reason)))
    return cases


BOTH = extra("onnx", "executorch")


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
@pytest.mark.parametrize("name", BOTH)
def test_a_file_runs_in_its_runtime_and_agrees(name, precision, tmp_path):
    options = Options(format=name, precision=precision, accuracy_loss=0.2)
    (one,) = _export([small_subject()], options, tmp_path)
    assert one.check.fault is None
    assert one.check.before == pytest.approx(0.9)
    manifest = json.loads(one.path.with_name(f"{one.path.name}.json").read_text())
    assert (manifest["kind"], manifest["precision"], manifest["bytes"]) == (name, precision, one.path.stat().st_size)
    assert manifest["input"]["shape"] == [1, 2, 6, 6]
    assert one.check.difference > 0 or precision == "float32"


@pytest.mark.parametrize("name", BOTH)
def test_a_file_for_any_number_of_samples_takes_one_and_many(name, tmp_path):
    subject = small_subject(classes=torch.tensor([True, True, False, True]))
    (one,) = _export([subject], Options(format=name, batch="dynamic"), tmp_path)
    assert one.check.fault is None
    manifest = json.loads(one.path.with_name(f"{one.path.name}.json").read_text())
    assert manifest["input"]["largest_batch"] == (64 if name == "executorch" else None)
    assert manifest["classes"] == [0, 1, 3]


@pytest.mark.parametrize("name", extra("onnx"))
def test_the_names_in_an_onnx_file_are_those_of_the_manifest(name, tmp_path):
    import onnx

    file = onnx.load_from_string(formats.converted(small_subject(), Options(format=name)))
    assert [value.name for value in file.graph.input] == [formats.INPUT]
    assert [value.name for value in file.graph.output] == [formats.OUTPUT]


@pytest.mark.parametrize("name", extra("onnx"))
def test_a_file_of_other_weights_does_not_agree(name):
    class Other(Branches):
        pass

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        file = formats.converted(small_subject(Other()), Options(format=name))
    subject = small_subject()
    with verify.Runtime(name, verify.blocked_by(subject.module, name)) as runtime:
        found = verify.check(file, subject, Options(format=name), runtime)
        assert "its outputs differ by" in found.fault
        broken = verify.check(file[: len(file) // 2], subject, Options(format=name), runtime)
        assert broken.fault.startswith("it does not run")


class Bessel(nn.Module):
    """A model with an operation that neither ONNX nor ExecuTorch has."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(72, 4)

    def forward(self, x):
        return self.last(torch.special.bessel_j1(x.flatten(1)))


@pytest.mark.parametrize("name", BOTH)
def test_an_operation_that_a_format_lacks_is_named_and_nothing_is_written(name, tmp_path):
    with pytest.raises(ValueError, match=rf"client 7: its model \(Bessel\) cannot be written as {name} .*bessel_j1"):
        _export([small_subject(Bessel())], Options(format=name), tmp_path / "out")
    assert not (tmp_path / "out").exists()
