"""New weights, built and checked beside the live ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.base.errors import CheckpointError
from etude.base.records import PolicyVersion
from etude.inference.forward import ServedModel
from etude.models.checkpoint import export_state, import_state
from etude.models.config import ModelConfig
from etude.models.deepseek import DeepseekModel
from etude.weights.content import content_hash


@dataclass(frozen=True)
class Staged:
    """A version that is ready to be swapped in."""

    version: PolicyVersion
    served: ServedModel
    content_hash: str
    """Of what the model holds, in the published dtypes: read back from it, not taken over from the input."""


def build(config: ModelConfig, version: PolicyVersion, state: Mapping[str, Tensor], max_length: int) -> Staged:
    """Build a model from a published state. Raises CheckpointError naming a missing, misshapen or non-finite tensor."""
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"weights of version {version}: {name} is not finite floating point")
    model = DeepseekModel(config).eval()
    import_state(model, state)
    return Staged(version, ServedModel(model, max_length), held_hash(model, state))


def held_hash(model: DeepseekModel, like: Mapping[str, Tensor]) -> str:
    """Content hash of the weights in ``model``, cast to the dtypes of ``like``."""
    return content_hash({name: tensor.to(like[name].dtype) for name, tensor in export_state(model).items()})
