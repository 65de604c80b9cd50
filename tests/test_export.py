"""Exported models: what is in a file, how it is verified, what is refused. Other formats have tests of their own."""

import hashlib
import itertools
import json
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import PIXELS, Branches, small_subject
from tiny_run import refusal, tiny, train, without_what_others_test
from torch import nn

from hetperm import Client, Config, fit, load_client
from hetperm.cli.export import main
from hetperm.cli.main import guarded
from hetperm.data import images
from hetperm.device.bench import ABSENT
from hetperm.metrics import METRICS
from hetperm.runs import experiment, join
from hetperm.runs.export import export, formats, verify
from hetperm.runs.export.int8 import Int8Layer, quantized
from hetperm.runs.export.options import Options
from hetperm.runs.export.package import Packaged, samples_of
from hetperm.runs.setting import problem_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The folder of a tiny run."""
    folder = tmp_path_factory.mktemp("export") / "run"
    with without_what_others_test():
        experiment.run(tiny(out=folder))
    return folder


@pytest.fixture
def copied(run_folder, tmp_path):
    """A copy of that folder, to be spoilt."""
    return Path(shutil.copytree(run_folder, tmp_path / "copy"))


def command(*words: object) -> int:
    """The exit status of hetperm export."""
    return guarded(main, [*map(str, words)])


# A run on disk, from the command to the file


OPENED = """
import sys, torch
makers = ("hetperm", "submodels", "timm", "torchvision")
sys.modules.update({name: None for name in [*makers, *sys.modules] if name.partition(".")[0] in makers})
print(torch.export.load(sys.argv[1]).module()(torch.zeros(3, 1, 8, 8)).shape)
"""


@pytest.mark.slow
def test_a_command_writes_verified_files_that_open_without_hetperm(run_folder, tmp_path, capsys, warm):
    assert command(run_folder, "--client", "0", "5", "--batch", "dynamic", "--out", tmp_path / "new" / "files") == 0
    out = capsys.readouterr().out
    assert "2 of 2 verified by running" in out
    names = sorted(path.name for path in (tmp_path / "new" / "files").iterdir())
    assert names == ["client_000.pt2", "client_000.pt2.json", "client_005.pt2", "client_005.pt2.json"]
    path = tmp_path / "new" / "files" / "client_005.pt2"
    manifest = json.loads(path.with_name("client_005.pt2.json").read_text())
    model = json.loads((run_folder / "models" / "client_005.json").read_text())
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["bytes"] == path.stat().st_size
    assert {manifest[key] == model[key] for key in ("width", "tier", "accuracy", "seed", "architecture")} == {True}
    assert manifest["class_names"] == list("0123456789")
    assert manifest["input"]["shape"] == ["n", 1, 8, 8]
    assert manifest["input"]["values"] == {"smallest": 0, "largest": 16}
    assert manifest["normalisation"] == {"peak": 16, "mean": [0.3053], "std": [0.376]}
    assert manifest["verified"]["largest_difference"] < 1e-4 * manifest["verified"]["largest_output"]
    # The outputs for digits as they are stored are those of the run's model for digits as they were prepared.
    client = problem_of(tiny()).clients[5]
    stored, expected = images.digits().images.x.float(), load_client(run_folder, 5)
    prepared = images.prepare(stored, images.digits())
    with torch.no_grad():
        outputs = torch.export.load(path).module()(stored)
        assert torch.allclose(outputs, expected(prepared), atol=1e-4)
    part = samples_of(client, 256)
    assert manifest["verified"]["samples"] == len(part[1]) == 216
    # In another process, for which nothing of this project is there.
    done = warm.run(str(path), code=OPENED)
    assert done.stdout.strip() == "torch.Size([3, 10])", done.stderr
    # It tells nothing of the machine it was made on.
    with zipfile.ZipFile(path) as archive:
        contents = b"".join([archive.read(name) for name in archive.namelist()])
    assert str(ROOT).encode() not in contents
    assert b"linear" in contents


def test_the_runs_own_folder_stays_whole_and_holds_the_files(copied, monkeypatch, capsys, caplog):
    from hetperm.runs import files

    accepted(monkeypatch)
    assert command(copied) == 0
    assert len(list((copied / "exports").glob("*.pt2"))) == 6
    assert files.is_whole(copied)
    assert not caplog.records
    with open(copied / "config.toml", "a") as file:
        file.write("# edited\n")
    assert command(copied, "--client", "0") == 0
    assert "not as the run wrote it, going by checksums.txt: config.toml" in caplog.text


def test_a_tier_is_exported_alone(run_folder, tmp_path, monkeypatch, capsys):
    tiers = {i: json.loads((run_folder / "models" / f"client_{i:03d}.json").read_text())["tier"] for i in range(6)}
    tier = tiers[0]
    accepted(monkeypatch)
    assert command(run_folder, "--tier", tier, "--out", tmp_path / "tier") == 0
    written = sorted(path.name for path in (tmp_path / "tier").glob("*.pt2"))
    assert written == [f"client_{i:03d}.pt2" for i in range(6) if tiers[i] == tier]
    assert f"{len(written)} of {len(written)} verified" in capsys.readouterr().out


def test_a_file_that_does_not_agree_is_not_written_and_the_others_are(run_folder, tmp_path, monkeypatch, capsys):
    def outputs(runtime, file, x, batches):
        wrong = file == b"client 3"
        return expected[file].outputs().numpy() + 0.01 * wrong, 0.1

    expected = {}

    def converted(subject, options):
        name = f"client {subject.client}".encode()
        expected[name] = subject
        return name

    monkeypatch.setattr(formats, "converted", converted)
    monkeypatch.setattr(verify.Runtime, "outputs", outputs)
    assert command(run_folder, "--all", "--out", tmp_path / "some") == 1
    out = capsys.readouterr().out
    assert "5 of 6 verified" in out
    assert "not written: client 3: its outputs differ by 0.01" in out
    assert sorted(path.name for path in (tmp_path / "some").glob("client_003*")) == []
    assert len(list((tmp_path / "some").iterdir())) == 10


# Clients that joined later


def accepted(monkeypatch) -> list:
    """Let every file be good; return a list that will hold what was to be exported."""
    subjects = []
    monkeypatch.setattr(formats, "converted", lambda subject, options: subjects.append(subject) or b"a file")
    monkeypatch.setattr(export, "check", lambda *_: verify.Check(0.0, 1.0, 0.5, 0.5, 0.1))
    return subjects


def test_a_client_that_joined_is_exported_with_the_others(copied, monkeypatch, capsys, caplog):
    """Its data are in no file, so its model is run on those of the client that it learns most from."""
    client = problem_of(tiny()).clients[5]
    new = join.join(copied, Client(train=client.train, width=1.0))
    nearest = int(new.alpha[:6].argmax())
    subjects = accepted(monkeypatch)
    assert command(copied, "--all") == 0
    assert "7 of 7 verified" in capsys.readouterr().out
    assert [subject.client for subject in subjects] == list(range(7))
    assert [subject.source for subject in subjects] == [None] * 6 + [nearest]
    assert torch.equal(subjects[6].x, subjects[nearest].x)
    assert f"client 6 joined later; its file was run on data of client {nearest}" in caplog.text
    manifest = json.loads((copied / "exports" / "client_006.pt2.json").read_text())
    assert manifest["verified"]["of_client"] == nearest and manifest["width"] == 1.0
    for name, x in new.model.state_dict().items():
        assert torch.equal(subjects[6].module.state_dict()[name], x)


def test_a_client_that_joined_a_run_of_fit_is_exported_by_its_result(tmp_path, monkeypatch):
    with without_what_others_test():
        options = {"epochs": 1, "steps": 12, "warmup_rounds": 1, "share": 0.7, "quiet": True}
        result = fit(Home(), homes(3), Config(**options, out=tmp_path / "own"))
        new = result.join(replace(homes(4)[3], val=None))
    subjects = accepted(monkeypatch)
    assert [one.client for one in result.export(client=(1, 3))] == [1, 3]
    with torch.no_grad():
        x = subjects[1].x
        assert torch.equal(subjects[1].module(x), new.model(x))


# Bad input: one sentence, status 2, nothing written


def refused(capsys, folder: Path, *words: object) -> str:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")} if folder.exists() else {}
    assert command(folder, *words) == 2
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")} if folder.exists() else {}
    assert after == before
    return refusal(capsys)


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert refused(capsys, tmp_path / "none").startswith(f"there is no folder {tmp_path / 'none'}")
    assert "name the folder of a run" in refused(capsys, tmp_path)
    assert command() == 2
    assert "which run?" in refusal(capsys)


def test_a_run_without_models_says_how_to_finish_it(copied, capsys):
    shutil.rmtree(copied / "models")
    said = refused(capsys, copied)
    assert said.startswith(f"there are no clients' models in {copied}; finish the run: hetperm train --config")


def test_a_folder_of_several_seeds_names_one_of_them(run_folder, tmp_path, capsys):
    for seed in (3, 4):
        shutil.copytree(run_folder / "models", tmp_path / f"seed-{seed}" / "models")
    assert f"for each of 2 seeds; name one: {tmp_path / 'seed-3'}" in refused(capsys, tmp_path)


def test_an_unknown_client_or_tier_is_refused_with_those_that_are_there(run_folder, capsys):
    assert refused(capsys, run_folder, "--client", 6) == (
        f"there is no client 6 in {run_folder}; it holds 6 of them: clients 0 to 5"
    )
    assert "there is no tier 'entry' in" in refused(capsys, run_folder, "--tier", "entry")
    assert "--client: 'x' is not a whole number" in refused(capsys, run_folder, "--client", "x")
    assert "client is -1; it must be a whole number" in refused(capsys, run_folder, "--client", -1)
    assert "--client: the value is missing" in refused(capsys, run_folder, "--client")
    assert "client and all exclude each other" in refused(capsys, run_folder, "--client", 1, "--all")
    assert "--format: 'tflite' is not one of 'pt2', 'onnx', 'executorch'" in refused(
        capsys, run_folder, "--format", "tflite"
    )


def test_a_client_of_which_a_file_is_missing_is_refused_and_the_files_of_others_do_not_count(copied, capsys):
    (copied / "models" / "client_001.json").unlink()
    (copied / "models" / "client_000.json").write_text("{")
    said = refused(capsys, copied, "--client", 1)
    assert said == f"{copied / 'models'} has no client_001.json; a model is two files, .json and .safetensors"
    assert "client_000.json is no manifest of a client's model" in refused(capsys, copied, "--all")
    assert list(export._chosen(copied, Options(client=(2,)))) == [2]


@pytest.mark.parametrize("place", [".", "models", "models/../models", "checkpoint"])
def test_files_are_not_written_among_those_of_a_run(place, copied, tmp_path, capsys):
    out = copied / place
    assert refused(capsys, copied, "--client", 0, "--out", out) == (
        f"{out} holds the files of a run; name another folder, such as {copied / 'exports'}"
    )


@pytest.mark.parametrize(("name", "package"), [("onnx", "onnxruntime"), ("executorch", "executorch")])
def test_a_format_whose_extra_is_missing_says_what_to_install(run_folder, monkeypatch, capsys, name, package):
    find = formats.importlib.util.find_spec
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda n: None if n in formats.EXTRA[name] else find(n))
    said = refused(capsys, run_folder, "--format", name)
    assert said.startswith(f"format {name} needs ")
    assert package in said
    assert said.endswith("pip install 'hetperm[export]' brings them")


def test_a_folder_of_another_version_is_refused(copied, capsys):
    path = copied / "models" / "client_002.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2').replace('"hetperm": "0', '"hetperm": "9'))
    assert f"{path} has format 2 and this hetperm reads 1; load it with hetperm 9" in refused(capsys, copied)


def changed(folder: Path, client: int, **entries: object) -> None:
    """Change entries of a client's manifest."""
    path = folder / "models" / f"client_{client:03d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_configuration_of_another_version_is_refused(copied, capsys):
    path = copied / "config.toml"
    path.write_text(f"local_stpes = 3\n{path.read_text()}")
    said = refused(capsys, copied)
    assert "local_stpes" in said and "the run is of" not in said  # it is of this version, and was changed
    changed(copied, 0, hetperm="9.9.9")
    assert "the run is of hetperm 9.9.9 and this is 0" in refused(capsys, copied)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"joined": True, "alpha": None}, "alpha of client 2 is None, which no run writes"),
        ({"joined": True, "alpha": [0.5, 0.5]}, "alpha of client 2 is [0.5, 0.5], which no run writes"),
        ({"classes": [3, 99]}, "classes of client 2 is [3, 99], which no run writes"),
    ],
)
def test_a_manifest_that_no_run_writes_is_refused(copied, capsys, entries, said):
    changed(copied, 2, **entries)
    assert refused(capsys, copied, "--client", 2).startswith(said)


