"""Curves as rows of text: no widgets, no files."""
