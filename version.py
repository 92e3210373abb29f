"""The version of xtrain, in a module that everything else may import."""

__version__ = "0.1.0"
