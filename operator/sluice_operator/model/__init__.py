"""Models as the operator reads them, and whether they fit the hardware."""
