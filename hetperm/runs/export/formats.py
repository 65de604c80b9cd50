"""From a client's model to the bytes of a file: torch.export, and what ONNX and ExecuTorch make of it."""

import contextlib
import copy
import importlib.util
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from hetperm.runs.export.int8 import quantized
from hetperm.runs.export.options import Options
from hetperm.runs.export.package import Packaged, Subject
from hetperm.texts import one_line

LARGEST_BATCH = 64  # of ExecuTorch, which reserves memory for it beforehand
LONGEST = 200  # characters of somebody else's error that are shown
INPUT, OUTPUT = "input", "output"  # their names in an ONNX file
EXTRA = {"pt2": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "executorch": ("executorch", "torchao")}
LACKING = r"(?i)no onnx function|not (?:supported|implemented|in core aten)|missing|unsupported"  # says an exporter
ENDING = {"pt2": "pt2", "onnx": "onnx", "executorch": "pte"}


def check_extra(name: str) -> None:
    """Raise an error if packages that a format needs are missing."""
    missing = [package for package in EXTRA[name] if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"format {name} needs {' and '.join(missing)}; pip install 'hetperm[export]' brings them")


def converted(subject: Subject, options: Options) -> bytes:
    """The file of a client's model; an error names the operation that stands in the way."""
    with _exporting():
        try:
            return WRITERS[options.format](_program(subject, options), options, subject)
        except Exception as error:  # exporters raise nearly anything
            raise ValueError(
                f"client {subject.client}: its model ({type(subject.module).__name__}) cannot be written as "
                f"{options.format} in {options.precision}: {culprit(error)}; try another --format or --precision"
            ) from error


def culprit(error: BaseException) -> str:
    """What an exporter stumbled over: the operations that an error and its causes name, or else what they say.

    Example:
        >>> culprit(RuntimeError("No ONNX function found for <OpOverload(op='aten.i0', overload='default')>"))
        'there is no way to write aten.i0.default'
    """
    chain, last = [], error
    while last is not None and last not in chain:
        chain.append(last)
        last = last.__cause__ or last.__context__
    texts = [str(one) for one in reversed(chain)]
    for text in texts:
        text = re.sub(r"op='([\w.]+)', overload='(\w+)'", r"\1.\2", text)
        if re.search(r"data-dependent|DynamicOutputShape|_local_scalar_dense", text):
            place = re.search(r"Caused by: .*?\((\S+:\d+) in (\w+)\)", text)
            where = f" ({Path(place[1]).name} in {place[2]})" if place else ""
            return f"what it does depends on the values of its input{where}"
        operations = dict.fromkeys(re.findall(r"\b(?:aten|torchvision|prims)(?:\.|::)\w+(?:\.\w+)?", text))
        if operations and re.search(LACKING, text):
            return f"there is no way to write {', '.join(list(operations)[:3])}"
    said = next((one_line(text) for text in texts if text.strip()), "") or type(error).__name__
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """A context for exporters: without their warnings and logs, because verification says whether a file is good."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# torch.export


def _program(subject: Subject, options: Options) -> ExportedProgram:
    """The client's model with its preprocessing, as a graph of ATen operations."""
    dtype = torch.float16 if options.precision == "float16" else torch.float32
    module = copy.deepcopy(subject.module).to("cpu", dtype).requires_grad_(False)
    if options.precision == "int8" and options.format == "pt2":
        module = quantized(module)
    return _exported(Packaged(module, subject, dtype).eval(), _example(subject, options), options)


def _exported(module: nn.Module, x: Tensor, options: Options) -> ExportedProgram:
    most = LARGEST_BATCH if options.format == "executorch" else None
    shapes = ({0: Dim("n", min=1, max=most)},) if options.batch == "dynamic" else None
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names folders of this machine
    return program


def _example(subject: Subject, options: Options) -> Tensor:
    # Of many samples if any number is allowed. Torch takes a batch of one for a batch that is always one, and chooses
    # other kernels from 16 samples on: with fewer here, ExecuTorch would reserve memory for 15.
    rows = torch.zeros(1 if options.batch == "one" else LARGEST_BATCH // 2, dtype=torch.long)
    return subject.stored[:1][rows]


# Formats: (program, options, subject) -> the bytes of the file


def _pt2(program: ExportedProgram, options: Options, subject: Subject) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _onnx(program: ExportedProgram, options: Options, subject: Subject) -> bytes:
    written = torch.onnx.export(
        program, dynamo=True, external_data=False, verbose=False, input_names=[INPUT], output_names=[OUTPUT]
    )
    model = written.model_proto
    if options.precision != "int8":
        return model.SerializeToString()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        del model.graph.value_info[:]  # shapes of weights that quantize_dynamic turns round; it finds the others anew
        # Unsigned: onnxruntime has no convolution for signed weights.
        quantize_dynamic(model, path, weight_type=QuantType.QUInt8)
        return path.read_bytes()


def _executorch(program: ExportedProgram, options: Options, subject: Subject) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    if options.precision == "int8":
        program = _quantized_for_xnnpack(program, _example(subject, options), options)
    return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer


def _quantized_for_xnnpack(program: ExportedProgram, x: Tensor, options: Options) -> ExportedProgram:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    rule = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    prepared = prepare_pt2e(program.module(), XNNPACKQuantizer().set_global(rule))
    prepared(x)  # scales of inputs are found when the file runs; this call only sets shapes
    return _exported(convert_pt2e(prepared), x, options)


WRITERS: dict[str, Callable[[ExportedProgram, Options, Subject], bytes]] = {
    "pt2": _pt2,
    "onnx": _onnx,
    "executorch": _executorch,
}
