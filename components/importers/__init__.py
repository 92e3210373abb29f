"""Formats of configurations that `xtrain import` reads, one file each."""

DEFAULT = "axolotl"
