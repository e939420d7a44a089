"""What each server process has: its command, its ports, its end. No torch."""
