"""The LM head and its loss: the op, the statistics of a token that it gives, and the functions that return them."""
