"""Imports of the process that the ranks of a measurement are forked from.

No package finds a device, so that none makes one ready, after which a fork has no backward.
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401

import xtrain.runtime.inspect.code_ranks  # noqa: F401
