"""Recipes of fp8, one file each."""

DEFAULT = "rowwise"
