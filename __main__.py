"""`python -m xtrain`, which is how torchrun starts a rank: `torchrun … -m xtrain run spec.xtrain`."""

from xtrain.cli.main import entry

entry()
