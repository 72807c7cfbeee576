"""How an op becomes library ops and autograd Functions."""
