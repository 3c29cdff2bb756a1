"""Layer norm and RMS norm, alone or fused with the addition before or the gate after them."""
