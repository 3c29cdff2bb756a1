"""LayerNorm and RMSNorm, alone and with the residual addition before them."""
