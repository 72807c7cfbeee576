"""Contains recipes for users, a file each, and the programs `demo` and `tutorials`, which `python -m ckptkern` runs in a
checkout."""
