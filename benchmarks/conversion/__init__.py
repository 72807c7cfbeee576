"""convert on models of other libraries: known families (families.py), and every class that builds small (sweep.py).

transformers and timm are not dependencies of ckptkern: `pip install transformers timm` before `make convert-families` or
`make convert-sweep`.
"""
