"""Components that a spec selects by name, one file each; the torch implementation is in a file next to it."""
