"""Text encoders: texts of any lengths as one flat batch, without padding between them."""
