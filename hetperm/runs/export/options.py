"""Flags of `hetperm export`. Imports no torch, for --help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hetperm.checks import check_fields, number, several, whole

Format = Literal["pt2", "onnx", "executorch"]
Precision = Literal["float32", "float16", "int8"]
FOLDER = "exports"  # inside a run's folder


def positions(name: str, value: Any) -> tuple[int, ...]:
    """One position of a client, or several."""
    return several(whole(0))(name, [value] if isinstance(value, int) else value)


@dataclass(frozen=True)
class Options:
    """Write clients' models as files that their devices run; each is run in its own runtime first, and compared.

    A file takes stored values (pixels from 0 to 255, say) and normalises them itself. One whose outputs are not those
    of the client's model is not written, and the status is 1.
    """

    format: Format = "pt2"
    """pt2: torch.export, opened by torch alone; onnx: for onnxruntime, also in browsers; executorch: for phones, with
    XNNPACK. The last two need pip install 'hetperm[export]'."""
    client: Annotated[tuple[int, ...], positions] = ()
    """Only these clients, by their number in the run."""
    tier: str | None = None
    """Only the clients of this tier."""
    all: bool = False
    """All clients, as without --client and --tier."""
    precision: Precision = "float32"
    """float16 halves a file (with executorch only its linear layers); int8 quarters it: weights are stored, and inputs
    of layers rounded, in 8 bits."""
    batch: Literal["one", "dynamic"] = "one"
    """Samples of a call: always one, or any number (with executorch up to 64)."""
    samples: Annotated[int, whole(1)] = 256
    """Validation samples that each file is run on, at most."""
    accuracy_loss: Annotated[float, number(lambda x: 0 <= x <= 1, "a number from 0 to 1")] = 0.05
    """Validation accuracy, or what else the run is scored by, that int8 may cost; a file that loses more is not
    written."""
    data_dir: Path | None = None
    """Folder of data sets in torchvision's layout; None: the one that the run read."""
    out: Path | None = None
    """Folder to write to, made if it is missing; None: exports/ in the run's folder."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self):
        check_fields(self)
        chosen = [name for name in ("client", "tier", "all") if getattr(self, name) not in ((), None, False)]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]} and {chosen[1]} exclude each other; leave one of them out")
