"""Screens as rows of text for a size, and what keys do to them: no widgets, no files."""
