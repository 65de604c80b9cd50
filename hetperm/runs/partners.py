"""Whom a client of a run learns from and why, read from the run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetperm.mixing import discrepancy
from hetperm.report.contents import read_clients
from hetperm.report.tables import width_text
from hetperm.runs import joined, server_file


@dataclass(frozen=True)
class Partners:
    """Whom a client learns from.

    Attributes:
        sentence: who the client is, and how many it learns from.
        rows: one row per client, those with the largest weights first, then the nearest.
        why: how weights and distances are to be read.
    """

    sentence: str
    rows: list[dict[str, Any]]
    why: str


def of(folder: str | Path, i: int) -> Partners:
    """The partners of client i of the run in a folder."""
    folder = Path(folder)
    if not (folder / "clients.csv").is_file():
        raise ValueError(f"{folder} holds no clients.csv; name the folder of a run that has ended")
    clients = read_clients(folder)
    if "seed" in clients[0]:
        raise ValueError(f"{folder} holds several seeds; name the folder of one of them, such as {folder}/seed-0")
    if not 0 <= i < len(clients):
        raise ValueError(f"there is no client {i} in {folder}; it has clients 0 to {len(clients) - 1}")
    alpha = joined.read_alpha(folder)
    if alpha.shape[0] != len(clients):
        raise ValueError(
            f"{folder}: there are mixing weights of {alpha.shape[0]} clients and clients.csv has {len(clients)}; copy "
            "both again from the run"
        )
    weights = np.asarray(alpha[[i]].todense() if hasattr(alpha, "todense") else alpha[[i]]).ravel()
    server = joined.server_of(folder, len(clients))
    zeta, noise = _distances(server, i)
    rows = []
    for j, client in enumerate(clients):
        known = bool(server.known[i] and server.known[j])
        both = float(noise[i] + noise[j])
        rows.append(
            {
                "client": j,
                "tier": str(client["tier"]),
                "width": client["width"],
                "n_train": client["n_train"],
                "weight": float(weights[j]),
                "distance": float(zeta[j]) if known else None,
                "noise": both if known else None,
                "beyond_noise": None if not known else 0.0 if j == i else max(0.0, float(zeta[j]) - both),
            }
        )
    rows.sort(
        key=lambda row: (-row["weight"], np.inf if row["distance"] is None else row["beyond_noise"], row["client"])
    )
    return Partners(_sentence(clients[i], weights, i), rows, _why(rows, i, server))


def _distances(server: server_file.Server, i: int) -> tuple[Any, Any]:
    """(N,) squared distance of every gradient from that of client i, and the noise of each gradient."""
    zeta = (server.gradient - server.gradient[i]).double().square().sum(1)
    noise = server.noise
    if noise[server.known].isnan().all():
        return zeta, noise.nan_to_num(0.0)
    filled = noise.clone()
    filled[server.known] = discrepancy.fill_noise(noise[server.known], server.samples[server.known].double())
    return zeta, filled.nan_to_num(0.0)


def _sentence(client: dict[str, Any], weights: np.ndarray, i: int) -> str:
    others = int((np.delete(weights, i) > 0).sum())
    who = f"client {i} ({client['tier']}, width {width_text(client['width'])}, {client['n_train']} samples)"
    if not others:
        return f"{who} learns from nobody else"
    effective = 1 / float(np.square(weights).sum())
    return f"{who} learns from {others} others and itself ({effective:.1f} effective), {weights[i]:.0%} from itself"


def _why(rows: list[dict[str, Any]], i: int, server: server_file.Server) -> str:
    """What separates partners from the others, in a sentence."""
    if not server.known[i]:
        return f"client {i} was away whenever reports were asked for, so nothing is known of its distance from others"
    partners = [row["beyond_noise"] for row in rows if row["weight"] > 0 and row["beyond_noise"] is not None]
    others = [row["beyond_noise"] for row in rows if row["weight"] == 0 and row["beyond_noise"] is not None]
    ends = f"partners differ by at most {max(partners):.3g} beyond noise" if partners else "it has no partners"
    nearest = f", the nearest of the others by {min(others):.3g}" if others else ""
    models = "two common models, in units of their noise" if server.early else "one common model"
    return f"distance: squared, of gradients at {models}; {ends}{nearest} (share {server.share:g})"
