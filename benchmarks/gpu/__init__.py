"""Runs everything that is measured on a GPU, in three parts: `make gpu`."""
