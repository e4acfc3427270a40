"""Records, Protocols, errors, configuration and telemetry: what every room may import. No torch, no Ray."""
