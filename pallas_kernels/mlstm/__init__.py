"""The mLSTM cell of xLSTM in its chunkwise form."""
