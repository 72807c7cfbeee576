"""General segments: any function recomputed in backward, and which layers of a model become such segments."""
