"""Target and draft models, one decoder with families by declaration, and their weights."""
