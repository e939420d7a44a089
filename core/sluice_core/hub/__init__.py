"""The client of a Hugging Face hub. Nothing of a checkpoint is run."""
