"""Every op beside XLA, cuDNN and what the device can do."""
