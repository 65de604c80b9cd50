"""A client's model as a file that its device can run: torch.export, ONNX or ExecuTorch, verified by running it."""
