"""Records of a run as typed values: name, type, unit and meaning of every key."""
