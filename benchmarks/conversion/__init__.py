"""Measures convert on models of other libraries: known families, and every class of transformers that builds small
(families.py); and the peak memory of a training step by family of language models (peaks.py).

transformers, timm and diffusers are not dependencies of ckptkern: `pip install transformers timm diffusers` before `make
convert-families`.
"""
