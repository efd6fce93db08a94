"""Replay batches that are packed and transferred before the learner asks for them."""
