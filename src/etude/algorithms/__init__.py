"""Pure maths on tensors: losses, estimators, advantages, penalties. Nothing here knows a model or a service."""
