"""Gymnasium's eleven MuJoCo v5 tasks, bit for bit, for many simulations at once."""
