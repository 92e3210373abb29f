"""Adapters: small trained parameters next to frozen matrices of a model, one file each."""
