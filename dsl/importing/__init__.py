"""Import of other trainers' configurations: files read with places, keys accounted for, and a spec written."""
