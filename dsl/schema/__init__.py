"""Schema of the language: one frozen attrs class per block kind, the only source of names, types, units and docs."""