def test_data_that_are_not_those_of_the_run_are_refused(copied, capsys):
    path = copied / "config.toml"
    path.write_text(path.read_text().replace("samples_per_client = 30", "samples_per_client = 20"))
    assert "had 30 training samples, and digits gives it 20 here" in refused(capsys, copied)


def test_other_data_of_the_same_shape_are_refused(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 4)).astype("float32"), rng.integers(0, 3, 90)
    words = ["--dataset", f"npz:{tmp_path / 'own.npz'}", "--partition", "iid", "--model", "logistic", "--epochs", "1"]
    words += ["--warmup-rounds", "1", "--num-clients", "3", "--capacity-profile", "homogeneous", "--baselines", ""]
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert train(*words, "--out", tmp_path / "run") == 0
    np.savez(tmp_path / "own.npz", x=x[::-1], y=y)
    capsys.readouterr()
    assert "has other samples here than" in refused(capsys, tmp_path / "run")
    assert not (tmp_path / "run" / "exports").exists()


def test_an_unknown_option_of_a_results_export_is_named(own_result):
    with pytest.raises(TypeError, match="export has no option 'fromat'; did you mean 'format'"):
        own_result.export(fromat="onnx")


def test_a_damaged_model_is_refused(copied, capsys):
    path = copied / "models" / "client_000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "is not the file that its manifest describes" in refused(capsys, copied)


