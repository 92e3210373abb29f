"""xtrain: declare a training experiment, review its execution plan, run exactly that plan."""

__version__ = "0.1.0"
