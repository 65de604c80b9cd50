"""The page of examples/browser, opened in a headless Chromium: it classifies a digit with an exported model."""

import contextlib
import html
import json
import os
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parent.parent / "examples" / "browser"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=900,700 --virtual-time-budget=20000"
)
RUNTIME = PAGE / "node_modules" / "onnxruntime-web" / "dist"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)"),
    pytest.mark.skipif(not RUNTIME.is_dir(), reason="no onnxruntime-web (npm install in examples/browser)"),
]


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder: Path):
    """A context in which a folder is served on this machine only; it provides the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def opened(address: str, folder: Path, *flags: str) -> str:
    """What Chromium makes of a page."""
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [CHROMIUM, *FLAGS.split(), profile, *flags, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_the_page_classifies_a_digit_as_the_clients_model_does(tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime not installed (make test-export installs it)")
    from hetperm import Config, run
    from hetperm.data import images

    config = Config(
        num_clients=2, partition="iid", capacity_profile="homogeneous", steps=120, out=tmp_path / "run", quiet=True
    )
    result = run(config)
    (one,) = result.export(format="onnx", client=1, out=tmp_path / "page")
    assert one.check.fault is None
    shutil.copy(PAGE / "index.html", tmp_path / "page")
    (tmp_path / "page" / "node_modules").symlink_to(PAGE / "node_modules")
    with served(tmp_path / "page") as address:
        page = opened(f"{address}/?model=client_001.onnx", tmp_path, "--dump-dom")
        picture = Path(os.environ.get("HETPERM_SCREENSHOT", tmp_path / "page.png"))
        opened(f"{address}/?model=client_001.onnx", tmp_path, f"--screenshot={picture}")
    assert re.search(r'<p id="error">(.*?)</p>', page)[1] == ""
    logits = torch.tensor(json.loads(html.unescape(re.search(r'data-logits="(.*?)"', page)[1])))
    digit = images.prepare(images.digits().images.x[3:4], images.digits())  # the three that the page begins with
    with torch.no_grad():
        expected = result.model(1)(digit)[0]
    assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))
    assert re.search(r'<output id="answer".*?>(.*?)</output>', page)[1] == str(int(expected.argmax())) == "3"
    assert picture.stat().st_size > 5000