def test_a_model_whose_work_depends_on_its_inputs_says_where(tmp_path):
    class Choosy(Branches):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(ValueError, match=r"client 7: its model \(Choosy\) cannot be written as pt2 .*depends on the"):
        formats.converted(small_subject(Choosy()), Options())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Missing out variants: {'aten::linalg_svd'}", "there is no way to write aten::linalg_svd"),
        ("Operator torch._ops.aten.i0.default is not in Core ATen opset.", "write aten.i0.default"),
        ("Could not guard on data-dependent expression Eq(u0, 1)", "depends on the values of its input"),
        ("something\nelse", "something else"),
        ("", "RuntimeError"),
    ],
)
def test_the_cause_of_a_failed_export_is_one_line(text, said):
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as cause:
            raise ValueError("on top") from cause
    except ValueError as error:
        assert said in formats.culprit(error if text else error.__cause__)


# Models in memory


class Home(nn.Module):
    """A user's own model, whose class is in no file that an exported one may need."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def homes(n: int) -> list[Client]:
    """Clients with 12 samples each, labelled by a line."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(12, 6, generator=generator) for _ in range(n)]
    pairs = [(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()) for x in inputs]
    return [Client(train=pair, val=pair, width=0.5 if i % 2 else 1.0) for i, pair in enumerate(pairs)]


