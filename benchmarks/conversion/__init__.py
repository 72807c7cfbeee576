"""convert on models of other libraries: known families, and every class of transformers that builds small (families.py).

transformers, timm and diffusers are not dependencies of ckptkern: `pip install transformers timm diffusers` before `make
convert-families`.
"""
