"""A program that runs exported files in their own runtime, and nothing else: it cannot import what made them.

It is started as ``python -I standalone.py FORMAT BLOCKED,BLOCKED,...`` and imports neither hetperm nor any package that
is blocked. Every line of its input is a job in JSON, every line of its output the answer to it. A job names the file,
an .npy file of inputs, an .npy file to write the outputs to, and the sizes of the batches.
"""

import json
import os
import statistics
import sys
import time

import numpy as np

REPETITIONS = 30
SECONDS = 0.5  # of timing, at most


def torch_export(path):
    """A function from inputs to outputs that runs a .pt2 file."""
    import torch

    torch.set_num_threads(1)
    module = torch.export.load(path).module()

    def run(x):
        with torch.no_grad():
            return module(torch.from_numpy(x)).numpy()

    return run


def onnxruntime(path):
    """A function from inputs to outputs that runs an .onnx file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def executorch(path):
    """A function from inputs to outputs that runs a .pte file."""
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    portable_lib._unsafe_reset_threadpool(1)
    program = Runtime.get().load_program(path)
    method = program.load_method("forward")

    def run(x, program=program):  # a method needs its program, and does not keep it
        return method.execute((torch.from_numpy(x),))[0].numpy()

    return run


RUNTIMES = {"pt2": torch_export, "onnx": onnxruntime, "executorch": executorch}


def answer(kind, job):
    """Run a file on all inputs, write the outputs, and return how many milliseconds one sample takes."""
    run, x = RUNTIMES[kind](job["file"]), np.load(job["inputs"])
    # Copied, because a runtime may use the memory of its outputs again.
    parts = [np.array(run(part)) for part in np.split(x, np.cumsum(job["batches"])[:-1])]
    np.save(job["outputs"], np.concatenate(parts))
    one, times, end = x[:1].copy(), [], time.perf_counter() + SECONDS
    while len(times) < REPETITIONS and time.perf_counter() < end:
        began = time.perf_counter()
        run(one)
        times.append(time.perf_counter() - began)
    return {"ms": 1000 * statistics.median(times)}


def main():
    """Answer jobs until the input ends."""
    kind, blocked = sys.argv[1:]
    sys.modules.update(dict.fromkeys(blocked.split(",")))  # None: importing it is an error
    # Runtimes may print; only answers may go to the output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(kind, json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