@pytest.fixture(scope="module")
def own_result():
    return fit(Home(), homes(4), Config(epochs=1, steps=12, warmup_rounds=1, global_lr=0.1, personal_lr=0.1, share=0.7))


@pytest.fixture(scope="module")
def one_process():
    """Files of this module's models are run by one process, which is not started for each of them."""
    processes = {}

    class Kept(verify.Runtime):
        def __enter__(self):
            self._process = processes.get(self._command[-1])
            return super().__enter__()

        def __exit__(self, *error):
            if self._process is not None:
                processes[self._command[-1]], self._process = self._process, None
            super().__exit__(*error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "Runtime", Kept)
        yield
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_a_result_exports_a_users_own_model(own_result, tmp_path, precision):
    (one,) = own_result.export(client=2, out=tmp_path / "mine", precision=precision)
    assert one.check.fault is None
    assert one.path.name == f"client_002{'' if precision == 'float32' else '.' + precision}.pt2"
    x = own_result.setting.clients[2].train[0][:1]
    outputs = torch.export.load(one.path).module()(x)
    assert torch.allclose(
        outputs, own_result.model(2)(x), atol={"float32": 1e-5, "float16": 1e-2, "int8": 0.1}[precision]
    )
    assert Path(__file__).stem in verify.blocked_by(own_result.model(2), "pt2")


def test_a_result_without_a_folder_asks_for_one(own_result):
    with pytest.raises(ValueError, match=r"no folder to write files to; name one: result.export\(out=...\)"):
        own_result.export(client=2)


def test_a_folder_of_fit_says_how_its_models_are_exported(tmp_path, capsys):
    folder = tmp_path / "own"
    with without_what_others_test():
        fit(Home(), homes(3), Config(epochs=1, steps=12, warmup_rounds=1, share=0.7, out=folder, quiet=True))
    assert "is a run of fit, whose data and model are in no file" in refused(capsys, folder)


