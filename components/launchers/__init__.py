"""Launchers of `xtrain launch`: machines from a queue, a cluster, or this machine."""

DEFAULT = "local"
