"""What is wrong with an environment, found by looking at it and by playing it."""
