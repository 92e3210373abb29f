from xtrain import loss


@loss(goes_with={"optimizer": ["muon", "lion"], "stack": "parallel"})
def fitted(logprob_T):
    """Cross-entropy, for some optimizers alone."""
    return -logprob_T
