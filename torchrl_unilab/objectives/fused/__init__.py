"""Updates with their gradients written out: losses, Adam and targets in few operations."""
