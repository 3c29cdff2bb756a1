"""The mLSTM cell of xLSTM in chunks."""
