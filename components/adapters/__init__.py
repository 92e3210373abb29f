"""Adapters: what is trained beside the matrices of a model, which are not; one file each."""
