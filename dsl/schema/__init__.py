"""The schema of the language: one frozen attrs class a block kind, the only source of names, types, units and docs."""
