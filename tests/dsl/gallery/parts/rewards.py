from xtrain import reward, source


@source
def made():
    yield {"q": "1+1", "a": "2"}


@reward
def short(prompt, completion, record, most: int = 5):
    """Completions are to be short."""
    return float(len(completion) <= most)
