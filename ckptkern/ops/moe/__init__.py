"""The MoE sublayer: a router, the experts that it chooses, and shared experts."""