# What is exported


def test_stored_values_and_inputs_are_the_same_samples():
    subject = small_subject()
    assert torch.allclose(subject.stored, subject.stored.round(), atol=1e-3)
    assert (subject.stored.min(), subject.stored.max()) == (pytest.approx(0, abs=1e-3), pytest.approx(255, abs=1e-3))
    source = images.Source(None, None, num_classes=1, peak=PIXELS.peak, mean=PIXELS.mean, std=PIXELS.std)
    assert torch.allclose(images.prepare(subject.stored, source), subject.x, atol=1e-5)


def test_a_packaged_model_normalises_and_leaves_out_absent_classes():
    subject = small_subject(classes=torch.tensor([True, False, True, True]))
    with torch.no_grad():
        outputs = Packaged(subject.module, subject, torch.float32)(subject.stored)
        plain = subject.module(subject.x)
    assert (outputs[:, 1] == ABSENT).all()
    assert torch.allclose(outputs[:, [0, 2, 3]], plain[:, [0, 2, 3]], atol=1e-5)
    assert torch.equal(subject.outputs()[:, 1], outputs[:, 1])


def test_token_inputs_are_left_as_they_are():
    module = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)).eval()
    x = torch.arange(6).view(2, 3)
    subject = small_subject()
    subject = type(subject)(7, module, subject.model, x, torch.zeros(2).long(), "val", subject.metric)
    assert subject.stored.dtype == torch.int64
    with torch.no_grad():
        assert torch.equal(Packaged(module, subject, torch.float32)(subject.stored), module(x))


def test_samples_are_spread_over_validation_data_and_else_over_the_shard():
    x, y = torch.arange(10.0).view(10, 1), torch.arange(10)
    assert samples_of(Client(train=(x, y), val=(x[:7], y[:7])), 4)[1].tolist() == [0, 2, 4, 6]
    _, labels, part = samples_of(Client(train=(x, y)), 99)
    assert (labels.tolist(), part) == (list(range(10)), "train")


# int8


def integer_layer(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """The outputs of a layer in int8, sample by sample in whole numbers: slow, and shares nothing with the package."""
    rows = []
    for sample in x.numpy().astype(np.float64).reshape(-1, x.shape[-1]) if isinstance(layer, nn.Linear) else x.numpy():
        step = np.abs(sample).max() / 127
        whole = torch.from_numpy(np.rint(sample / step)).long()
        outputs = []
        for k, kernel in enumerate(layer.weight.detach().double()):
            scale = kernel.abs().max() / 127
            levels = (kernel / scale).round().long()
            if isinstance(layer, nn.Linear):
                total = torch.tensor(sum(int(a) * int(b) for a, b in zip(whole, levels, strict=True)))
            else:
                total = integer_convolution(whole, levels, k, layer)
            bias = 0.0 if layer.bias is None else float(layer.bias[k])
            outputs.append(total.double() * step * scale + bias)
        rows.append(torch.stack(outputs))
    shape = (*x.shape[:-1], -1) if isinstance(layer, nn.Linear) else (len(x), *rows[0].shape)
    return torch.stack(rows).view(shape)


def integer_convolution(whole: torch.Tensor, levels: torch.Tensor, k: int, layer: nn.Conv2d) -> torch.Tensor:
    """One channel of a convolution in whole numbers, by loops."""
    (pad, _), (stride, _), (size, _) = layer.padding, layer.stride, layer.kernel_size
    each = layer.in_channels // layer.groups
    first = k // (layer.out_channels // layer.groups) * each
    padded = nn.functional.pad(whole[first : first + each], (pad, pad, pad, pad))
    places = range(0, padded.shape[1] - size + 1, stride)
    total = torch.zeros(len(places), len(places), dtype=torch.long)
    for (a, i), (b, j) in itertools.product(enumerate(places), repeat=2):
        total[a, b] = (padded[:, i : i + size, j : j + size] * levels).sum()
    return total


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(5, 3), (4, 5)),
        (nn.Linear(5, 3, bias=False), (2, 3, 5)),
        (nn.Conv2d(2, 4, 3, stride=2, padding=1), (3, 2, 5, 5)),
        (nn.Conv2d(4, 4, 3, groups=4, bias=False), (3, 4, 5, 5)),
    ],
    ids=["linear", "rows", "strided", "depthwise"],
)
def test_int8_layers_agree_with_loops_over_whole_numbers(layer, shape):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        x = torch.randn(shape, generator=generator)
        assert torch.allclose(Int8Layer(layer)(x).double(), integer_layer(x, layer), atol=1e-4)


