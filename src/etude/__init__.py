"""Etude: an open implementation of the Composer 2 training system.

The rooms and their borders are described in ``ARCHITECTURE.md``; start reading at ``etude.base.records``.
"""
