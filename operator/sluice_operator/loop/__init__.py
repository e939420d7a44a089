"""Watches, one task for each object, and the pure plan that each pass carries out."""
