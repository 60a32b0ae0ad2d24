"""What a step moves between ranks: ids out, rows home, gradients back."""