def test_an_int8_layer_by_hand():
    layer = nn.Linear(2, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[1.0, -0.5]]), torch.tensor([2.0])
    # Steps of 1/127: the weights are 127 and -64 of them, the inputs 64 (63.5 rounds to even) and 127.
    assert Int8Layer(layer)(torch.tensor([[0.5, 1.0]])).item() == pytest.approx((127 * 64 - 64 * 127) / 127**2 + 2)


def test_what_else_is_in_a_batch_does_not_change_an_int8_output():
    module, x = quantized(Branches().eval()), small_subject().x
    with torch.no_grad():
        assert torch.allclose(module(torch.cat([x[:1], 100 * x[1:]]))[:1], module(x[:1]), atol=1e-5)


def test_int8_keeps_layers_whose_code_reads_their_weights():
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    changed = quantized(block)
    kinds = {name: type(layer) for name, layer in changed.named_modules()}
    assert kinds["linear1"] is Int8Layer
    assert kinds["self_attn.out_proj"] is not Int8Layer
    assert type(block.linear1) is nn.Linear  # a copy was changed


# Verification


class Fixed:
    """A runtime whose files always give the same outputs."""

    def __init__(self, outputs):
        self._outputs = outputs.clone().numpy()

    def outputs(self, file, x, batches):
        assert sum(batches) == len(x)
        return self._outputs, 0.1


@pytest.mark.parametrize(("factor", "precision", "good"), [
    (1.0, "float32", True), (1 + 5e-5, "float32", True), (1.001, "float32", False),
    (1.001, "float16", True), (1.05, "float16", False), (1.05, "int8", True), (-1.0, "int8", False),
])  # fmt: skip
def test_outputs_must_agree_as_well_as_their_precision_allows(factor, precision, good):
    subject = small_subject()
    found = verify.check(b"", subject, Options(precision=precision), Fixed(subject.outputs() * factor))
    assert (found.fault is None) == good
    assert found.difference == pytest.approx(abs(factor - 1) * found.scale, rel=1e-2, abs=1e-9)
    assert found.before == pytest.approx(0.9)


def test_int8_may_not_make_a_metric_worse_of_which_less_is_better():
    subject = small_subject(metric=METRICS["perplexity"])
    worse, better = (
        verify.check(b"", subject, Options(precision="int8"), Fixed(subject.outputs() * k)) for k in (-9, 9)
    )
    assert worse.fault == f"validation perplexity goes from {worse.before:.3f} to {worse.after:.3f}, by more than 0.05"
    assert better.fault is None and 1 < better.after < better.before < worse.after


def test_outputs_of_another_shape_or_not_finite_are_no_agreement():
    subject = small_subject()
    assert (
        "shape (40, 3) instead of (40, 4)"
        in verify.check(b"", subject, Options(), Fixed(subject.outputs()[:, 1:])).fault
    )
    assert (
        "not finite"
        in verify.check(b"", subject, Options(precision="int8"), Fixed(subject.outputs() * torch.nan)).fault
    )


def test_a_runtime_cannot_import_what_is_blocked_and_goes_on_after_an_error():
    with verify.Runtime("pt2", ["torch"]) as runtime:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="torch"):
                runtime.outputs(b"", np.zeros((1, 2)), [1])


def test_a_runtime_that_crashes_is_an_error_and_is_started_anew():
    with verify.Runtime("pt2", []) as runtime:
        code = "import sys, os; sys.stdin.readline(); print('good bye', file=sys.stderr, flush=True); os._exit(9)"
        runtime._command = [sys.executable, "-c", code]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"crashed with status 9 \(good bye\)"):
                runtime.outputs(b"", np.zeros((1, 2)), [1])


def test_onnx_files_must_run_without_torch():
    assert "torch" in verify.blocked_by(nn.Linear(1, 1), "onnx")
    assert "torch" not in verify.blocked_by(nn.Linear(1, 1), "pt2")
    assert {"hetperm", "submodels", "timm"} <= {*verify.blocked_by(nn.Linear(1, 1), "pt2")}
