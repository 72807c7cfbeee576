"""Linear layers with activations, MLPs, and the MLP sublayer."""
