"""Traffic of a step between ranks: ids out, rows home, gradients back."""
