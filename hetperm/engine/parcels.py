"""Parcels for Ray's object store: any value as a pickle, and its tensors as arrays that are read without a copy."""

import io
import pickle
import warnings
from typing import Any

import numpy as np
from ray import cloudpickle

from hetperm.engine.pickling import reduced

Parcel = tuple[bytes, list[np.ndarray]]


class _Pickler(cloudpickle.CloudPickler):
    """Also takes functions that have no name elsewhere, such as a user's loss."""

    def reducer_override(self, value: Any) -> Any:
        recipe = reduced(value)
        return super().reducer_override(value) if recipe is NotImplemented else recipe


def packed(value: Any) -> Parcel:
    """The parcel of a value."""
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    _Pickler(text, protocol=5, buffer_callback=buffers.append).dump(value)
    return text.getvalue(), [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]


def unpacked(parcel: Parcel, *, shared: bool = False) -> Any:
    """The value in a parcel.

    Args:
        shared: whether its tensors lie in the object store, which many read and nobody may write to.
    """
    text, arrays = parcel
    if not shared:
        return pickle.loads(text, buffers=[bytearray(array) for array in arrays])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of memory that must not be written to
        return pickle.loads(text, buffers=arrays)
