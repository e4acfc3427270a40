"""New weights, built and checked beside the live ones."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.base.errors import CheckpointError, UserError
from etude.base.native.build import load
from etude.base.records import PolicyVersion
from etude.inference.forward import ServedModel
from etude.inference.native.model import SOURCE, NativeModel
from etude.models.checkpoint import export_state, import_state
from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel
from etude.weights.content import content_hash

Served = ServedModel | NativeModel


class Arranger:
    """Makes a model ready for the engine's forward pass, by the kernel chosen once for the engine."""

    def __init__(self, num_slots: int, max_length: int, library: ctypes.CDLL | None) -> None:
        self._num_slots, self._max_length, self._library = num_slots, max_length, library
        self.kernel = "torch" if library is None else "native"

    def __call__(self, model: DeepseekModel) -> Served:
        if self._library is None:
            return ServedModel(model, self._max_length)
        return NativeModel(model, self._num_slots, self._max_length, self._library)


def arranger(kernel: str, num_slots: int, max_length: int) -> Arranger:
    """``kernel`` is auto, native or torch. Raises UserError when native is asked for and cannot be compiled."""
    library: ctypes.CDLL | None = None
    if kernel != "torch":
        try:
            library = load(SOURCE)
        except UserError as error:
            if kernel == "native":
                raise
            logging.getLogger(__name__).warning("%s; steps are computed by PyTorch, which is slower", error)
    return Arranger(num_slots, max_length, library)


@dataclass(frozen=True)
class Staged:
    """A version that is ready to be swapped in."""

    version: PolicyVersion
    served: Served
    content_hash: str
    """Of what the model holds, in the published dtypes: read back from it, not taken over from the input."""


def build(config: ModelConfig, version: PolicyVersion, state: Mapping[str, Tensor], arrange: Arranger) -> Staged:
    """Build a model from a published state. Raises CheckpointError naming a missing, misshapen or non-finite tensor."""
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"weights of version {version}: {name} is not finite floating point")
    model = DeepseekModel(config).eval()
    import_state(model, state)
    return Staged(version, arrange(model), held_hash(model, state))


def held_hash(model: DeepseekModel, like: Mapping[str, Tensor]) -> str:
    """Content hash of the weights in ``model``, cast to the dtypes of ``like``."""
    return content_hash({name: tensor.to(like[name].dtype) for name, tensor in export_state(model).items()})
