"""Layer norm and RMS norm, alone or fused with the residual addition before or the gate after them."""
