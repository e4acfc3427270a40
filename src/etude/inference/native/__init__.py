"""The engine's forward pass in C, compiled for this machine when it is first used."""
