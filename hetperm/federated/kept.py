"""The model that a node keeps, and the data there on which an exported file of it is verified."""

from pathlib import Path

from hetperm.federated import shard
from hetperm.federated.places import NODE, node_place
from hetperm.metrics import metric_of
from hetperm.runs import client_models
from hetperm.runs.export.package import Data


def is_node(folder: Path) -> bool:
    """Whether a folder is that of a node."""
    return (folder / NODE).is_file()


def data_of(folder: Path) -> Data | None:
    """The data of a node whose model is to be exported; None if it has no model yet."""
    place = node_place(folder)
    numbers = client_models.clients(folder)
    if not numbers:
        return None
    (key,) = numbers[:1]  # a node is one client
    manifest, config = client_models.read_manifest(folder, key), place.config
    found = shard.load(manifest.get("data", place.data), config, key)
    if found.client.n_train != manifest.get("n_train"):
        raise ValueError(
            f"{folder}: the model was trained on {manifest.get('n_train')} samples, and the data here have "
            f"{found.client.n_train}; they must be those that the node was started with"
        )
    metric = metric_of(config.metric or found.metric)
    return Data({key: found.client}, metric, found.num_classes, found.preparation, found.class_names)
