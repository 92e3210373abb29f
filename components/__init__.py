"""What a spec chooses by name: one file each, which says all there is to say of it; the torch side stands beside it."""
