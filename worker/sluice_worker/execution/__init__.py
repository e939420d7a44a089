"""Torch: weights, forward passes and sampling. Engine process."""
