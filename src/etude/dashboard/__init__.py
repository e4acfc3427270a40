"""The standalone HTML report of a run directory. Reads plain files only; needs no service and no network."""
