"""Registration of ops as library ops and autograd Functions."""
