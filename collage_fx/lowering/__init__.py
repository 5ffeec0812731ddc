"""From one rewritten program to kernels and a plan of calls. Works at compile time only."""
