"""What outlives a compilation: all that runs at every step, or between steps."""
