"""How `xtrain launch` has machines for a run: from a queue, a cluster, or this one."""

DEFAULT = "local"
