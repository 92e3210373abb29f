"""Recipes of fp8: a file each."""

DEFAULT = "rowwise"
