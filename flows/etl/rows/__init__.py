"""Reads rows from functions: cuts them into segments, and encodes them in pieces for the writer."""
