DEFAULT = "random"
