"""The links of `collate`."""
